"""What a step leaves behind, and that a failing disk does not stop training."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from offbeat.observe.ledger import read_events
from offbeat.observe.limits import RunSetup
from offbeat.observe.metrics import StepRecord, UndeclaredMetric
from offbeat.observe.rollouts import read_rollouts, recorded_steps
from offbeat.observe.sinks import JsonlSink, SinkSet, read_metrics
from offbeat.observe.spans import SpanName, read_spans
from offbeat.observe.summary import FailedSaves, RunStatus
from offbeat.pipeline.episodes import EVALUATING
from offbeat.pipeline.ledger import Ledger
from offbeat.pipeline.recorder import Recorder
from offbeat.protocols import JsonValue
from offbeat.types import (
    Completion,
    DropReason,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Scored,
    StepReport,
    StopReason,
    Turn,
)


def rollout(sibling: int, n: int, reward: Reward, *, cut: bool = False, mixed: int = 0) -> Rollout:
    versions = np.full(n, 3, dtype=np.int64)
    versions[:mixed] = 2
    completion = Completion(
        token_ids=np.full(n, 5, dtype=np.int64),
        logprobs=np.zeros(n, dtype=np.float32),
        versions=versions,
        stop_reason=StopReason.LENGTH if cut else StopReason.STOP,
        text="x" * n,
    )
    turn = Turn(prompt_ids=np.array([1, 2], dtype=np.int64), completion=completion)
    return Rollout(sibling=sibling, turns=(turn,), reward=reward)


def group(group_id: int, admission: int, *rollouts: Rollout) -> RolloutGroup:
    prompt = Prompt(
        group_id=GroupId(group_id),
        epoch=0,
        row=group_id,
        token_ids=np.array([1, 2], dtype=np.int64),
        text="12",
    )
    return RolloutGroup(
        prompt=prompt, rollouts=rollouts, admission_version=PolicyVersion(admission)
    )


GROUPS = (
    group(
        0,
        2,
        rollout(0, 4, Scored(value=1.0, parts={"exact": 1.0}), cut=True, mixed=1),
        rollout(1, 2, Scored(value=0.0, parts={"exact": 0.0})),
        rollout(2, 6, Invalid(reason="late")),
    ),
    group(1, 3, rollout(0, 2, Scored(value=0.5)), rollout(1, 2, Scored(value=0.5))),
)

REPORT = StepReport(
    version=PolicyVersion(4), tokens=8, rows=4, started=0.0, ended=1.0, metrics={"actor/loss": 0.25}
)


async def test_the_metrics_of_a_step_are_those_of_its_rollouts(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            found = recorder.step_metrics(GROUPS, REPORT, PolicyVersion(3))
    assert found == pytest.approx(
        {
            "actor/loss": 0.25,
            "reward/mean": 0.5,
            "reward/std": 0.125**0.5,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/valid_fraction": 0.8,
            "reward/invalid_count": 1,
            "reward/zero_std_fraction": 0.5,
            "reward_part/exact": 0.5,
            "lag/group_mean": 0.5,
            "lag/group_max": 1,
            "generate/length_tokens": 3.2,
            "generate/length_max_tokens": 6,
            "generate/truncated_fraction": 0.2,
            "generate/two_versions_count": 1,
            "tokens/generated_count": 16,
            "groups/admitted_count": 0,
            "groups/trained_count": 2,
            "groups/dropped_count": 0,
            "generate/restarts_count": 0,
            "save/failed_count": 0,
            "snapshot/failed_count": 0,
        }
    )


async def test_advantages_are_recorded_with_the_rollouts_they_were_reported_for(
    tmp_path: Path,
) -> None:
    report = dataclasses.replace(REPORT, advantages=(1.0, -1.0, 0.25, -0.25))
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            metrics = recorder.step_metrics(GROUPS, report, PolicyVersion(3))
            record = StepRecord(step=1, version=4, seconds=1.0, metrics=metrics)
            await recorder.write(record, GROUPS)
    rows = {(r.group_id, r.sibling): r.advantage for r in read_rollouts(tmp_path, 1)}
    assert rows == {(0, 0): 1.0, (0, 1): -1.0, (0, 2): None, (1, 0): 0.25, (1, 1): -0.25}


async def test_failed_saves_are_counted_once_and_the_last_error_is_in_the_summary(
    tmp_path: Path,
) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            recorder.save_failed("step 2: no space")
            recorder.snapshot_failed("step 3: no space")
            waiting = recorder.counts
            metrics = recorder.step_metrics(GROUPS, REPORT, PolicyVersion(3))
            await recorder.write(StepRecord(step=4, version=4, seconds=1.0, metrics=metrics))
            recorder.save_failed("step 4: no space")
            summary = recorder.summary(RunStatus.COMPLETED)
    assert (waiting.failed_saves, waiting.failed_snapshots) == (1, 1)
    assert (metrics["save/failed_count"], metrics["snapshot/failed_count"]) == (1, 1)
    assert summary.failed_saves == FailedSaves(models=2, snapshots=1, last="step 4: no space")


async def test_counts_of_groups_are_those_since_the_step_before(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            for i in range(4):
                recorder.admitted(GroupId(i), 0, i, PolicyVersion(0))
            recorder.dropped(GroupId(2), DropReason.FAILED, "lost", 7)
            first = recorder.step_metrics(GROUPS, REPORT, PolicyVersion(3))
            second = recorder.step_metrics(GROUPS, REPORT, PolicyVersion(3))
            recorder.trained(GROUPS, 1, PolicyVersion(3))
            summary = recorder.summary(RunStatus.COMPLETED)
    assert (first["groups/admitted_count"], first["groups/dropped_failed_count"]) == (4, 1)
    assert (second["groups/admitted_count"], second["groups/dropped_count"]) == (0, 0)
    assert (summary.groups.trained, summary.groups.open) == (2, 1)
    # The rollout without a reward was generated and not trained on.
    assert (summary.tokens.generated, summary.tokens.trained, summary.tokens.wasted) == (23, 10, 13)


async def test_what_is_mended_is_an_event_at_once_without_the_end_of_a_log(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            for log in ("; end of logs/generator-0.log:\nwords", "\nother words"):
                recorder.restarted("generator-0", f"generator-0 was killed by SIGKILL{log}")
            recorder.reply_lost("generator-0", "generator-0: connection lost in collect")
            recorder.reward_worker_replaced("reward process died: exit code 7")
            found = read_events(tmp_path / "run.db", 10)
            summary = recorder.summary(RunStatus.COMPLETED)
    assert [(e.kind, e.detail, e.times) for e in found] == [
        ("restart", "generator-0 was killed by SIGKILL", 2),
        ("lost-reply", "generator-0: connection lost in collect", 1),
        ("reward-worker", "reward process died: exit code 7", 1),
    ]
    assert summary.restarts == {"generator-0": 2}
    assert (summary.lost_replies, summary.reward_workers_replaced) == (1, 1)
    assert summary.deterministic is None


async def test_a_step_is_on_disk_after_the_next_one_or_a_flush(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        sinks = SinkSet([JsonlSink(tmp_path / "metrics.jsonl")])
        async with Recorder(tmp_path, sinks, ledger) as recorder:
            recorder.span(SpanName.TRAIN, 0.0, 1.0, "trainer", step=1)
            await recorder.write(StepRecord(step=1, version=1, seconds=0.5), GROUPS)
            await recorder.write(StepRecord(step=2, version=2, seconds=0.5), GROUPS)
            assert [r.step for r in read_metrics(tmp_path / "metrics.jsonl")][:1] == [1]
            await recorder.flush()
            assert [r.step for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
            recorder.span(SpanName.SAVE, 1.0, 2.0, "controller", step=2)
    assert [s.name for s in read_spans(tmp_path / "spans.jsonl")] == [
        SpanName.TRAIN,
        SpanName.SAVE,
    ]
    assert recorded_steps(tmp_path) == (1, 2)
    assert [r.reward for r in read_rollouts(tmp_path, 1)] == [1.0, 0.0, None, 0.5, 0.5]


class Broken:
    """A sink that cannot write."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        self.closed = True


async def test_a_sink_and_a_rollout_folder_that_fail_do_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    broken = Broken()
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        sinks = SinkSet([broken, JsonlSink(tmp_path / "metrics.jsonl")])
        async with Recorder(tmp_path, sinks, ledger) as recorder:
            for step in (1, 2):
                await recorder.write(StepRecord(step=step, version=step, seconds=0.5), GROUPS)
    assert len(sinks.failures) == 1
    assert broken.closed
    assert [r.step for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


class Slow:
    """A sink that is still writing when the run is canceled."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.entered = threading.Event()

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        self.said.append("writes")
        self.entered.set()
        threading.Event().wait(0.2)
        self.said.append("wrote")

    def close(self) -> None:
        self.said.append("closed")


async def test_sinks_are_closed_after_the_last_write_also_in_a_canceled_run(tmp_path: Path) -> None:
    slow = Slow()
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([slow]), ledger) as recorder:
            await recorder.write(StepRecord(step=1, version=1, seconds=0.5))
            flush = asyncio.create_task(recorder.flush())
            await asyncio.to_thread(slow.entered.wait)
            flush.cancel()
    assert slow.said == ["writes", "wrote", "closed"]


async def test_a_misspelt_metric_is_an_error_under_test(tmp_path: Path) -> None:
    record = StepRecord(step=1, version=1, seconds=0.5, metrics={"reward/meen": 1.0})
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        async with Recorder(tmp_path, SinkSet([]), ledger) as recorder:
            await recorder.write(record)
            with pytest.raises(UndeclaredMetric, match="reward/mean"):
                await recorder.flush()


def test_what_comes_before_the_first_step_comes_once_and_before_the_ledger_has_it(
    tmp_path: Path,
) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        for i in range(2):
            ledger.admit(GroupId(i), epoch=0, row=i, admission_version=PolicyVersion(0))
        recorder = Recorder(tmp_path, SinkSet([]), ledger)
        seen: list[int] = []
        recorder.before_first_step = lambda: seen.append(ledger.totals().trained)
        for step in (1, 2):
            groups = [group(step - 1, 0, rollout(0, 3, Scored(value=1.0)))]
            recorder.trained(groups, step, PolicyVersion(step - 1))
        assert (seen, ledger.totals().trained) == ([0], 2)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_lost_reward_breaks_bits_only_where_something_is_trained_on_it(
    tmp_path: Path, on_the_beat: RunSetup, evaluating: bool
) -> None:
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        recorder = Recorder(tmp_path, SinkSet([]), ledger, on_the_beat)
        token = EVALUATING.set(evaluating)
        recorder.reward_lost("timed out after 2 s")
        EVALUATING.reset(token)
        broken = recorder.summary(RunStatus.COMPLETED).determinism_broken_by
    assert len(broken) == (not evaluating)
