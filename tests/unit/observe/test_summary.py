"""Claims about summary.json and the totals of a run."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.observe.ledger import EventTotals, LedgerTotals, TokenTotals
from offbeat.observe.limits import LimitedBy, RunSetup
from offbeat.observe.metrics import StepRecord, seconds_of
from offbeat.observe.spans import SpanName
from offbeat.observe.summary import RunStatus, RunTotals, Summary, read_summary
from offbeat.types import DropReason, GeneratorStats, PolicyVersion

GROUPS = LedgerTotals(
    admitted=10, trained=6, dropped=dict.fromkeys(DropReason, 0) | {DropReason.STALE: 1}, open=3
)
TOKENS = TokenTotals(generated=100, trained=80, wasted={"stale": 15, "untrained": 5})

SETUP = RunSetup(
    max_staleness=4,
    cores=1,
    trainer_threads=1,
    generator_threads=1,
    trains_in_bfloat16=False,
    generates_in_bfloat16=False,
    prefix_sharing=True,
    gradient_checkpointing=False,
    prox_pass=False,
)

STEPS = [
    StepRecord(
        step=1,
        version=1,
        seconds=2.0,
        metrics={
            "reward/mean": 0.25,
            "lag/group_mean": 0.0,
            "lag/group_max": 0.0,
            "lag/token_mean": 0.0,
            "groups/trained_count": 4.0,
            "actor/tokens_count": 30.0,
            "wait/data_seconds": 1.0,
            "train/update_seconds": 0.5,
            "generate/two_versions_count": 1.0,
            "eval/reward_mean": 0.5,
        },
    ),
    StepRecord(
        step=2,
        version=2,
        seconds=3.0,
        metrics={
            "reward/mean": 0.75,
            "lag/group_mean": 3.0,
            "lag/group_max": 4.0,
            "lag/token_mean": 2.0,
            "groups/trained_count": 2.0,
            "actor/tokens_count": 10.0,
            "wait/data_seconds": 0.5,
            "train/update_seconds": 1.0,
            "generate/two_versions_count": 2.0,
            "eval/reward_mean": 0.25,
        },
    ),
]


def stats(prefill: int, rss: int, decode: tuple[tuple[float, float], ...] = ()) -> GeneratorStats:
    return GeneratorStats(
        version=PolicyVersion(0),
        slots=4,
        running=0,
        waiting=0,
        prefill_tokens=prefill,
        decode_tokens=0,
        finished=0,
        aborted=0,
        paused=False,
        peak_rss_bytes=rss,
        decode_spans=decode,
    )


def summary_of(totals: RunTotals, now: float, **more: object) -> Summary:
    fields = {"status": RunStatus.COMPLETED, "groups": GROUPS, "tokens": TOKENS} | more
    return totals.summary(now=now, **fields)  # type: ignore[arg-type]  # a test's shorthand


def whole_run() -> Summary:
    totals = RunTotals(100.0)
    totals.add_eval(0.125)
    for record in STEPS:
        totals.add_step(record)
    totals.add_training(101.0, 103.0)
    totals.add_engine("generator-0", stats(50, 1000, ((100.5, 102.0), (104.0, 105.0))))
    for peaks in ((300, 900), (300, 1000), (300, 200)):  # the second process was replaced
        totals.add_rss(peaks)
    return summary_of(totals, 110.0)


def test_totals_add_up() -> None:
    s = whole_run()
    assert s.steps == 2
    assert (s.seconds.total, s.seconds.training, s.seconds.waiting) == (10.0, 1.5, 1.5)
    assert (s.eval.first, s.eval.last, s.eval.best) == (0.125, 0.25, 0.5)
    assert (s.reward.first, s.reward.last) == (0.25, 0.75)
    assert s.lag.group_mean == pytest.approx(3.0 * 2 / 6)
    assert s.lag.token_mean == pytest.approx(2.0 * 10 / 40)
    assert s.lag.group_max == 4
    assert s.tokens.wasted == 20
    assert s.completions_with_two_versions == 3
    assert s.decode_share_of_training_time == 0.5
    assert s.engine_busy_fraction == 0.25
    assert s.peak_rss_bytes == 1300
    assert s.tokens.prefill == 50


def test_file_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    whole_run().write(tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert list(found) == [
        "status",
        "steps",
        "seconds",
        "eval",
        "reward",
        "lag",
        "tokens",
        "groups",
        "completions_with_two_versions",
        "decode_share_of_training_time",
        "engine_busy_fraction",
        "peak_rss_bytes",
        "restarts",
        "reward_workers_replaced",
        "lost_replies",
        "deterministic",
        "determinism_broken_by",
        "limit",
        "groups_without_signal",
        "invalid_rewards",
    ]
    assert list(found["seconds"]) == ["total", "training", "waiting"]
    assert list(found["eval"]) == ["first", "last", "best", "parts"]
    assert list(found["reward"]) == ["first", "last"]
    assert list(found["lag"]) == ["group_mean", "group_max", "token_mean"]
    assert list(found["tokens"]) == ["prefill", "generated", "trained", "wasted"]
    assert list(found["groups"]) == ["admitted", "trained", "dropped", "open"]
    assert found["groups"]["dropped"] == {r.value: int(r is DropReason.STALE) for r in DropReason}
    assert found["status"] == "completed"
    assert os.listdir(tmp_path) == ["summary.json"]


BROKEN = EventTotals(restarts={"generator-0": 2}, broken_by=("a reward was late",))


@pytest.mark.parametrize(
    ("max_staleness", "events", "deterministic"),
    [(0, EventTotals(), True), (0, BROKEN, False), (4, EventTotals(), None)],
)
def test_a_run_is_deterministic_when_that_was_promised_and_nothing_broke_it(
    tmp_path: Path, max_staleness: int, events: EventTotals, deterministic: bool | None
) -> None:
    setup = dataclasses.replace(SETUP, max_staleness=max_staleness)
    found = summary_of(RunTotals(0.0, (), setup), 1.0, events=events)
    assert found.deterministic is deterministic
    assert found.determinism_broken_by == events.broken_by
    assert found.restarts == events.restarts
    found.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == found


def test_a_summary_from_before_events_were_counted_is_read(tmp_path: Path) -> None:
    old = json.loads(whole_run().to_json())
    for name in ("restarts", "reward_workers_replaced", "lost_replies"):
        del old[name]
    for name in ("deterministic", "determinism_broken_by"):
        del old[name]
    (tmp_path / "summary.json").write_text(json.dumps(old))
    assert read_summary(tmp_path / "summary.json") == whole_run()


def test_summary_is_read_back_equal(tmp_path: Path) -> None:
    totals = RunTotals(0.0)
    failed = summary_of(
        totals, 1.0, status=RunStatus.FAILED, error="StallError: waited for group 7"
    )
    failed.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == failed
    whole_run().write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == whole_run()


def test_run_that_never_stepped_has_nulls_instead_of_zeros() -> None:
    s = summary_of(RunTotals(0.0), 1.0)
    assert (s.reward.first, s.eval.best, s.lag.group_max, s.lag.token_mean) == (None,) * 4
    assert s.decode_share_of_training_time is None


def limited_run() -> Summary:
    totals = RunTotals(100.0, setup=SETUP)
    totals.add_span(SpanName.WAIT, 101.0, 103.0)
    totals.add_span(SpanName.REWARD, 102.0, 103.0)
    totals.add_engine("generator-0", stats(5, 1, ((101.0, 102.0), (105.0, 106.0))))
    totals.add_training(103.0, 109.0)
    totals.add_span(SpanName.TRAIN, 103.0, 109.0)
    totals.add_span(SpanName.COMMIT, 109.0, 111.0)
    return summary_of(totals, 111.0)


def test_limit_of_the_run_is_told_with_its_seconds(tmp_path: Path) -> None:
    s = limited_run()
    assert s.limit is not None
    assert (s.limit.what, s.limit.share) == (LimitedBy.TRAINING, 0.6)
    seconds = s.limit.seconds
    assert (seconds.starting, seconds.generation, seconds.rewards) == (1.0, 1.0, 1.0)
    assert (seconds.training, seconds.publishing, seconds.rest) == (6.0, 2.0, 0.0)
    assert seconds.starting + seconds.loop == s.seconds.total
    assert "generation was idle 80 % of it" in s.limit.sentence
    s.write(tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())["limit"]
    assert list(found) == ["what", "share", "seconds", "overlap_bound", "options", "sentence"]
    assert read_summary(tmp_path / "summary.json") == s


def test_limit_is_unknown_before_the_first_step_and_in_older_files(tmp_path: Path) -> None:
    assert summary_of(RunTotals(0.0, setup=SETUP), 1.0).limit is None
    whole_run().write(tmp_path / "summary.json")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content.pop("limit") is None
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert read_summary(tmp_path / "summary.json") == whole_run()


def test_resumed_run_counts_the_surviving_steps_of_earlier_attempts() -> None:
    totals = RunTotals(50.0, STEPS[:1])
    totals.add_step(STEPS[1])
    s = summary_of(totals, 54.0)
    assert (s.steps, s.seconds.total, s.reward.first, s.reward.last) == (2, 6.0, 0.25, 0.75)


def test_counters_of_a_replaced_generator_are_not_lost() -> None:
    totals = RunTotals(0.0)
    for worker, prefill in (("g0", 40), ("g1", 5), ("g0", 100), ("g0", 10), ("g0", 30)):
        totals.add_engine(worker, stats(prefill, 1))
    assert summary_of(totals, 1.0).tokens.prefill == 100 + 30 + 5


def test_nan_of_one_step_does_not_reach_the_summary() -> None:
    totals = RunTotals(0.0)
    for record in STEPS[:1]:
        totals.add_step(record)
    totals.add_step(StepRecord(step=2, version=2, seconds=1.0, metrics={"reward/mean": math.nan}))
    assert summary_of(totals, 1.0).reward.last == 0.25


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"status": "completed"}', b'{"status": 3}']
)
def test_file_that_is_no_summary_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"summary\.json"):
        read_summary(path)


def test_missing_summary_says_what_that_means(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not ended, or was killed"):
        read_summary(tmp_path / "summary.json")


def test_step_0_which_runs_while_the_first_step_does_adds_no_time() -> None:
    steps = [StepRecord(step=i, version=i, seconds=4.0) for i in range(3)]
    assert seconds_of(steps) == 8.0
    assert summary_of(RunTotals(100.0, steps), 110.0).seconds.total == 18.0


def test_groups_that_taught_nothing_and_answers_without_a_reward_add_up() -> None:
    metrics = {"groups/no_signal_equal_count": 2.0, "reward/invalid_count": 3.0}
    totals = RunTotals(0.0)
    for step in (1, 2):
        totals.add_step(StepRecord(step=step, version=step, seconds=1.0, metrics=metrics))
    found = summary_of(totals, 1.0)
    assert found.groups_without_signal == {"equal": 4, "truncated": 0, "empty": 0}
    assert found.invalid_rewards == 6
