"""What ``offbeat chaos --reach`` asks of a run: its reward, as far as the folder tells."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.observe.metrics import StepRecord
from offbeat.observe.sinks import JsonlSink
from offbeat.observe.summary import RunStatus, RunTotals
from offbeat.pipeline.chaos.judge import Finding, judge
from offbeat.pipeline.ledger import Ledger


def finding(
    folder: Path, rewards: Sequence[float], evals: Sequence[float], reach: float | None
) -> Finding:
    """What is found of a run that had these rewards, step by step."""
    totals = RunTotals(0.0)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, reward in enumerate(rewards, 1):
        record = StepRecord(step=step, version=step, seconds=1.0, metrics={"reward/mean": reward})
        sink.write(step, record.flat())
        totals.add_step(record)
    for reward in evals:
        totals.add_eval(reward)
    with closing(Ledger.open(folder / "run.db")) as ledger:
        totals.summary(
            now=1.0, status=RunStatus.COMPLETED, groups=ledger.totals(), tokens=ledger.tokens()
        ).write(folder / "summary.json")
    (found,) = [f for f in judge(folder, max_staleness=0, reach=reach) if "reward" in f.claim]
    return found


@pytest.mark.parametrize(("reach", "holds"), [(0.9, True), (0.95, False)])
def test_the_best_validation_reward_counts_where_there_is_one(
    tmp_path: Path, reach: float, holds: bool
) -> None:
    found = finding(tmp_path, [1.0] * 20, [0.2, 0.92, 0.8], reach)
    assert (found.claim, found.holds) == (f"the reward reached {reach:g}", holds)
    assert found.detail.startswith("best eval 0.920; ")


@pytest.mark.parametrize(("last", "holds"), [(0.9, True), (0.8, False)])
def test_without_a_validation_set_the_mean_of_the_last_steps_does(
    tmp_path: Path, last: float, holds: bool
) -> None:
    found = finding(tmp_path, [1.0] * 20 + [last] * 10, [], 0.9)
    assert found.holds is holds
    assert found.detail.startswith(f"mean of the last 10 steps {last:.3f}; ")


def test_a_run_without_a_step_reached_nothing(tmp_path: Path) -> None:
    assert finding(tmp_path, [], [], 0.1).holds is False


def test_nothing_is_judged_when_nothing_was_asked_for(tmp_path: Path) -> None:
    found = finding(tmp_path, [0.1, 0.2], [], None)
    assert (found.claim, found.holds) == ("reward", None)
    assert "train 0.100 to 0.200 in 2 steps" in found.detail
