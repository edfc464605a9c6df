"""Where the time of the training loop went: seconds by what the trainer did or waited for.

Owns the split and the incremental arithmetic behind it; decides nothing (see `limits`). Times are
CLOCK_MONOTONIC seconds. Every second of the loop counts in exactly one part::

    training     an update ran
    evaluation   an evaluation ran, and none of training, publishing, saving
    generation   the trainer waited for groups, and an engine computed
    rewards      it waited, no engine computed, and a reward call ran
    idle         it waited, and nothing of that ran: requests and rewards on their way
    publishing   new weights were laid out, staged or committed
    saving       training stood still for a save
    rest         none of these

The loop lasts from the first wait to the end of the last span. ``starting`` is what came before,
processes and models being loaded; ``ending`` what came after, processes being stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.observe.spans import Interval, SpanName, merge, overlap_seconds, total_seconds

_PUBLISHING = (SpanName.PUBLISH, SpanName.STAGE, SpanName.COMMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Seconds by part; all but ``starting`` and ``ending`` add up to ``loop``."""

    starting: float
    training: float
    generation: float
    rewards: float
    idle: float
    evaluation: float
    publishing: float
    saving: float
    rest: float
    ending: float

    @property
    def loop(self) -> float:
        """Seconds from the first wait to the end of the last span."""
        return self.training + self.waiting + self.evaluation + self.overhead

    @property
    def waiting(self) -> float:
        """Seconds in which the trainer waited for groups and no evaluation ran."""
        return self.generation + self.rewards + self.idle

    @property
    def overhead(self) -> float:
        """Seconds of publishing, saving and the rest."""
        return self.publishing + self.saving + self.rest


class Timeline:
    """Adds up a `TimeSplit` while a run goes on, without keeping every span.

    Spans may come in any order within a step. `settle` is called when all that ended before is
    known, once per step; engine and reward spans are held back until the wait they may lie in has
    been reported.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._first_wait: float | None = None
        self._last_end = started
        self._waits: list[Interval] = []
        self._evaluations: list[Interval] = []
        self._occupied: list[Interval] = []
        self._engines: list[Interval] = []
        self._rewards: list[Interval] = []
        self._seconds = dict.fromkeys(
            ("training", "generation", "rewards", "idle", "evaluation", "publishing", "saving"), 0.0
        )

    def add(self, name: SpanName, start: float, end: float) -> None:
        """One span of the controller or the trainer; kinds that occupy nobody are left out."""
        interval = (start, end)
        self._last_end = max(end, self._last_end)
        if name is SpanName.WAIT:
            self._first_wait = start if self._first_wait is None else self._first_wait
            self._waits.append(interval)
        elif name is SpanName.REWARD:
            self._rewards.append(interval)
        elif name is SpanName.EVAL:
            self._evaluations.append(interval)
        elif name is SpanName.TRAIN:
            self._occupy("training", interval)
        elif name in _PUBLISHING:
            self._occupy("publishing", interval)
        elif name is SpanName.SAVE:
            self._occupy("saving", interval)

    def _occupy(self, part: str, interval: Interval) -> None:
        self._seconds[part] += interval[1] - interval[0]
        self._occupied.append(interval)

    def add_engine(self, busy: Iterable[Interval]) -> None:
        """Forward passes of one engine since its last poll."""
        self._engines.extend(busy)

    def settle(self) -> None:
        """Fold in the waits and evaluations reported since the last call.

        What they may overlap is complete: an evaluation is reported after the wait and the update
        it ran beside, engines have been polled since, and a reward call that still runs belongs to
        no group that was waited for.
        """
        evaluations = merge(self._evaluations)
        waits = without(self._waits, evaluations)
        engines = merge(self._engines)
        no_engine = without(waits, engines)
        generation = total_seconds(waits) - total_seconds(no_engine)
        rewards = overlap_seconds(no_engine, self._rewards)
        self._seconds["generation"] += generation
        self._seconds["rewards"] += rewards
        self._seconds["idle"] += max(0.0, total_seconds(no_engine) - rewards)
        self._seconds["evaluation"] += total_seconds(without(evaluations, self._occupied))
        if self._waits:
            last = max(end for _, end in self._waits)
            self._engines = [i for i in engines if i[1] > last]
            self._rewards = [i for i in self._rewards if i[1] > last]
        self._waits, self._evaluations, self._occupied = [], [], []

    def split(self, now: float) -> TimeSplit:
        """The parts up to ``now``, of what was settled."""
        if self._first_wait is None:
            first = last = now
        else:
            first, last = self._first_wait, min(now, self._last_end)
        return TimeSplit(
            starting=first - self._started,
            ending=now - last,
            rest=max(0.0, last - first - sum(self._seconds.values())),
            **self._seconds,
        )


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals`` less that of ``removed``: disjoint, ascending."""
    left: list[Interval] = []
    holes = merge(removed)
    first = 0
    for start, end in merge(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at, i = start, first
        while i < len(holes) and holes[i][0] < end:
            if holes[i][0] > at:
                left.append((at, holes[i][0]))
            at, i = max(at, holes[i][1]), i + 1
        if at < end:
            left.append((at, end))
    return left
