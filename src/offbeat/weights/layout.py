"""The byte layout of a safetensors file, and the digest of its bytes.

Owns where each tensor lies and what the header says; knows no torch, no processes and no files.
The layout is a pure function of the set of (name, dtype, shape): tensors are ordered by element
size (largest first), then by name, so that every tensor is aligned and two processes that hold the
same tensors write the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
}
"""Bytes per element of every dtype code that both torch and safetensors know."""

_ALIGN = 64
_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as the file names it; ``dtype`` is a safetensors code such as ``BF16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of elements times ``ITEM_BYTES``; 0 for an empty tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor and its first byte, counted from the start of the file."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``header`` (length prefix included), then the tensors back to back; ``nbytes`` in all."""

    header: bytes
    tensors: tuple[Placed, ...]
    nbytes: int


def lay_out(specs: Iterable[TensorSpec]) -> Layout:
    """Place ``specs``. Raises ValueError when a name comes twice or a dtype has no code."""
    ordered = sorted(specs, key=lambda spec: (-_item_bytes(spec), spec.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in ordered:
        if spec.name in entries:
            raise ValueError(f"tensor {spec.name!r} is given twice")
        span = [offset, offset + spec.nbytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": span}
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGN)
    header = _LENGTH.pack(len(text)) + text
    return Layout(
        header=header,
        tensors=tuple(_place(ordered, len(header))),
        nbytes=len(header) + offset,
    )


def _item_bytes(spec: TensorSpec) -> int:
    if spec.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {spec.name!r}: dtype {spec.dtype} has no safetensors code")
    return ITEM_BYTES[spec.dtype]


def _place(specs: Iterable[TensorSpec], start: int) -> Iterable[Placed]:
    for spec in specs:
        yield Placed(spec=spec, start=start)
        start += spec.nbytes


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_layout(content: Buffer) -> Layout:
    """The layout that ``content`` (a whole safetensors file, from any writer) announces.

    Raises:
        ValueError: the header is torn, or a tensor's place is outside the file or not its size.
    """
    if len(content) < _LENGTH.size:
        raise ValueError(f"{len(content)} bytes are too short for a safetensors header")
    end = _LENGTH.size + _LENGTH.unpack(content[: _LENGTH.size])[0]
    if end > len(content):
        raise ValueError(f"the safetensors header ends at byte {end} of {len(content)}")
    raw = json.loads(bytes(content[_LENGTH.size : end]))
    raw.pop("__metadata__", None)
    entries = msgspec.convert(raw, dict[str, _Entry])
    tensors = tuple(_checked(name, entry, end, len(content)) for name, entry in entries.items())
    return Layout(header=bytes(content[:end]), tensors=tensors, nbytes=len(content))


def _checked(name: str, entry: _Entry, data_start: int, file_end: int) -> Placed:
    spec = TensorSpec(name=name, dtype=entry.dtype, shape=entry.shape)
    begin, end = entry.data_offsets
    _item_bytes(spec)
    if begin < 0 or end - begin != spec.nbytes or data_start + end > file_end:
        raise ValueError(
            f"tensor {name!r} does not fit its place in the file: bytes {begin}..{end}"
        )
    return Placed(spec=spec, start=data_start + begin)


def digest_of(*parts: Buffer) -> str:
    """xxh3-128 (hex) of ``parts`` in a row; other threads run while a chunk is hashed."""
    digest = xxhash.xxh3_128()
    for part in parts:
        with memoryview(part).cast("B") as view:
            for start in range(0, len(view), _CHUNK):
                digest.update(view[start : start + _CHUNK])
    return str(digest.hexdigest())
