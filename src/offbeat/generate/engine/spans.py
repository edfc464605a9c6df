"""When an engine's forward passes ran.

Owns the intervals between two polls. Knows no passes: the engine thread adds, the event loop takes.
"""

from __future__ import annotations

import threading


class BusySpans:
    """When a kind of forward pass ran; written by the engine thread, taken by the loop.

    Spans less than ``GAP`` seconds apart are joined: a steady stream of steps is one span.
    """

    GAP = 1e-3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        with self._lock:
            if self._spans and start - self._spans[-1][1] < self.GAP:
                start = self._spans.pop()[0]
            self._spans.append((start, end))

    def take(self) -> tuple[tuple[float, float], ...]:
        """Everything since the last call."""
        with self._lock:
            spans, self._spans = tuple(self._spans), []
        return spans
