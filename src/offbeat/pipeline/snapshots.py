"""A snapshot's way from the trainer to the disk, between two updates of the loop.

Owns the one that was taken and waits for its step's record: a resumed run begins with the step
after it, so what it does not do again must be on disk first, the evaluation of that version
included. Knows neither the line nor the schedule.

    take(state) ──► the trainer copies        … the step's record is written, when it is complete …
    recorded(step) ──► record on disk ──► the background writer   … training goes on …
    take(state) waits here for it, and raises what went wrong
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.checkpoint.snapshot import RunState, Snapshots
from offbeat.errors import WeightSyncError
from offbeat.pipeline.recorder import Recorder
from offbeat.protocols import Trainer
from offbeat.types import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    run: RunState
    trainer: TrainerState


class SnapshotTaker:
    """Takes snapshots of one run.

    Args:
        snapshots: where they are written; closed by whoever opened it.
        trainer: must not update while ``take`` runs.
        recorder: has the records of the steps.
    """

    def __init__(self, snapshots: Snapshots, trainer: Trainer, recorder: Recorder) -> None:
        self._snapshots = snapshots
        self._trainer = trainer
        self._recorder = recorder
        self._taken: _Taken | None = None

    async def ready(self) -> None:
        """Wait until the snapshot before is on disk. Raises its CheckpointError."""
        await self._snapshots.ready()

    async def take(self, run: RunState) -> None:
        """Copy the trainer's state, which belongs to ``run``; ``ready`` has returned before.

        Raises:
            WeightSyncError: the trainer holds another version.
        """
        trainer = await self._trainer.snapshot()
        if trainer.tensors.version != run.version:
            raise WeightSyncError(
                f"the trainer's snapshot is of version {trainer.tensors.version}, live is "
                f"{run.version}"
            )
        self._taken = _Taken(run=run, trainer=trainer)

    async def recorded(self, step: int) -> None:
        """The record of ``step`` was handed to the recorder: write that step's snapshot, if any.

        Raises:
            CheckpointError: the one before could not be written.
        """
        taken = self._taken
        if taken is None or taken.run.step != step:
            return
        self._taken = None
        await self._recorder.flush()
        await self._snapshots.write(taken.run, taken.trainer)
