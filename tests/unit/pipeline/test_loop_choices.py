"""The loop under the configurations that choose what to train on: policy, deadlines, filters."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import pytest

from offbeat.errors import GenerationError, RolloutError, StallError
from offbeat.observe.ledger import read_events
from offbeat.observe.summary import RunStatus
from offbeat.pipeline.staleness import Policy
from offbeat.protocols import EpisodeEngine
from offbeat.types import Completion, GeneratorStats, Prompt, Rollout, Scored

OpenRig: TypeAlias = Callable[..., Awaitable[Any]]


def trained(rig: Any) -> list[list[int]]:
    """Group ids of each batch."""
    return [sorted({int(s.group_id) for s in batch}) for batch in rig.trainer.samples]


def even(completion: Completion) -> Scored:
    """Tells the answers of some groups apart and not those of others."""
    return Scored(value=float(completion.token_ids[0] >= 9))


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
async def test_under_drop_a_straggler_stops_nobody_and_ends_as_stale(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=6, g=2, eta=1, policy=Policy.DROP)
    late = rig.generator.hold[0] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    await rig.trainer.until_entered(3)  # pace would still wait for group 0
    late.set()
    await run
    assert all(0 not in batch for batch in trained(rig))
    assert rig.fates() == {"trained": 12, "stale": 1}
    (straggler,) = [r for r in rig.groups() if r.reason == "stale"]
    assert straggler.group_id == 0
    tokens = rig.ledger.tokens()
    assert tokens.wasted["stale"] == tokens.generated - tokens.trained > 0


@pytest.mark.invariant("I02")
async def test_dynamic_sampling_replaces_groups_whose_rewards_are_equal(
    open_rig: OpenRig, one_turn: type
) -> None:
    rig = await open_rig(steps=4, g=2, eta=1, workflow=one_turn(even), dynamic_sampling=True)
    await rig.run()
    assert rig.fates()["trained"] == 8
    assert rig.fates()["filtered"] >= 1
    for batch in rig.trainer.samples:
        for group_id in {s.group_id for s in batch}:
            assert len({s.reward for s in batch if s.group_id == group_id}) > 1
    tokens = rig.ledger.tokens()
    assert tokens.wasted["filtered"] == tokens.generated - tokens.trained > 0


@pytest.mark.invariant("I03")
async def test_dynamic_sampling_is_repeatable_on_the_beat(
    open_rig: OpenRig, one_turn: type
) -> None:
    batches = []
    for delay in (1, 7):
        rig = await open_rig(steps=4, g=3, workflow=one_turn(even), dynamic_sampling=True)
        rig.generator.turns = lambda request, delay=delay: (request.group_id * delay) % 11
        await rig.run()
        assert rig.fates()["filtered"] >= 1
        batches.append(rig.trainer.batches)
    assert batches[0] == batches[1]


async def test_a_run_that_never_sees_a_signal_ends_with_the_cause(
    open_rig: OpenRig, one_turn: type
) -> None:
    def always_zero(completion: Completion) -> Scored:
        return Scored(value=0.0)

    rig = await open_rig(steps=50, g=2, workflow=one_turn(always_zero), max_groups_without_signal=9)
    with pytest.raises(RolloutError, match=r"the last 9 groups gave nothing.*all rewards of a"):
        await rig.run()
    assert rig.fates()["trained"] == 8


@pytest.mark.invariant("I02")
async def test_a_group_past_its_deadline_is_dropped_and_replaced(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=3, g=2, group_deadline_seconds=0.5)
    rig.generator.hold[1] = asyncio.Event()  # never set
    await rig.run()
    assert trained(rig)[0] == [0, 2]
    assert rig.fates() == {"trained": 6, "cancelled": 1}


@pytest.mark.invariant("I03")
@pytest.mark.parametrize("eta", [0, 2])
async def test_only_a_run_that_promised_to_be_repeatable_says_that_a_deadline_broke_it(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, eta: int
) -> None:
    rig = await open_rig(steps=3, g=2, eta=eta, group_deadline_seconds=0.5)
    rig.generator.hold.update({1: asyncio.Event(), 3: asyncio.Event()})  # never set
    await rig.run()
    summary = rig.recorder.summary(RunStatus.COMPLETED)
    assert summary.deterministic is (False if eta == 0 else None)
    assert len(summary.determinism_broken_by) == caplog.text.count("bit for bit") == (eta == 0)
    events = read_events(rig.run_dir / "run.db", 10)
    assert [(e.kind, e.subject, e.group_id, e.times) for e in events] == (
        [("determinism", "group-deadline", 1, 2)] if eta == 0 else []
    )


@pytest.mark.parametrize("even_groups", [False, True])
async def test_a_step_counts_its_groups_without_signal_by_cause(
    open_rig: OpenRig, one_turn: Any, even_groups: bool
) -> None:
    workflow = one_turn(lambda c: Scored(value=1.0)) if even_groups else one_turn()
    rig = await open_rig(steps=2, g=3, workflow=workflow)
    await rig.run()
    for record in rig.records():
        found = record.metrics
        assert found["groups/no_signal_truncated_count"] == 0
        assert found["groups/no_signal_empty_count"] == 0
        assert found["groups/no_signal_equal_count"] / 3 == found["reward/zero_std_fraction"]
        if even_groups:
            assert found["groups/no_signal_equal_count"] == 3


async def test_deadlines_that_all_groups_miss_end_the_run(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=3, g=2, group_deadline_seconds=0.01, max_consecutive_failures=4)
    rig.generator.hold.update({i: asyncio.Event() for i in range(100)})
    with pytest.raises(RolloutError, match=r"not complete after 0\.01 s"):
        await rig.run()


async def test_adaptive_lookahead_keeps_the_data_younger_than_the_bound_allows(
    open_rig: OpenRig,
) -> None:
    lags = {}
    for adaptive in (False, True):
        rig = await open_rig(steps=30, g=4, eta=4, n=1, adaptive_lookahead=adaptive)
        await rig.run()
        lags[adaptive] = [r.metrics["lag/group_mean"] for r in rig.records()]
        assert max(r.metrics["lag/group_max"] for r in rig.records()) <= 4
    assert sum(lags[True]) < sum(lags[False])


@pytest.mark.invariant("I02")
async def test_filtered_groups_count_as_complete_where_failures_are_judged(
    open_rig: OpenRig, one_turn: type
) -> None:
    rig = await open_rig(
        steps=2,
        g=2,
        workflow=one_turn(lambda c: Scored(value=0.0)),
        dynamic_sampling=True,
        max_failure_rate=0.3,
        max_consecutive_failures=4,
        max_groups_without_signal=150,
    )
    # One group in ten fails; the others are complete and teach nothing.
    rig.generator.fail = lambda r: GenerationError("no luck") if r.group_id % 10 == 0 else None
    with pytest.raises(RolloutError, match="the last 150 groups gave nothing"):
        await rig.run()
    assert rig.fates()["failed"] >= 15


class Hangs:
    """Waits for its tool for ever once its answer is there."""

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        await engine.agenerate(data.token_ids.tolist(), sibling=0)
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.invariant("I12")
async def test_a_workflow_that_hangs_is_seen_though_the_generator_writes_for_others(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(workflow=Hangs(), stall_seconds=0.05)
    polls = itertools.count(1)
    before = rig.generator.stats

    async def busy() -> GeneratorStats:
        return dataclasses.replace(await before(), decode_tokens=next(polls))

    rig.generator.stats = busy  # type: ignore[method-assign]  # others are answered all the time
    with pytest.raises(StallError, match=r"waiting for 2 groups(.|\n)*in its rewards or its work"):
        await rig.run()


@pytest.mark.invariant("I12")
async def test_an_evaluation_that_hangs_ends_the_run_and_says_how_far_it_was(
    open_rig: OpenRig, one_turn: type
) -> None:
    rig = await open_rig(valid=["1+1=", "2+2=", "3+3="], eval_at_start=True, stall_seconds=0.1)
    evaluator = rig.loop._evaluator
    assert evaluator is not None
    scored = evaluator._workflow

    class HangsAtTheLast:
        async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
            if data.row == 2:
                await asyncio.Event().wait()
            return await scored.arun_episode(engine, data)

    evaluator._workflow = HangsAtTheLast()
    with pytest.raises(StallError, match="the evaluation: 2 of 3 rows are through"):
        await rig.run()
    assert "2 of 3 rows" in rig.loop.report()
