"""Bytes handed to another process of this machine by name instead of through a socket.

Owns the anonymous memory behind a ``BlobRef`` and the proof that a reader got what the writer
wrote. Knows nothing of what the bytes mean. The memory has no name in any file system: it is
reached through its holder's ``/proc`` entry and vanishes with its last holder, so that a killed
process leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import ExitStack
from types import TracebackType

import xxhash

from offbeat.errors import WorkerError, boundary
from offbeat.types import BlobRef

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class OwnedBlob:
    """A blob and the right to end it: readable through ``ref`` until ``close``, never changed."""

    def __init__(self, fd: int, ref: BlobRef) -> None:
        self._fd = fd
        self.ref = ref

    def close(self) -> None:
        """Give the memory back; readers that have it open keep it. Closing twice does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> OwnedBlob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def write_blob(data: bytes | memoryview) -> OwnedBlob:
    """Copy ``data`` into sealed shared memory; the caller owns the result and must close it.

    Raises:
        WorkerError: there is no memory for it.
    """
    view = memoryview(data).cast("B")
    with (
        boundary(WorkerError, f"putting {len(view):,} bytes into shared memory"),
        ExitStack() as undo,
    ):
        fd = os.memfd_create("offbeat-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, fd)
        written = 0
        while written < len(view):
            written += os.write(fd, view[written:])
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        digest = xxhash.xxh3_128_hexdigest(view)
        ref = BlobRef(uri=f"/proc/{os.getpid()}/fd/{fd}", nbytes=len(view), digest=digest)
        undo.pop_all()
    return OwnedBlob(fd, ref)


def read_blob(ref: BlobRef) -> bytes:
    """The bytes that ``ref`` names, a memory blob or a plain file.

    Raises:
        WorkerError: the blob is gone, unreadable, or not what ``ref`` says; names the uri.
    """
    try:
        # O_NONBLOCK: once its owner closed it the name may belong to a pipe; opening could hang.
        with open(os.open(ref.uri, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise WorkerError(f"blob {ref.uri} is not a file or memory: its owner let it go")
            if info.st_size != ref.nbytes:
                raise WorkerError(f"blob {ref.uri} has {info.st_size} bytes, expected {ref.nbytes}")
            data = file.read()
    except OSError as exc:
        raise WorkerError(f"blob {ref.uri} cannot be read: {exc.strerror or exc}") from exc
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != ref.digest:
        raise WorkerError(f"blob {ref.uri} has digest {digest}, expected {ref.digest}")
    return data
