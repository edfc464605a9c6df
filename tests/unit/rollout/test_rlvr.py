"""RLVRWorkflow over an engine written here: what it asks, what it scores, what it overlaps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import ConfigError, GenerationError
from offbeat.protocols import EpisodeEngine, Workflow
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_source import RewardPart
from offbeat.rollout.rlvr import RLVRWorkflow
from offbeat.types import (
    Completion,
    GroupId,
    Invalid,
    Message,
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
        prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str
    ) -> dict[str, float]:
        assert (prompt, prompt_ids, type(completion_ids)) == ("2+2=", [7, 8, 9], list)
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

    def judge(prompt: str, completion: str, *ids: object) -> float:
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


def chat(**columns: object) -> Prompt:
    return replace(prompt(**columns), messages=(Message(role="user", content="2+2="),))


async def test_a_function_of_lists_gets_exactly_one_group_once_and_in_order() -> None:
    def judge(
        completions: list[str], prompts: list[str], completion_ids: list[list[int]], **columns: list
    ) -> list[float]:
        assert (prompts, columns["answer"]) == (["2+2="] * 3, ["4"] * 3)
        assert columns["prompt_ids"] == [[7, 8, 9]] * 3
        return [10 * len(completions) + ids[0] for ids in completion_ids]

    engine = FakeEngine([answer("a", [1]), answer("b", [2]), answer("c", [3])])
    async with AsyncRewardWrapper(judge, workers=1) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt(answer="4"))
        assert reward.counters.calls == 1
    assert [r.reward for r in rollouts] == [Scored(value=v) for v in (31.0, 32.0, 33.0)]


async def test_a_function_of_lists_is_not_given_what_the_engine_did_not_finish() -> None:
    engine = FakeEngine([answer("a", [1], StopReason.ABORTED), answer("b", [2])])
    async with AsyncRewardWrapper(
        lambda completions: [float(len(completions))], workers=1
    ) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert [r.reward for r in rollouts] == [
        Invalid(reason="generation ended with 'aborted'"),
        Scored(value=1.0),
    ]


async def test_none_in_a_list_is_invalid_for_that_answer_only() -> None:
    engine = FakeEngine([answer("a", [1]), answer("b", [2]), answer("c", [3])])
    async with AsyncRewardWrapper(
        lambda completions: [None if c == "b" else 1 for c in completions], workers=1
    ) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert [type(r.reward) for r in rollouts] == [Scored, Invalid, Scored]
    assert isinstance(rollouts[1].reward, Invalid)
    assert rollouts[1].reward.reason.startswith("returned None")


async def test_a_list_of_the_wrong_length_is_invalid_for_the_whole_group() -> None:
    engine = FakeEngine([answer("a", [1]), answer("b", [2])])
    async with AsyncRewardWrapper(lambda completions: [1.0], workers=1) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert [r.reward for r in rollouts] == [Invalid(reason="returned 1 values for 2 answers")] * 2


async def test_a_function_of_lists_gets_messages_where_the_prompt_is_a_conversation() -> None:
    def judge(completions: list[list[dict[str, str]]], prompts: list[list[dict[str, str]]]):
        assert prompts[0] == [{"role": "user", "content": "2+2="}]
        return [float(c[0]["content"] == "4" and c[0]["role"] == "assistant") for c in completions]

    engine = FakeEngine([answer("4", [1]), answer("5", [2])])
    async with AsyncRewardWrapper(judge, workers=1) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, chat())
    assert [r.reward for r in rollouts] == [Scored(value=1.0), Scored(value=0.0)]


async def test_functions_of_one_answer_and_of_lists_add_up_by_weight_and_name() -> None:
    parts = [
        RewardPart(
            source=lambda completion: {"reward": len(completion), "short": 1.0},
            name="length",
            weight=0.5,
        ),
        RewardPart(source=lambda completions: [2.0] * len(completions), name="group"),
        RewardPart(source=lambda completion: 9.0, name="seen", weight=0.0),
    ]
    engine = FakeEngine([answer("ab", [1]), answer("abcd", [2])])
    async with AsyncRewardWrapper(parts, workers=1) as reward:
        rollouts = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert [r.reward for r in rollouts] == [
        Scored(
            value=0.5 * size + 2.0,
            parts={"length": size, "length.short": 1.0, "group": 2.0, "seen": 9.0},
        )
        for size in (2.0, 4.0)
    ]


async def test_one_invalid_part_makes_the_answer_invalid_under_its_name() -> None:
    parts = [
        RewardPart(source=lambda completion: 1.0, name="fine"),
        RewardPart(source=lambda completion: float("nan"), name="odd", weight=0.0),
    ]
    engine = FakeEngine([answer("a", [1])])
    async with AsyncRewardWrapper(parts, workers=1) as reward:
        (rollout,) = await RLVRWorkflow(reward).arun_episode(engine, prompt())
    assert isinstance(rollout.reward, Invalid)
    assert rollout.reward.reason.startswith("odd: returned nan")


async def test_an_unknown_signature_ends_the_episode_and_lists_the_four_forms() -> None:
    def judge(text: str, truth: str) -> float:
        return 1.0

    async with AsyncRewardWrapper(judge, workers=1) as reward:
        with pytest.raises(ConfigError) as caught:
            await RLVRWorkflow(reward).arun_episode(FakeEngine([answer("a", [1])]), prompt())
    message = str(caught.value)
    assert message.startswith("rollout.reward_fn: judge(text, truth) is none of the four")
    for name in ("prompt_ids", "completions, prompts", "solution_str", "(completion)"):
        assert name in message


async def test_a_sum_that_is_not_finite_is_invalid() -> None:
    parts = [RewardPart(source=lambda completion: 1e308, name=name) for name in ("one", "two")]
    async with AsyncRewardWrapper(parts, workers=1) as reward:
        assert await reward("p", "a", [], []) == Invalid(reason="the weighted sum is inf")
