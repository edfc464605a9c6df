"""Whether the process that runs a run is alive: a lock that the system releases with its holder.

The controller holds ``run.lock`` locked for as long as it lives; however it ends, the lock can be
taken afterwards. A reader tries, and lets go at once. The file stays behind, empty.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from offbeat.errors import CheckpointError, ConfigError, boundary

FILE_NAME = "run.lock"

TRIES = 25
TRY_SECONDS = 0.02
"""A reader's look is over long before the last try."""


class Life(StrEnum):
    """What the lock says of a run. ``unknown``: it never had one (its file system has no locks, or
    it has not come so far), or the file cannot be read.
    """

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Count as alive until the block ends or the process does.

    On a file system without locks there is no file afterwards, and a reader does not know. Waits
    only for readers, which hold the lock for microseconds.

    Raises:
        CheckpointError: the file cannot be made.
        ConfigError: another process holds it: the run is running.
    """
    path = run_dir / FILE_NAME
    with boundary(CheckpointError, f"making {path}"):
        # Not inherited by programs that this process starts: they may outlive it.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            _lock(fd, run_dir)
        except OSError:
            path.unlink()
        yield
    finally:
        os.close(fd)


def _lock(fd: int, run_dir: Path) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if not left:
                raise ConfigError(f"trial_name: {run_dir} is still running") from exc
            time.sleep(TRY_SECONDS)
        else:
            return


def life_of(run_dir: Path) -> Life:
    """Whether some process holds the lock of ``run_dir``; changes nothing."""
    try:
        fd = os.open(run_dir / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Life.UNKNOWN
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Life.ALIVE
    except OSError:
        return Life.UNKNOWN
    else:
        return Life.DEAD
    finally:
        os.close(fd)
