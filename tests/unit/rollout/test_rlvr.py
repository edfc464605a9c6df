"""RLVRWorkflow over an engine written here: what it asks, what it scores, what it overlaps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import GenerationError
from offbeat.protocols import EpisodeEngine, Workflow
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.rlvr import RLVRWorkflow
from offbeat.types import (
    Completion,
    GroupId,
    Invalid,
    Prompt,
    SamplingParams,
    Scored,
    StopReason,
)


def answer(text: str, ids: Sequence[int], stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int64),
        stop_reason=stop,
        text=text,
    )


class FakeEngine:
    """Gives sibling i the i-th answer; ``before`` is awaited ahead of it."""

    def __init__(self, answers: Sequence[Completion | GenerationError]):
        self.answers = answers
        self.params = SamplingParams()
        self.canceled: list[int] = []
        self.gates: dict[int, Callable[[], object]] = {}

    @property
    def n_samples(self) -> int:
        return len(self.answers)

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        assert list(prompt_ids) == [7, 8, 9]
        try:
            if sibling in self.gates:
                await asyncio.to_thread(self.gates[sibling])
            await asyncio.sleep(0.001 * (len(self.answers) - sibling))
            result = self.answers[sibling]
            if isinstance(result, GenerationError):
                raise result
            if result.text == "never":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.canceled.append(sibling)
            raise
        return result

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def prompt(**columns: object) -> Prompt:
    return Prompt(
        group_id=GroupId(3),
        epoch=0,
        row=0,
        token_ids=np.array([7, 8, 9], dtype=np.int64),
        text="2+2=",
        columns=columns,
    )


async def test_the_reward_gets_texts_ids_and_columns_and_the_siblings_stay_in_order() -> None:
    def judge(
        text: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str
    ) -> dict[str, float]:
        assert (text, prompt_ids, type(completion_ids)) == ("2+2=", [7, 8, 9], list)
        return {"reward": completion == answer, "length": len(completion_ids)}

    engine = FakeEngine([answer("4", [52, 0]), answer("five", [53, 54, 0]), answer("", [0])])
    async with AsyncRewardWrapper(judge, workers=1) as reward:
        workflow = RLVRWorkflow(reward)
        rollouts = await workflow.arun_episode(engine, prompt(answer="4"))
    assert [rollout.sibling for rollout in rollouts] == [0, 1, 2]
    assert [rollout.reward for rollout in rollouts] == [
        Scored(value=1.0, parts={"length": 2.0}),
        Scored(value=0.0, parts={"length": 3.0}),
        Scored(value=0.0, parts={"length": 1.0}),
    ]
    assert rollouts[1].turns[0].completion is engine.answers[1]
    as_workflow: Workflow = workflow
    as_engine: EpisodeEngine = engine
    assert as_workflow is workflow
    assert as_engine is engine


async def test_what_the_engine_aborted_or_failed_is_invalid_and_not_scored() -> None:
    engine = FakeEngine(
        [answer("a", [1], StopReason.ABORTED), answer("b", [], StopReason.ERROR), answer("c", [1])]
    )
    workflow = RLVRWorkflow(lambda *_: 1.0, workers=1)
    rollouts = await workflow.arun_episode(engine, prompt())
    await workflow.async_reward_fn.aclose()
    assert [rollout.reward for rollout in rollouts] == [
        Invalid(reason="generation ended with 'aborted'"),
        Invalid(reason="generation ended with 'error'"),
        Scored(value=1.0),
    ]
    assert workflow.async_reward_fn.counters.calls == 1


async def test_one_sibling_is_scored_while_another_is_still_being_written(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)

    def judge(text: str, completion: str, *ids: object) -> float:
        if completion == "first":
            fifo.write_text("scoring")
        return 1.0

    engine = FakeEngine([answer("first", [1]), answer("second", [2])])
    engine.gates[1] = fifo.read_text  # ends only once the first answer is being scored
    async with AsyncRewardWrapper(judge, timeout_seconds=10) as reward, asyncio.timeout(10):
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert [rollout.reward for rollout in rollouts] == [Scored(value=1.0)] * 2


async def test_a_generation_error_ends_the_group_as_itself_and_cancels_the_siblings() -> None:
    engine = FakeEngine([answer("never", [1]), GenerationError("engine is gone")])
    async with AsyncRewardWrapper(lambda *_: 1.0, workers=1) as reward:
        with pytest.raises(GenerationError, match="engine is gone"):
            await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert engine.canceled == [0]


async def test_a_plain_function_is_wrapped_with_the_given_limits() -> None:
    def slow(*_: object) -> float:
        while True:
            pass

    workflow = RLVRWorkflow(slow, timeout_seconds=0.2, workers=1)
    rollouts = await workflow.arun_episode(FakeEngine([answer("a", [1])]), prompt())
    await workflow.async_reward_fn.aclose()
    assert rollouts[0].reward == Invalid(reason="timed out after 0.2 s")
