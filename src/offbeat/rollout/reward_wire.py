"""What the controller and a reward process say to each other: frames over a socketpair.

Owns the messages and their encoding (4 bytes of length, little endian, then msgpack); knows neither
side. A reward function and its arguments travel as pickles inside a message, only ever towards the
controller's own child. What comes back is plain data, never an exception object: a class that
cannot be rebuilt here must not break the reader.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

LENGTH = struct.Struct("<I")
"""The frame's header: bytes of the payload that follows."""

CELL = struct.Struct("<q")
"""Shared memory of one process: the job that it runs at this moment, or 0."""


class LoadNamed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Resolve ``spec`` ("module:attr"), first in ``search_dir``, then along ``sys_path``.

    ``args`` is the pickle of the function's fixed arguments, ``key`` its place in the
    configuration.
    """

    spec: str
    search_dir: str | None
    sys_path: list[str]
    args: bytes
    key: str


class LoadPickled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rebuild the function from cloudpickle bytes; its modules are found along ``sys_path``.

    ``args`` and ``key`` as in ``LoadNamed``.
    """

    pickled: bytes
    sys_path: list[str]
    args: bytes
    key: str


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call the function; ``request`` is the pickle of a ``Request`` of signatures.py."""

    job: int
    request: bytes


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel an asynchronous job."""

    job: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function is there.

    ``concurrent``: it is asynchronous and takes many jobs at a time. ``batched``: one call takes
    all answers of a group. ``complaint``: why it cannot score answers, empty when it can.
    """

    concurrent: bool
    batched: bool = False
    complaint: str = ""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function could not be loaded; trying again would not help."""

    reason: str
    traceback: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function returned a finite number and, by name, the parts it was made of."""

    job: int
    value: float
    parts: dict[str, float]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function raised or returned something else than a reward; ``error`` is a class name."""

    job: int
    error: str
    reason: str
    traceback: str


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The function scored the answers of a request: one entry for each, in order."""

    job: int
    each: list[Answer | Failed]


class Canceled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The asynchronous job ended by cancellation."""

    job: int


Load: TypeAlias = LoadNamed | LoadPickled
ToWorker: TypeAlias = LoadNamed | LoadPickled | Call | Cancel
FromWorker: TypeAlias = Loaded | LoadFailed | Answer | Answers | Failed | Canceled

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    """``message`` with its header, ready to be written."""
    payload = _encoder.encode(message)
    return LENGTH.pack(len(payload)) + payload


def read_order(payload: bytes) -> ToWorker:
    """The controller's message in ``payload``."""
    return _to_worker.decode(payload)


def read_reply(payload: bytes) -> FromWorker:
    """The process's message in ``payload``."""
    return _from_worker.decode(payload)
