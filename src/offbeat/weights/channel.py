"""The seam between trainer and generators for weights, and the implementations by name.

A publisher lives in the trainer process, a subscriber in each generator process; what travels
between them is a ``WeightUpdate``. Knows nothing of who calls when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from offbeat.types import PolicyVersion, WeightUpdate
from offbeat.weights.memory import LiveWeights, MemoryPublisher, MemorySubscriber


class WeightPublisher(Protocol):
    """Makes the live parameters readable for other processes."""

    def publish(self, version: PolicyVersion) -> WeightUpdate:
        """Announce the parameters as they are now; the previous update may be overwritten."""

    def close(self) -> None:
        """Give up what was published; may be called twice."""


class WeightSubscriber(Protocol):
    """Brings published weights into the parameters of this process."""

    def stage(self, update: WeightUpdate) -> None:
        """Open and verify ``update`` without touching the parameters. Raises WeightSyncError."""

    def commit(self, version: PolicyVersion) -> None:
        """Put the staged weights into the parameters. Raises WeightSyncError if not staged."""

    def digest_of_live(self) -> str:
        """Digest of the parameters; equals the committed update's when the dtypes agree."""

    def close(self) -> None:
        """Let go of what is staged; may be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChannel:
    """How to build both ends."""

    publisher: Callable[[Iterable[tuple[str, torch.Tensor]]], WeightPublisher]
    subscriber: Callable[[Mapping[str, torch.Tensor] | LiveWeights], WeightSubscriber]


CHANNELS: dict[str, WeightChannel] = {
    "memory": WeightChannel(publisher=MemoryPublisher, subscriber=MemorySubscriber),
}
