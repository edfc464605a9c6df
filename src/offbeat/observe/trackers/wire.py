"""What the controller and a tracker's process say to each other: one msgpack message per packet.

Consumed by both sides; knows neither. A packet travels whole or not at all, so that a reader is
never left in the middle of one.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PACKET_BYTES = 1 << 20
"""Room for the largest packet that is read."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The metrics of one step."""

    step: int
    metrics: dict[str, float]


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run is over: a value of ``RunStatus``, and the message of a failed one."""

    status: str
    error: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tracker has begun its record."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tracker raised; its process ends."""

    reason: str


ToTracker: TypeAlias = Step | Finish
FromTracker: TypeAlias = Ready | Failed

encode = msgspec.msgpack.encode


def read_order(packet: bytes) -> ToTracker:
    """The message that the controller sent."""
    return msgspec.msgpack.decode(packet, type=ToTracker)


def read_news(packet: bytes) -> FromTracker:
    """The message that the tracker's process sent."""
    return msgspec.msgpack.decode(packet, type=FromTracker)
