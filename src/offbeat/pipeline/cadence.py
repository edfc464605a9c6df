"""When a run evaluates, saves and takes a snapshot.

Owns the schedules and what the first and the last step add to them; knows nothing of what is done
then. A schedule that is due counts from there on, whether or not anything came of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from offbeat.checkpoint.saver import SaveSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The schedules of one run of ``steps`` steps. ``epochs`` are those that a step completes."""

    steps: int
    evaluate: SaveSchedule
    evaluate_at_start: bool
    evaluate_at_end: bool
    save: SaveSchedule
    save_at_end: bool
    snapshot: SaveSchedule = field(default_factory=lambda: SaveSchedule(now=0.0))

    def evaluation_due(self, step: int, epochs: int) -> bool:
        """Whether the version that ``step`` has made is evaluated."""
        due = self.evaluate.due(step, epochs, time.monotonic())
        return due or (step == self.steps and self.evaluate_at_end)

    def save_due(self, step: int, epochs: int) -> bool:
        """Whether it is saved as a model folder."""
        due = self.save.due(step, epochs, time.monotonic())
        return due or (step == self.steps and self.save_at_end)

    def snapshot_due(self, step: int, epochs: int) -> bool:
        """Whether a snapshot is taken after it."""
        return self.snapshot.due(step, epochs, time.monotonic())
