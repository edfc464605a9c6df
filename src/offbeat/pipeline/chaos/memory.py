"""Resident memory of a run's processes over time, and whether it stays flat.

Pure: values in, values out. A process that was replaced goes on under its name; what a new one
holds while it loads its model does not count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

SETTLING_SECONDS = 10.0
"""The first part of each process's life, in which it loads what it needs."""

TOLERANCE = 0.05
"""What may be held more in the last third than in the first, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Median bytes of one name in the first and in the last third of the time watched."""

    name: str
    first: float
    last: float

    @property
    def flat(self) -> bool:
        """Whether no more is held than at first, within the tolerance."""
        return self.last <= self.first * (1 + TOLERANCE)


class MemoryLog:
    """Samples of all processes; seconds from any zero."""

    def __init__(self) -> None:
        self._born: dict[tuple[str, int], float] = {}
        self._samples: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def add(self, resident: Mapping[tuple[str, int], int], now: float) -> None:
        """One look at every process: bytes by name and number. Of a name the largest counts."""
        largest: dict[str, int] = {}
        for key, size in resident.items():
            if now - self._born.setdefault(key, now) >= SETTLING_SECONDS:
                largest[key[0]] = max(size, largest.get(key[0], 0))
        for name, size in largest.items():
            self._samples[name].append((now, size))

    def growth(self) -> list[Growth]:
        """Of each name that was there in the first and in the last third."""
        times = [at for samples in self._samples.values() for at, _ in samples]
        if not times:
            return []
        third = (max(times) - min(times)) / 3
        found = []
        for name, samples in sorted(self._samples.items()):
            first = [size for at, size in samples if at <= min(times) + third]
            last = [size for at, size in samples if at >= max(times) - third]
            if first and last:
                middle = statistics.median
                found.append(Growth(name=name, first=middle(first), last=middle(last)))
        return found
