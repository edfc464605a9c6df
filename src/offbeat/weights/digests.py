"""The digest of each published tensor: what names the first one that two runs disagree on.

Reads the memory that a ``WeightUpdate`` names, without torch and without mapping the tensors: the
reader's memory does not grow by a copy of the model. Knows no model and no versions.
"""

from __future__ import annotations

import mmap
import os

import xxhash

from offbeat.errors import WeightSyncError, boundary
from offbeat.types import WeightUpdate
from offbeat.weights.layout import Placed, read_layout

_CHUNK = 1 << 20


def tensor_digests(update: WeightUpdate) -> dict[str, str]:
    """xxh3-64 (hex) of the bytes of each tensor by its name, in the order of the file.

    ``update`` must stay published until this returns.

    Raises:
        WeightSyncError: it is gone, or no safetensors file.
    """
    with boundary(WeightSyncError, f"read version {update.version} from {update.uri}"):
        fd = os.open(update.uri, os.O_RDONLY)
        try:
            with (
                mmap.mmap(fd, update.nbytes, prot=mmap.PROT_READ) as memory,
                memoryview(memory) as content,
            ):
                layout = read_layout(content)  # touches the header only
            buffer = memoryview(bytearray(_CHUNK))
            return {placed.spec.name: _digest(fd, placed, buffer) for placed in layout.tensors}
        finally:
            os.close(fd)


def _digest(fd: int, placed: Placed, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    position, end = placed.start, placed.start + placed.spec.nbytes
    while position < end:
        read = os.preadv(fd, [buffer[: end - position]], position)
        if read == 0:
            raise EOFError(f"tensor {placed.spec.name!r} ends at byte {position} of {end}")
        digest.update(buffer[:read])
        position += read
    return str(digest.hexdigest())
