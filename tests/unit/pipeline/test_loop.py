"""The loop with a generator and a trainer whose timing the test decides; the rest is real."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest

import offbeat
from offbeat.checkpoint.manifest import verify
from offbeat.checkpoint.saver import Saver
from offbeat.config import AsyncMode
from offbeat.errors import (
    CheckpointError,
    GenerationError,
    RolloutError,
    StallError,
    TrainingError,
    WeightSyncError,
    WorkerError,
)
from offbeat.observe.rollouts import recorded_steps
from offbeat.observe.spans import SpanName
from offbeat.pipeline.episodes import reward_called
from offbeat.protocols import EpisodeEngine
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.rlvr import RLVRWorkflow
from offbeat.types import Completion, Invalid, Prompt, Reward, Rollout, Scored

OpenRig: TypeAlias = Callable[..., Awaitable[Any]]
Spin: TypeAlias = Callable[[], Awaitable[None]]


def other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]  # a test is a task


def assert_closed(rig: Any) -> None:
    """Every admitted group has one fate, and nothing of the run goes on."""
    totals = rig.ledger.totals()
    assert totals.open == 0
    assert totals.admitted == totals.trained + sum(totals.dropped.values()) == len(rig.groups())
    assert other_tasks() == set()


def in_random_order(seed: int) -> Callable[[object], int]:
    draw = random.Random(seed)
    return lambda request: draw.randrange(40)


# One loop


@pytest.mark.invariant("I03")
async def test_synchronous_batches_do_not_depend_on_the_order_of_completion(
    open_rig: OpenRig,
) -> None:
    batches, orders = [], []
    for seed in range(4):
        rig = await open_rig(steps=4, g=3)
        rig.generator.turns = in_random_order(seed)
        await rig.run()
        batches.append(rig.trainer.batches)
        orders.append([r.request_id for r in rig.generator.ended])
        assert_closed(rig)
    assert all(b == batches[0] for b in batches[1:])
    assert orders[0] != orders[1]
    assert len({r.versions.max() for s in rig.trainer.samples for r in s}) == 4


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
@pytest.mark.parametrize("eta", [1, 3])
async def test_asynchronous_batches_are_full_in_order_and_never_too_late(
    open_rig: OpenRig, eta: int
) -> None:
    rig = await open_rig(steps=6, g=2, total=11, eta=eta, capacity=6)
    rig.generator.turns = in_random_order(eta)
    await rig.run()
    assert_closed(rig)
    assert rig.loop._gauge.used == 0
    batches = [[s.group_id for s in samples] for samples in rig.trainer.samples]
    assert [sorted(set(b)) for b in batches] == [[2 * i, 2 * i + 1] for i in range(5)] + [[10]]
    lags = [r.start_version - r.admission_version for r in rig.groups()]
    assert max(lags) <= eta
    assert max(lags) > 0


async def test_generation_goes_on_while_an_update_is_held_open(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=3, g=2, eta=1)
    rig.trainer.hold[1] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    await rig.trainer.until_entered(1)
    async with asyncio.timeout(5):
        await rig.generator.until(lambda: len(rig.generator.ended) == 8)
    assert {r.group_id for r in rig.generator.ended} == {0, 1, 2, 3}
    assert rig.generator.version == 0
    rig.trainer.hold[1].set()
    await run


async def test_synchronous_generation_waits_for_the_update(open_rig: OpenRig, spin: Spin) -> None:
    rig = await open_rig(steps=2, g=2)
    rig.trainer.hold[1] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    await rig.trainer.until_entered(1)
    await spin()
    assert {r.group_id for r in rig.generator.requests} == {0, 1}
    rig.trainer.hold[1].set()
    await run
    assert {r.group_id for r in rig.generator.requests} == {0, 1, 2, 3}


async def test_no_group_is_admitted_before_its_requests_can_start(
    open_rig: OpenRig, spin: Spin
) -> None:
    rig = await open_rig(steps=2, g=4, n=2, capacity=5)
    rig.generator.hold[0] = rig.generator.hold[1] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    await spin()
    assert [r.group_id for r in rig.groups()] == [0, 1]
    rig.generator.hold[0].set()
    await run
    assert_closed(rig)


def executed_by(run: asyncio.Task[None], seen: set[str]) -> Callable[[FrameType, str, Any], None]:
    folder = str(Path(offbeat.__file__).parent / "pipeline")

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        # When an object is collected is no property of the run.
        if event == "call" and name != "__del__" and frame.f_code.co_filename.startswith(folder):
            seen.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}")

    return trace


async def test_synchronous_and_asynchronous_runs_execute_the_same_functions(
    open_rig: OpenRig,
) -> None:
    executed: list[set[str]] = []
    for eta in (0, 3):
        rig = await open_rig(steps=4, eta=eta, valid=["1+1="], eval_steps=2)
        seen: set[str] = set()
        before = sys.getprofile()
        sys.setprofile(executed_by(rig, seen))
        try:
            await rig.run()
        finally:
            sys.setprofile(before)
        executed.append(seen)
    assert executed[0] == executed[1]
    assert {"loop.py:Loop._step", "staleness.py:StalenessManager.take"} <= executed[0]


# Versions


async def test_tokens_written_after_a_commit_are_stamped_and_trained_as_such(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=2, g=1, eta=1)
    rig.generator.hold[1] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        await rig.generator.until(lambda: rig.generator.version == 1)
    rig.generator.hold[1].set()
    await run
    row = rig.trainer.samples[1][0]
    assert set(row.versions[row.loss_mask].tolist()) == {0, 1}
    assert rig.records()[1].metrics["generate/two_versions_count"] == 2


@pytest.mark.invariant("I06")
@pytest.mark.parametrize(
    ("stamp", "said"), [(lambda v: v + 1, "versions 1 to 1"), (lambda v: 0, "versions 0 to 0")]
)
async def test_tokens_of_a_version_outside_admission_to_live_end_the_run(
    open_rig: OpenRig, stamp: Callable[[int], int], said: str
) -> None:
    rig = await open_rig(steps=3)
    rig.generator.stamp = stamp
    with pytest.raises(WeightSyncError, match=said):
        await rig.run()
    assert_closed(rig)


async def test_a_trainer_that_produces_another_version_ends_the_run(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=3)
    rig.trainer.produces = lambda version: 7 if version == 2 else version
    with pytest.raises(WeightSyncError, match="asked the trainer for version 2, it produced 7"):
        await rig.run()
    assert_closed(rig)
    assert rig.fates() == {"trained": 2, "cancelled": 2}


# Evaluation


async def test_an_evaluation_holds_back_the_commit_and_not_the_update(
    open_rig: OpenRig, spin: Spin
) -> None:
    rig = await open_rig(steps=3, valid=["1+1=", "2+2=", "3+3="], eval_steps=1, eval_at_start=True)
    rig.generator.hold[-1] = asyncio.Event()
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        await rig.trainer.until_entered(1)
    await spin()
    assert (rig.generator.staged, rig.generator.version) == (None, 0)
    assert not rig.trainer.weights.exists()  # the old version is not overwritten yet
    assert len(rig.trainer.batches) == 1
    rig.generator.hold[-1].set()
    await run
    assert_closed(rig)


async def test_each_evaluation_scores_every_row_once_by_one_version(open_rig: OpenRig) -> None:
    valid = ["1+1=", "2+2=", "3+3="]
    rig = await open_rig(
        steps=4, eta=2, valid=valid, eval_steps=2, eval_at_start=True, eval_at_end=True
    )
    rig.generator.turns = in_random_order(5)
    await rig.run()
    asked = Counter(r.request_id for r in rig.generator.requests if r.group_id == -1)
    wanted = [f"eval-{v}-{row}-0-0" for v in (0, 2, 4) for row in range(3)]
    assert asked == dict.fromkeys(wanted, 1)
    versions = {r.step: r.metrics.get("eval/version") for r in rig.records()}
    assert versions == {0: 0.0, 1: None, 2: 2.0, 3: None, 4: 4.0}


async def test_there_is_one_record_per_step_with_the_evaluation_of_the_version_it_made(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=5, valid=["1+1="], eval_steps=2, eval_at_start=True)
    await rig.run()
    records = rig.records()
    assert [r.step for r in records] == [0, 1, 2, 3, 4, 5]
    assert [r.version for r in records] == [0, 1, 2, 3, 4, 5]
    assert [("reward/mean" in r.metrics, "eval/reward_mean" in r.metrics) for r in records] == [
        (False, True),
        (True, False),
        (True, True),
        (True, False),
        (True, True),
        (True, False),
    ]
    assert sum(r.metrics.get("groups/admitted_count", 0) for r in records) == 10


async def test_one_failed_validation_row_is_counted_and_does_not_end_the_run(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=1, valid=["1+1=", "2+2=", "3+3=", "4+4="], eval_at_end=True)
    rig.generator.fail = lambda r: GenerationError("no") if r.request_id == "eval-1-2-0-0" else None
    await rig.run()
    found = rig.records()[-1].metrics
    assert found["eval/samples_count"] == 3
    assert found["eval/valid_fraction"] == 0.75


async def test_an_evaluation_without_any_answer_ends_the_run_with_the_reason(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=2, valid=["1+1=", "2+2="], eval_at_start=True)
    rig.generator.fail = lambda r: GenerationError("no luck") if r.group_id == -1 else None
    with pytest.raises(GenerationError, match="no luck"):
        await rig.run()
    assert_closed(rig)


async def test_an_evaluation_answered_by_another_version_ends_the_run(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=1, valid=["1+1="], eval_at_end=True)
    rig.generator.stamp = lambda version: 0
    with pytest.raises(WeightSyncError, match=r"validation row 1: tokens of versions \[0\]"):
        await rig.run()


async def test_validation_rows_that_are_too_long_are_left_out(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=1, valid=["1+1=", "1" * 30], eval_at_end=True, max_prompt_len=10)
    await rig.run()
    assert rig.records()[-1].metrics["eval/samples_count"] == 1


# The end of a run


@pytest.mark.invariant("I02")
@pytest.mark.parametrize("eta", [0, 2])
async def test_a_failed_update_is_the_error_of_the_run(open_rig: OpenRig, eta: int) -> None:
    rig = await open_rig(steps=4, g=2, eta=eta, valid=["1+1="], eval_steps=1)
    rig.trainer.fail[2] = TrainingError("the loss is NaN")
    with pytest.raises(TrainingError, match="the loss is NaN"):
        await rig.run()
    assert_closed(rig)
    assert rig.fates()["trained"] == 2
    assert set(rig.fates()) == {"trained", "cancelled"}


@pytest.mark.invariant("I13")
async def test_a_dead_generator_is_the_error_of_the_run(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=4, g=2, eta=1)
    rig.generator.fail = lambda r: (
        WorkerError("generator-0 died with signal 9") if r.group_id == 5 else None
    )
    with pytest.raises(WorkerError, match="generator-0 died"):
        await rig.run()
    assert_closed(rig)


async def test_a_dead_generator_is_told_apart_from_the_failures_it_causes(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=4, g=2, n=3, eta=1, max_consecutive_failures=1)
    rig.generator.fail = lambda r: (
        WorkerError("it died") if r.sibling == 2 else GenerationError("connection lost")
    )
    with pytest.raises(WorkerError, match="it died"):
        await rig.run()
    assert_closed(rig)


async def test_a_workflow_that_always_fails_ends_the_run_with_its_first_error(
    open_rig: OpenRig, one_turn: Any
) -> None:
    def score(completion: Completion) -> Reward:
        raise ValueError("my own mistake")

    rig = await open_rig(steps=4, workflow=one_turn(score), max_consecutive_failures=5)
    with pytest.raises(RolloutError, match=r"5 groups in a row failed.*ValueError: my own mistake"):
        await rig.run()
    assert_closed(rig)
    assert set(rig.fates()) == {"failed", "cancelled"}
    assert rig.trainer.batches == []


@pytest.mark.invariant("I02")
async def test_failed_groups_are_replaced_and_their_tokens_accounted_for(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=3, g=2, eta=1, capacity=4)
    rig.generator.fail = lambda r: (
        GenerationError("lost") if r.group_id in (1, 4) and r.sibling == 1 else None
    )
    await rig.run()
    assert_closed(rig)
    assert rig.loop._gauge.used == 0
    assert rig.fates() == {"trained": 6, "failed": 2}
    assert sorted({s.group_id for b in rig.trainer.samples for s in b}) == [0, 2, 3, 5, 6, 7]
    assert (
        sum(
            r.metrics["groups/dropped_failed_count"]
            for r in rig.records()
            if "groups/dropped_failed_count" in r.metrics
        )
        == 2
    )
    tokens = rig.ledger.tokens()
    assert tokens.generated == tokens.trained + tokens.wasted["failed"]
    assert tokens.wasted["failed"] > 0


async def test_a_group_with_one_valid_reward_is_dropped_and_with_two_trains_on_those(
    open_rig: OpenRig, one_turn: Any
) -> None:
    calls = iter(range(100))

    def score(completion: Completion) -> Reward:
        # Group 0 has siblings 0..2, group 1 has 3..5: the fake answers in the order asked.
        return Invalid(reason="timed out") if next(calls) in (0, 1, 5) else Scored(value=1.0)

    rig = await open_rig(steps=1, g=2, n=3, workflow=one_turn(score), capacity=3)
    await rig.run()
    assert rig.fates() == {"trained": 2, "invalid_reward": 1}
    assert [(s.group_id, s.sibling) for s in rig.trainer.samples[0]] == [
        *((1, 0), (1, 1)),
        *((2, 0), (2, 1), (2, 2)),
    ]
    assert rig.records()[0].metrics["reward/invalid_count"] == 1


async def test_a_run_with_invalid_rewards_says_so_once_with_the_first_reason(
    open_rig: OpenRig, one_turn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls = itertools.count()

    def score(completion: Completion) -> Reward:
        call = next(calls)
        return Scored(value=1.0) if call % 4 else Invalid(reason=f"failure {call}")

    rig = await open_rig(steps=3, n=4, workflow=one_turn(score))
    await rig.run()
    said = [m for m in caplog.messages if "a reward is invalid" in m]
    assert said == ["a reward is invalid and leaves its rollout out: failure 0"]


async def test_rewards_that_are_often_invalid_end_the_run_though_every_group_trains(
    open_rig: OpenRig, one_turn: Any
) -> None:
    calls = itertools.count()

    def score(completion: Completion) -> Reward:
        return Invalid(reason="timed out") if next(calls) % 2 else Scored(value=1.0)

    rig = await open_rig(steps=20, n=4, workflow=one_turn(score), max_failure_rate=0.4)
    with pytest.raises(RolloutError, match=r"50% of 20 groups failed.*timed out"):
        await rig.run()
    assert_closed(rig)


async def test_a_group_that_asks_for_less_than_it_reserved_gives_the_rest_back(
    open_rig: OpenRig, one_turn: Any
) -> None:
    class Picky(one_turn):  # type: ignore[misc]  # a class from a fixture
        async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
            if data.group_id == 0:
                raise ValueError("not this one")
            return await super().arun_episode(engine, data)

    rig = await open_rig(steps=2, g=1, n=2, capacity=3, workflow=Picky(), stall_seconds=2)
    await rig.run()
    assert rig.loop._gauge.used == 0
    assert rig.fates() == {"trained": 2, "failed": 1}


@pytest.mark.invariant("I02")
async def test_prompts_that_are_too_long_are_replaced_and_counted(open_rig: OpenRig) -> None:
    prompts = ["1+1=", "2" * 30, "3+3=", "4" * 30, "5+5="]
    rig = await open_rig(steps=3, g=2, prompts=prompts, max_prompt_len=10)
    await rig.run()
    assert_closed(rig)
    assert rig.fates() == {"trained": 6, "too_long": 4}
    assert sum(r.metrics.get("groups/dropped_too_long_count", 0) for r in rig.records()) == 4


async def test_a_data_set_whose_prompts_are_all_too_long_ends_the_run(open_rig: OpenRig) -> None:
    rig = await open_rig(prompts=["1" * 30, "2" * 30, "3" * 30], max_prompt_len=10)
    with pytest.raises(RolloutError, match="all of the last 3 prompts were too long"):
        await rig.run()
    assert_closed(rig)


@pytest.mark.parametrize("held", ["update", "generate", "eval"])
async def test_a_canceled_run_ends_at_once_and_says_so_in_the_ledger(
    open_rig: OpenRig, held: str
) -> None:
    rig = await open_rig(steps=3, g=2, eta=1, valid=["1+1="], eval_at_start=held == "eval")
    never = asyncio.Event()
    rig.trainer.hold = {1: never} if held == "update" else {}
    rig.generator.hold = {"generate": {0: never}, "eval": {-1: never}}.get(held, {})
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        if held == "update":
            await rig.trainer.until_entered(1)
        else:
            await rig.generator.until(lambda: len(rig.generator.ended) >= 6)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert_closed(rig)
    assert rig.fates() == {"cancelled": 4}
    answers = [rig.generator.answer(r, 0) for r in rig.generator.ended if r.group_id >= 0]
    assert sum(g.generated_tokens for g in rig.groups()) == sum(len(a.token_ids) for a in answers)


@pytest.mark.invariant("I02")
async def test_a_step_that_was_trained_is_recorded_though_the_run_ends_before_its_evaluation(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=3, g=2, valid=["1+1="], eval_steps=1)
    rig.generator.hold = {-1: asyncio.Event()}
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        await rig.generator.until(lambda: any(r.group_id == -1 for r in rig.generator.requests))
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    (record,) = (r for r in rig.records() if r.step > 0)
    assert (record.step, record.metrics["groups/trained_count"]) == (1, 2)
    assert rig.fates()["trained"] == 2
    assert recorded_steps(rig.run_dir) == (1,)


class Clock:
    """Time of the event loop, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)


@pytest.mark.invariant("I12")
async def test_a_wait_is_a_stall_only_when_no_request_ended_for_so_long(
    open_rig: OpenRig,
    spin: Spin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = await open_rig(steps=2, g=2, n=3, stall_seconds=10)
    ends = [asyncio.Event() for _ in range(3)]
    rig.generator.hold = {0: asyncio.Event()} | {(1, i): end for i, end in enumerate(ends)}
    clock = Clock(monkeypatch)
    run = asyncio.create_task(rig.loop.run())
    for end in ends:
        await spin()
        clock.now += 9
        end.set()
        await spin()
        assert not run.done()
    clock.now += 11
    with pytest.raises(StallError) as caught:
        await run
    said = str(caught.value)
    assert "step 1 has waited 10 s (rollout.stall_seconds)" in said
    assert "waiting for 1 groups:\n  group 0 (row 1, admitted 0 s ago): a generator has " in said
    assert "train-0-0-0, train-0-1-0, train-0-2-0" in said
    assert "admission: Loop._admit" in caplog.text
    assert_closed(rig)


async def test_a_full_disk_under_the_ledger_is_the_error_of_the_run(open_rig: OpenRig) -> None:
    long = [f"{i}+{i}=" for i in range(500)]
    rig = await open_rig(steps=250, g=2, prompts=long)
    pages = rig.ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    rig.ledger._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(CheckpointError, match=r"run\.db: the ledger cannot be written"):
        await rig.run()
    assert other_tasks() == set()


# Saving


async def test_a_due_step_is_saved_with_the_weights_it_published(
    open_rig: OpenRig, tmp_path: Path, model_folder: Path
) -> None:
    opening = Saver.open(
        mode=AsyncMode.SYNC, checkpoints_dir=tmp_path / "checkpoints", template_dir=model_folder
    )
    async with await opening as saver:
        rig = await open_rig(steps=5, eta=1, saver=saver, save_steps=2, save_at_end=True)
        await rig.run()
    saved = {}
    for folder in sorted((tmp_path / "checkpoints").glob("step-*")):
        manifest = verify(folder).save
        weights = np.frombuffer((folder / "model.safetensors").read_bytes()[-16:], np.float32)
        saved[manifest.step] = (manifest.version, set(weights.tolist()))
    assert saved == {2: (2, {2.0}), 4: (4, {4.0}), 5: (5, {5.0})}
    waits = [r.step for r in rig.records() if "wait/save_seconds" in r.metrics]
    assert waits == [2, 4, 5]


# Spans


async def test_every_request_has_a_generate_span_of_its_group(open_rig: OpenRig) -> None:
    rig = await open_rig(steps=2, g=2, n=3, valid=["1+1="], eval_at_end=True)
    await rig.run()
    await rig.recorder.flush()
    spans = rig.spans(SpanName.GENERATE)
    assert Counter(s.group_id for s in spans) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert [s.step for s in rig.spans(SpanName.TRAIN)] == [1, 2]


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> int:
    return len(completion_ids)


async def test_every_reward_call_has_a_span_of_its_group(open_rig: OpenRig) -> None:
    async with AsyncRewardWrapper(length, workers=1, on_call=reward_called) as reward:
        rig = await open_rig(
            steps=2, g=2, n=2, workflow=RLVRWorkflow(reward), valid=["1+1="], eval_steps=1
        )
        await rig.run()
        assert reward.counters.calls == 10
    assert Counter(s.group_id for s in rig.spans(SpanName.REWARD)) == {0: 2, 1: 2, 2: 2, 3: 2}
    generated = {s.group_id: s.end for s in rig.spans(SpanName.GENERATE)}
    assert all(
        s.start <= s.end and s.end >= generated[s.group_id] for s in rig.spans(SpanName.REWARD)
    )


async def test_the_span_of_an_evaluation_is_when_it_ran_and_not_when_it_was_asked_for(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(steps=1, valid=["1+1="], eval_at_start=True)
    rig.trainer.hold = {1: asyncio.Event()}
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        await rig.trainer.until_entered(1)
        await asyncio.sleep(0.2)
        rig.trainer.hold[1].set()
        await run
    (evaluation,), (train,) = rig.spans(SpanName.EVAL), rig.spans(SpanName.TRAIN)
    assert evaluation.end < train.end - 0.15


@pytest.mark.invariant("I02")
async def test_a_step_is_written_though_the_run_is_ended_while_the_disk_is_slow(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await open_rig(steps=3)
    go_on, write = threading.Event(), rig.recorder._write

    def slow(*args: Any) -> None:
        go_on.wait(5)
        write(*args)

    monkeypatch.setattr(rig.recorder, "_write", slow)
    run = asyncio.create_task(rig.run())
    async with asyncio.timeout(5):
        await rig.generator.until(lambda: rig.generator.version == 2)
        await asyncio.sleep(0.05)  # step 2 waits for step 1 to be on disk
        run.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert [r.step for r in rig.records()] == [1, 2]
    assert recorded_steps(rig.run_dir) == (1, 2)
