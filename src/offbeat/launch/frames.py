"""The two messages of a worker's birth: what it is told, and what it answers.

Owns their form on the control connection: an 8-byte little-endian length, then msgpack. The
connection stays open afterwards and carries nothing more; its end means that the other side is
gone.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from offbeat.launch.calls import Fault
from offbeat.launch.codec import encode

LENGTH = struct.Struct("<Q")


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """All a worker is told, the token too: argv and environment can be read by others."""

    name: str
    target: str
    payload: bytes
    token: str
    host: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker serves at ``url``."""

    url: str


Birth: TypeAlias = Ready | Fault


def frame(message: WorkerStart | Birth) -> bytes:
    """``message`` with its length in front."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body
