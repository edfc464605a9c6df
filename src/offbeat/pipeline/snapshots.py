"""A snapshot's way from the trainer to the disk, between two updates of the loop.

Owns the one that was taken and waits for its step's record: a resumed run begins with the step
after it, so what it does not do again must be on disk first, the evaluation of that version
included. Knows neither the line nor the schedule.

    take(state) ──► the trainer copies        … training goes on, up to its optimizer step …
    recorded(step) ──► record on disk ──► the background writer   … training goes on …
    ready() waits here for it, and raises what went wrong
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from offbeat.checkpoint.snapshot import RunState
from offbeat.errors import WeightSyncError
from offbeat.pipeline.recorder import Recorder
from offbeat.pipeline.save_policy import ModelWriter, SnapshotWriter
from offbeat.protocols import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A snapshot on its way; ``recorded`` is set when its step's record was handed over."""

    run: RunState
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


class SnapshotTaker:
    """Takes snapshots of one run.

    Args:
        snapshots: where they are written; closed by whoever opened it.
        trainer: must not update while ``take`` runs.
        recorder: has the records of the steps.
        saver: writes the model folders that lie beside them, if any.
    """

    def __init__(
        self,
        snapshots: SnapshotWriter,
        trainer: Trainer,
        recorder: Recorder,
        saver: ModelWriter | None,
    ) -> None:
        self._snapshots = snapshots
        self._trainer = trainer
        self._recorder = recorder
        self._saver = saver
        self._taken: _Taken | None = None
        self._writing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the snapshot before is on disk. Raises its CheckpointError."""
        if self._writing is not None:
            await self._writing
        await self._snapshots.ready()

    async def take(self, run: RunState, tasks: asyncio.TaskGroup) -> None:
        """Have the trainer begin to copy its state, which belongs to ``run``; ``ready`` has
        returned before, and ``tasks`` gets the rest.

        Raises:
            WeightSyncError: the trainer holds another version.
        """
        version = await self._trainer.begin_snapshot()
        if version != run.version:
            raise WeightSyncError(
                f"the trainer's snapshot is of version {version}, live is {run.version}"
            )
        taken = self._taken = _Taken(run=run)
        self._writing = tasks.create_task(self._write(taken), name=f"snapshot of step {run.step}")

    def recorded(self, step: int) -> None:
        """The record of ``step`` was handed to the recorder: that step's snapshot may be
        written.
        """
        if self._taken is not None and self._taken.run.step == step:
            self._taken.recorded.set()

    async def _write(self, taken: _Taken) -> None:
        trainer = await self._trainer.snapshot()
        await taken.recorded.wait()
        await self._recorder.flush()
        if self._saver is not None and not taken.run.saved:
            # A folder of an earlier step may be in flight, and cannot be made again from here.
            await self._saver.settle()
        await self._snapshots.write(taken.run, trainer)
