"""When an engine's forward passes ran.

Owns the intervals between two polls. Knows no passes: the engine thread adds, the event loop takes.
"""

from __future__ import annotations

import threading
from collections import deque


class BusySpans:
    """When a kind of forward pass ran; written by the engine thread, taken by the loop.

    Spans less than ``GAP`` seconds apart are joined: a steady stream of steps is one span. Of more
    than ``MOST`` the oldest are forgotten: nobody polls an engine that serves by itself.
    """

    GAP = 1e-3
    MOST = 100_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[tuple[float, float]] = deque(maxlen=self.MOST)

    def add(self, start: float, end: float) -> None:
        with self._lock:
            if self._spans and start - self._spans[-1][1] < self.GAP:
                start = self._spans.pop()[0]
            self._spans.append((start, end))

    def take(self) -> tuple[tuple[float, float], ...]:
        """Everything since the last call."""
        with self._lock:
            spans = tuple(self._spans)
            self._spans.clear()
        return spans
