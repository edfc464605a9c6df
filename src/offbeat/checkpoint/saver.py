"""When to save, and model folders saved through a background process.

Owns the cadence (``SaveSchedule``, a state machine without clocks) and what is asked of the writer
(``Saver``). Knows no torch and no weights: it passes on where they lie. Both modes run the same
function in the same process, so their folders are equal byte for byte; they differ in what the
caller waits for.

    sync    save() ──► job ─────────────────────────────────► Done        blocked: all of it
    async   save() ──► job … Copied … training goes on … Done             blocked: nothing, or what
                             is left of the copy when the source is to change
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from offbeat.checkpoint.folders import step_folder
from offbeat.checkpoint.manager import (
    DEADLINE_SECONDS,
    AsyncCheckpointManager,
    SaveReport,
    resolve,
)
from offbeat.checkpoint.manifest import SaveManifest, is_good
from offbeat.checkpoint.writer import SaveJob
from offbeat.config import AsyncMode
from offbeat.types import WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """Where a schedule stands: the step and epoch it was last asked about, and how many seconds ago
    its timer fired.
    """

    step: int = 0
    epoch: int = 0
    elapsed_seconds: float = 0.0


class SaveSchedule:
    """Says when a save is due: each frequency has its own timer, 0 and None switch it off.

    ``freq_steps`` and ``freq_epochs`` fire when the count of completed steps or epochs passes a
    multiple of them, so a resumed run saves at the same steps; ``freq_secs`` fires that long after
    it last did.

    Args:
        freq_steps, freq_epochs: completed steps and epochs.
        freq_secs: seconds of the caller's clock.
        now: the caller's clock.
        since: where the run starts or resumes.
    """

    def __init__(
        self,
        *,
        freq_steps: int | None = None,
        freq_epochs: int | None = None,
        freq_secs: float | None = None,
        now: float,
        since: ScheduleState | None = None,
    ) -> None:
        given = {"freq_steps": freq_steps, "freq_epochs": freq_epochs, "freq_secs": freq_secs}
        for name, value in given.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self._freq_steps = freq_steps or 0
        self._freq_epochs = freq_epochs or 0
        self._freq_secs = freq_secs or 0.0
        since = since or ScheduleState()
        self._step, self._epoch = since.step, since.epoch
        self._fired = now - since.elapsed_seconds

    @property
    def is_off(self) -> bool:
        """Whether no frequency is set, so that nothing is ever due."""
        return not (self._freq_steps or self._freq_epochs or self._freq_secs)

    def state(self, now: float) -> ScheduleState:
        """Where it stands, for a schedule that goes on from here."""
        return ScheduleState(
            step=self._step, epoch=self._epoch, elapsed_seconds=max(0.0, now - self._fired)
        )

    def due(self, step: int, epoch: int, now: float) -> bool:
        """Whether to save now; asking moves the timers that fire."""
        by_step = _passed(self._freq_steps, self._step, step)
        by_epoch = _passed(self._freq_epochs, self._epoch, epoch)
        by_time = self._freq_secs > 0 and now - self._fired >= self._freq_secs
        self._step, self._epoch = step, epoch
        if by_time:
            self._fired = now
        return by_step or by_epoch or by_time


def _passed(freq: int, before: int, after: int) -> bool:
    return freq > 0 and after // freq > before // freq


class Saver:
    """Writes ``step-NNNNNN`` folders through one background process; an async context manager.

    Example:
        >>> opening = Saver.open(mode=AsyncMode.AUTO, checkpoints_dir=there, template_dir=model)
        >>> async with await opening as saver:
        ...     await saver.save(await trainer.publish(), step=10)
        ...     await saver.maybe_wait_for_staging()
        ...     update = await trainer.publish()  # overwrites what was to be saved
    """

    def __init__(
        self,
        *,
        manager: AsyncCheckpointManager,
        mode: AsyncMode,
        checkpoints_dir: Path,
        template_dir: Path,
        keep_last: int | None,
        keep_every: int | None,
    ) -> None:
        self._manager = manager
        self._mode = mode
        self._checkpoints_dir = checkpoints_dir.absolute()
        self._template_dir = template_dir.absolute()
        self._keep_last = keep_last
        self._keep_every = keep_every

    @classmethod
    async def open(
        cls,
        *,
        mode: AsyncMode,
        checkpoints_dir: Path,
        template_dir: Path,
        keep_last: int | None = None,
        keep_every: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Saver:
        """Start the writer, from the main thread: a child dies with the thread that started it.

        Args:
            keep_last: step folders to keep; 0 and None keep all.
            keep_every: beside them, keep those whose step is a multiple of this.
            deadline_seconds: bound of every wait for the writer.
        """
        mode = resolve(mode)
        manager = AsyncCheckpointManager(mode=mode, deadline_seconds=deadline_seconds)
        await manager.start()
        return cls(
            manager=manager,
            mode=mode,
            checkpoints_dir=checkpoints_dir,
            template_dir=template_dir,
            keep_last=keep_last or None,
            keep_every=keep_every,
        )

    @property
    def mode(self) -> AsyncMode:
        """``SYNC`` or ``ASYNC``."""
        return self._mode

    @property
    def writer_pid(self) -> int:
        """Process id of the background writer."""
        assert self._manager.pid is not None
        return self._manager.pid

    @property
    def restarts(self) -> int:
        """How many writers were started after the first one."""
        return self._manager.restarts

    def holds(self, step: int) -> bool:
        """Whether the folder of ``step`` is there and as it was saved; reads all of it."""
        return is_good(step_folder(self._checkpoints_dir, step))

    async def save(self, update: WeightUpdate, *, step: int, config_digest: str = "") -> None:
        """Save ``update`` as the weights of ``step``; its buffer is free again after
        ``maybe_wait_for_staging``.

        Waits for the save before this one and raises its error; this one is then not started.

        Raises:
            CheckpointError: names the step, the path and what went wrong.
        """
        path = step_folder(self._checkpoints_dir, step)
        await self._manager.save(self._job(update, step, path, config_digest), step=step, path=path)

    async def maybe_wait_for_staging(self) -> None:
        """Return when the weights given to ``save`` may change. Raises nothing."""
        await self._manager.maybe_wait_for_staging()

    async def settle(self) -> None:
        """Return when no save is in flight. Raises nothing."""
        await self._manager.settle()

    async def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its CheckpointError, once."""
        await self._manager.wait()

    def take_reports(self) -> tuple[SaveReport, ...]:
        """See ``AsyncCheckpointManager``."""
        return self._manager.take_reports()

    async def close(self) -> None:
        """Wait for the save in flight and end the writer. Raises the save's CheckpointError."""
        await self._manager.finalize()

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._manager.__aexit__(kind, exc, tb)

    def _job(self, update: WeightUpdate, step: int, path: Path, config_digest: str) -> SaveJob:
        return SaveJob(
            weights=update,
            save=SaveManifest(step=step, version=update.version, config_digest=config_digest),
            template_dir=str(self._template_dir),
            checkpoints_dir=str(self._checkpoints_dir),
            out_dir=str(path),
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            detach=self._mode is AsyncMode.ASYNC,
        )
