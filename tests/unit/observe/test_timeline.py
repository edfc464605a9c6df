"""Claims about where the time of the training loop went."""

import random
from collections import Counter
from dataclasses import asdict

import pytest

from offbeat.observe.spans import Interval, SpanName, overlap_seconds, total_seconds
from offbeat.observe.timeline import Timeline, TimeSplit, without

PARTS = ("training", "publishing", "saving", "evaluation", "generation", "rewards", "idle", "rest")


def seconds(**parts: float) -> TimeSplit:
    return TimeSplit(**(dict.fromkeys((*PARTS, "starting", "ending"), 0.0) | parts))


def random_intervals(rng: random.Random, start: int, end: int) -> list[Interval]:
    points = [sorted(rng.sample(range(start, end + 1), 2)) for _ in range(rng.randrange(4))]
    return [(float(a), float(b)) for a, b in points]


class Step:
    """The spans of one step that lasts from ``start``; the evaluation ends before the commit."""

    def __init__(self, rng: random.Random, start: int) -> None:
        at = [start, *(start + sum(rng.randrange(5) + 2 for _ in range(i)) for i in range(1, 9))]
        self.end = at[-1] = max(at)
        at.sort()
        self.controller = [
            (SpanName.WAIT, at[0], at[1]),
            (SpanName.TRAIN, at[2], at[3]),
            (SpanName.PUBLISH, at[3], at[4]),
            (SpanName.COMMIT, at[5], at[6]),
            (SpanName.SAVE, at[6], at[7]),
        ]
        evaluations = random_intervals(rng, start, at[5])[:1]
        self.evaluations = [(SpanName.EVAL, *e) for e in evaluations]
        self.rewards = [(SpanName.REWARD, *r) for r in random_intervals(rng, start, self.end)]
        self.engine = random_intervals(rng, start, self.end)


def kind_of(tick: int, steps: list[Step], engine: list[Interval]) -> str:
    """What the second [tick, tick + 1) counts as: the definition, word for word."""

    def ran(*names: SpanName) -> bool:
        spans = (s for step in steps for s in (*step.controller, *step.evaluations, *step.rewards))
        return any(name in names and a <= tick < b for name, a, b in spans)

    if ran(SpanName.TRAIN):
        return "training"
    if ran(SpanName.PUBLISH, SpanName.COMMIT):
        return "publishing"
    if ran(SpanName.SAVE):
        return "saving"
    if ran(SpanName.EVAL):
        return "evaluation"
    if not ran(SpanName.WAIT):
        return "rest"
    if any(a <= tick < b for a, b in engine):
        return "generation"
    return "rewards" if ran(SpanName.REWARD) else "idle"


@pytest.mark.parametrize("seed", range(40))
def test_every_second_counts_as_what_the_trainer_did_in_it(seed: int) -> None:
    rng, started, now = random.Random(seed), 5, 11
    steps: list[Step] = []
    timeline = Timeline(started)
    for _ in range(5):
        steps.append(Step(rng, now))
        step, now = steps[-1], steps[-1].end + rng.randrange(3)
        reported = [*step.controller, *step.evaluations, *step.rewards]
        rng.shuffle(reported)
        for name, a, b in reported:
            timeline.add(name, a, b)
        timeline.add_engine(step.engine)
        timeline.settle()
    engine = [i for step in steps for i in step.engine]
    last = max(int(s[2]) for step in steps for s in (*step.controller, *step.rewards))
    expected = Counter(kind_of(t, steps, engine) for t in range(11, last))
    split = timeline.split(last + 3)
    around = {"starting": 6.0, "ending": 3.0}
    assert asdict(split) == around | {part: float(expected[part]) for part in PARTS}
    assert split.loop == last - 11


def test_settling_in_the_middle_of_a_wait_loses_nothing_of_it() -> None:
    timeline = Timeline(0.0)
    timeline.add(SpanName.REWARD, 3.0, 6.0)
    timeline.add_engine([(1.0, 4.0)])
    timeline.settle()
    timeline.add_engine([(7.0, 8.0)])
    timeline.add(SpanName.WAIT, 0.0, 10.0)
    timeline.settle()
    split = timeline.split(10.0)
    assert (split.generation, split.rewards, split.idle) == (4.0, 2.0, 4.0)


def test_engines_that_compute_at_the_same_time_count_once() -> None:
    timeline = Timeline(0.0)
    timeline.add_engine([(0.0, 4.0)])
    timeline.add_engine([(2.0, 6.0)])
    timeline.add(SpanName.WAIT, 0.0, 10.0)
    timeline.settle()
    assert timeline.split(10.0).generation == 6.0


def test_what_was_settled_is_not_kept() -> None:
    timeline = Timeline(0.0)
    for step in range(50):
        at = 10.0 * step
        timeline.add(SpanName.WAIT, at, at + 5)
        timeline.add(SpanName.TRAIN, at + 5, at + 9)
        timeline.add(SpanName.EVAL, at + 1, at + 2)
        timeline.add(SpanName.REWARD, at + 2, at + 3)
        timeline.add_engine([(at, at + 1), (at + 6, at + 7)])
        timeline.settle()
    held = (timeline._waits, timeline._evaluations, timeline._occupied, timeline._rewards)
    assert held == ([], [], [], [])
    assert timeline._engines == [(496.0, 497.0)]
    assert timeline.split(500.0) == seconds(
        training=200.0,
        generation=50.0,
        rewards=50.0,
        idle=100.0,
        evaluation=50.0,
        rest=49.0,
        ending=1.0,
    )


def test_run_that_never_waited_was_only_starting() -> None:
    assert Timeline(2.0).split(7.0) == seconds(starting=5.0)


@pytest.mark.parametrize("seed", range(40))
def test_difference_of_intervals_is_what_no_removed_one_covers(seed: int) -> None:
    rng = random.Random(seed)
    a, b = (random_intervals(rng, 0, 30) for _ in range(2))
    left = without(a, b)
    assert overlap_seconds(left, b) == 0
    assert total_seconds(left) == pytest.approx(total_seconds(a) - overlap_seconds(a, b))
    assert overlap_seconds(left, a) == total_seconds(left)
