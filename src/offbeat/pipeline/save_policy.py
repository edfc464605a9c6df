"""What becomes of a run whose disk is full, read-only or slow: ``on_error``, and one warning.

Owns the decision about a save that failed, and the wait for one that is slow. ``ModelSaves`` and
``SnapshotSaves`` stand between the loop and the two writers, so that neither of those knows of it.
Knows no schedule: whoever asks for a save does so when the next one is due.

    stop       the error ends the run
    continue   the error is logged, counted and left behind; of the last step's save it ends the run
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from offbeat.checkpoint.saver import Saver
from offbeat.checkpoint.snapshot import RunState, Snapshots
from offbeat.config import OnError
from offbeat.errors import CheckpointError
from offbeat.observe.terminal import size
from offbeat.types import TrainerState, WeightUpdate

log = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""A wait for the save before that takes longer is worth a warning."""


class ModelWriter(Protocol):
    """What the loop asks of whoever saves model folders: ``Saver``, or one under a policy."""

    def holds(self, step: int) -> bool:
        """See ``Saver``."""

    async def save(self, update: WeightUpdate, *, step: int) -> None:
        """See ``Saver``."""

    async def maybe_wait_for_staging(self) -> None:
        """See ``Saver``."""

    async def settle(self) -> None:
        """See ``Saver``."""


class SnapshotWriter(Protocol):
    """What is asked of whoever writes snapshots: ``Snapshots``, or one under a policy."""

    async def ready(self) -> None:
        """See ``Snapshots``."""

    async def write(self, run: RunState, trainer: TrainerState) -> None:
        """See ``Snapshots``."""


class SavePolicy:
    """Decides what a failed save of one kind does, and says when saves are slow.

    Args:
        section: the section of the configuration that has its keys: saver or recover.
        on_error: that section's key.
        directory: where its folders are.
        on_failure: told of each error that is left behind.
    """

    def __init__(
        self, section: str, on_error: OnError, directory: Path, on_failure: Callable[[str], None]
    ) -> None:
        self._section = section
        self._continues = on_error is OnError.CONTINUE
        self._directory = directory
        self._on_failure = on_failure
        self._warned = False

    @contextmanager
    def deciding(self, *, is_last: bool = False) -> Iterator[None]:
        """Around what raises a save's CheckpointError; that of the ``is_last`` one ends the run."""
        try:
            yield
        except CheckpointError as exc:
            if not self._continues or is_last:
                exc.add_note(self._advice(is_last=is_last))
                raise
            log.error(
                "%s; training goes on without it, as %s.on_error says, and saves again when that "
                "is due. %s",
                exc,
                self._section,
                _space_of(self._directory),
            )
            self._on_failure(str(exc))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for the save before, which a disk that is fast enough has long ended."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        if seconds < SLOW_SECONDS or self._warned:
            return
        self._warned = True
        log.warning(
            "training waited %.1f s for a save that was still being written to %s when the next "
            "was due: save less often (%s.freq_steps, %s.freq_secs), or to a faster disk "
            "(fileroot)",
            seconds,
            self._directory,
            self._section,
            self._section,
        )

    def _advice(self, *, is_last: bool) -> str:
        way_on = (
            "it was the save of the last step, without which the training is lost"
            if is_last and self._continues
            else f"{self._section}.on_error=continue trains on without a save that fails"
        )
        return f"{_space_of(self._directory)}; {way_on}"


def _space_of(directory: Path) -> str:
    """What the disk says by itself of why it refused."""
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is in the way: it is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to: change its permissions"
    try:
        free = size(shutil.disk_usage(there).free)
    except OSError as exc:
        return f"{there} cannot be looked at: {exc}"
    return f"{there} is on a file system with {free} free"


class ModelSaves:
    """A ``Saver`` under a policy.

    Args:
        saver: closed by whoever opened it.
        policy: of the section saver.
        last_step: the step whose save must not fail.
    """

    def __init__(self, saver: Saver, policy: SavePolicy, *, last_step: int) -> None:
        self._saver = saver
        self._policy = policy
        self._last_step = last_step
        self._begun = 0

    def holds(self, step: int) -> bool:
        """See ``Saver``."""
        return self._saver.holds(step)

    async def save(self, update: WeightUpdate, *, step: int) -> None:
        """Save ``update`` as the weights of ``step``, whatever became of the save before."""
        with self._policy.waiting():
            await self.wait()
        self._begun = step
        with self._policy.deciding(is_last=self._is_last):
            await self._saver.save(update, step=step)

    async def maybe_wait_for_staging(self) -> None:
        """See ``Saver``."""
        await self._saver.maybe_wait_for_staging()

    async def settle(self) -> None:
        """See ``Saver``."""
        await self._saver.settle()

    async def wait(self) -> None:
        """Wait for the save in flight, if any, and decide about its error."""
        with self._policy.deciding(is_last=self._is_last):
            await self._saver.wait()

    @property
    def _is_last(self) -> bool:
        return self._begun == self._last_step


class SnapshotSaves:
    """``Snapshots`` under a policy.

    Args:
        snapshots: closed by whoever opened them.
        policy: of the section recover.
    """

    def __init__(self, snapshots: Snapshots, policy: SavePolicy) -> None:
        self._snapshots = snapshots
        self._policy = policy

    async def ready(self) -> None:
        """Wait for the snapshot in flight, if any, and decide about its error."""
        with self._policy.waiting(), self._policy.deciding():
            await self._snapshots.ready()

    async def write(self, run: RunState, trainer: TrainerState) -> None:
        """Hand a generation over, whatever became of the one before."""
        with self._policy.deciding():
            await self._snapshots.write(run, trainer)
