"""The three ways this room touches a disk: append whole lines, replace a whole file, and give up
after one failure.

A line is either there completely or it is cut off again; a replaced file is either the old or the
new one. Nothing is flushed to the device: what a killed process wrote stays in the system's page
cache, and nothing in this room is needed to resume a run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import OffbeatError, WorkerError, boundary

log = logging.getLogger(__name__)

_TAIL = 1 << 16

_DISK_ADVICE = " Free space or fix the permissions there, then resume the run to record again."


def append_lines(path: Path, lines: bytes) -> None:
    """Append ``lines`` (each ended by a newline) to ``path``, creating it and its folder.

    A half line that a killed writer left at the end is cut off first; a write that fails half-way
    (disk full) is cut off again, so that the file always ends with a whole line.

    Raises:
        OSError: the file cannot be opened or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        whole = _cut_half_line(fd)
        try:
            _write_all(fd, lines)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, whole)
            raise
    finally:
        os.close(fd)


def _cut_half_line(fd: int) -> int:
    """Truncate to the last newline and return the size."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - _TAIL)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        end = start
        if newline >= 0:
            end = start + newline + 1
            break
    if end < size:
        os.ftruncate(fd, end)
    return end


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write aside; renamed to ``path`` when the block ends well, removed when it does
    not.

    Raises:
        OSError: the folder cannot be made or the file not renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


class Guard:
    """Runs writes until one fails: that one is logged, later ones are skipped, and training goes
    on.

    Args:
        what: what is being recorded, for the log line ("metrics").
        where: the path or target, for the log line.
    """

    def __init__(self, what: str, where: object) -> None:
        self._what = what
        self._where = where
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why recording ended, or None while it goes on."""
        return self._failure

    def run(self, write: Callable[[], None]) -> bool:
        """Run ``write``; returns whether it succeeded. Never raises for a failed write."""
        if self._failure is not None:
            return False
        try:
            with boundary(WorkerError, f"writing {self._what} to {self._where}"):
                write()
        except OffbeatError as exc:
            self._failure = str(exc)
            log.error(
                "%s. No more %s will be written there in this run; training goes on.%s",
                exc,
                self._what,
                _DISK_ADVICE if isinstance(exc.__cause__, OSError) else "",
            )
            return False
        return True
