"""Snapshots: all that a run needs to continue as if it had not stopped.

Owns what a snapshot holds, how one is written in the background, and which one a resumed run starts
from. Knows no torch and no pipeline: tensors are a safetensors file, the rest is ``RunState``.

    snapshots/step-000100/
      trainer.safetensors   float32 weights, optimizer moments, random state
      state.json            ``SnapshotState``: the controller's state, the trainer's machine
      manifest.json         sizes and hashes

One generation is one folder that appears by a rename, so it is whole or not there. It holds the
state at one moment between two updates: what the ledger and the line knew then, and the weights
that were live. The prompts, the random stream of each answer and the order of the minibatches
follow from the seed, the group ids and the version, so these numbers are their whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.checkpoint.folders import step_folder, step_folders, sweep
from offbeat.checkpoint.manager import DEADLINE_SECONDS, AsyncCheckpointManager, SaveReport
from offbeat.checkpoint.manifest import SaveManifest, read_json, verify
from offbeat.checkpoint.saver import ScheduleState
from offbeat.checkpoint.writer import STATE_NAME, TENSORS_NAME, SnapshotJob
from offbeat.config import AsyncMode
from offbeat.errors import CheckpointError, CorruptCheckpoint, boundary
from offbeat.types import DropReason, Environment, GroupId, PolicyVersion, TrainerState

log = logging.getLogger(__name__)

FOLDER = "snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What happened since the last step record: it belongs to the next one."""

    admitted: int = 0
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    restarts: int = 0
    failed_saves: int = 0
    failed_snapshots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The controller's state at one moment after ``step``, whose ``version`` is live.

    ``open_groups`` were admitted and neither trained nor dropped, in the order of the line;
    ``next_group_id`` was never admitted. ``saved``: a model folder of this step was begun.
    ``save``, ``evaluate`` and ``snapshot`` are the timers of the three frequencies.

    Not here, because they start afresh: the counts of failures and of groups without signal, which
    can only end a run.
    """

    step: int
    version: PolicyVersion
    attempt: int
    next_group_id: GroupId
    open_groups: tuple[GroupId, ...]
    lookahead: int
    counts: Counts
    saved: bool
    save: ScheduleState
    evaluate: ScheduleState
    snapshot: ScheduleState


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotState:
    """The content of ``state.json``. ``optimizer_steps`` is the place in the learning-rate
    schedule.
    """

    run: RunState
    optimizer_steps: int
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One verified generation."""

    folder: Path
    state: SnapshotState

    @property
    def tensors(self) -> Path:
        """The trainer's tensors."""
        return self.folder / TENSORS_NAME


class Snapshots:
    """Writes generations in the background; an async context manager.

    Args:
        snapshots_dir: where; made when the first one is written.
        needs: files that hold the rest of what a resumed run reads. They are flushed before each
            generation, which thus never knows of more than a crash of the machine leaves.
        keep: how many of the newest stay.
        deadline_seconds: bound of every wait for the writer.
    """

    def __init__(
        self,
        snapshots_dir: Path,
        *,
        needs: Sequence[Path] = (),
        keep: int,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._dir = snapshots_dir.absolute()
        self._needs = tuple(str(path.absolute()) for path in needs)
        self._keep = keep
        self._manager = AsyncCheckpointManager(
            mode=AsyncMode.ASYNC, deadline_seconds=deadline_seconds
        )

    @property
    def writer_pid(self) -> int | None:
        """Process id of the background writer; None before the first generation."""
        return self._manager.pid

    async def ready(self) -> None:
        """Wait until the one before is on disk and its tensors may be overwritten.

        Raises:
            CheckpointError: it could not be written.
        """
        await self._manager.wait()

    async def write(self, run: RunState, trainer: TrainerState) -> None:
        """Hand a generation over; its tensors must stay as they are until ``ready`` returns.

        Raises:
            CheckpointError: the one before could not be written; this one is then not started.
        """
        state = SnapshotState(
            run=run, optimizer_steps=trainer.optimizer_steps, environment=trainer.environment
        )
        path = step_folder(self._dir, run.step)
        job = SnapshotJob(
            tensors=trainer.tensors,
            state=msgspec.json.format(msgspec.json.encode(state)).decode() + "\n",
            save=SaveManifest(step=run.step, version=run.version),
            snapshots_dir=str(self._dir),
            out_dir=str(path),
            needs=self._needs,
            keep=self._keep,
        )
        await self._manager.save(job, step=run.step, path=path)

    def take_reports(self) -> tuple[SaveReport, ...]:
        """See ``AsyncCheckpointManager``."""
        return self._manager.take_reports()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._manager.__aexit__(kind, exc, tb)


def read_snapshot(folder: Path) -> Snapshot:
    """Verify ``folder`` against its manifest and read its state.

    Raises:
        CorruptCheckpoint: names the file that is missing, damaged or of another format.
    """
    verify(folder)
    return Snapshot(folder=folder, state=read_state(folder))


def read_state(folder: Path) -> SnapshotState:
    """The state of the snapshot in ``folder``, not verified.

    Raises:
        CorruptCheckpoint: it cannot be read.
    """
    return read_json(folder / STATE_NAME, SnapshotState)


def newest_snapshot(snapshots_dir: Path) -> Snapshot | None:
    """The newest generation that verifies; each newer one is refused by name in the log.

    For whoever is the directory's writer now: what a killed one left unfinished is removed. None
    where nothing was ever written.

    Raises:
        CheckpointError: there are generations, and none of them can be used.
    """
    with boundary(CheckpointError, f"tidy {snapshots_dir}"):
        sweep(snapshots_dir)
        folders = step_folders(snapshots_dir)
    refused: list[str] = []
    for folder in folders:
        try:
            return read_snapshot(folder)
        except CorruptCheckpoint as exc:
            log.error("the snapshot %s is damaged and not used: %s", folder, exc)
            refused.append(str(exc))
    if refused:
        raise CheckpointError(
            f"{snapshots_dir}: none of the {len(refused)} snapshots can be used: "
            f"{'; '.join(refused)}; move the folder away to start this run over"
        )
    return None
