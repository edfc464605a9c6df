"""Reinforcement learning with verifiable rewards: one answer per sibling, scored by a function.

Owns the single-turn workflow; knows neither processes nor tensors.

Consumes a Prompt; produces its rollouts in sibling order; waits for the engine and for the reward
functions; unblocked by their own deadlines. Each sibling is scored as soon as it is generated,
while others are still being written; a function of lists is called once, when all are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from offbeat.errors import true_cause
from offbeat.protocols import EpisodeEngine
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_group import GroupRewards
from offbeat.rollout.reward_source import RewardPart, RewardSource
from offbeat.rollout.signatures import RewardInput
from offbeat.types import Completion, Invalid, Prompt, Rollout, StopReason, Turn

_UNFINISHED = (StopReason.ABORTED, StopReason.ERROR)


class RLVRWorkflow:
    """Generate ``engine.n_samples`` answers to a prompt and score each of them.

    The reward function gets the answer in its own form, see signatures.py. An empty answer (only
    the stop token) is scored like any other; one that the engine aborted or failed is ``Invalid``
    without a call.

    Args:
        reward_fn: a function, "module:attr" or URL, or several as ``RewardPart`` (wrapped here with
            ``timeout_seconds`` and ``workers``), or an ``AsyncRewardWrapper``, which keeps its own.
        timeout_seconds: deadline of one call, > 0.
        workers: reward processes, >= 1.
    """

    def __init__(
        self,
        reward_fn: RewardSource | Sequence[RewardPart] | AsyncRewardWrapper,
        *,
        timeout_seconds: float = 15.0,
        workers: int = 2,
    ):
        if isinstance(reward_fn, AsyncRewardWrapper):
            self.async_reward_fn = reward_fn
        else:
            self.async_reward_fn = AsyncRewardWrapper(
                reward_fn, timeout_seconds=timeout_seconds, workers=workers
            )

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        """The siblings of one prompt, in order.

        Raises:
            GenerationError, PromptTooLong: from the engine; the other siblings are canceled.
            ConfigError, WorkerError: from the reward function's processes.
        """
        scores = await self.async_reward_fn.group()
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(self._answer(engine, data, sibling, scores))
                    for sibling in range(engine.n_samples)
                ]
        except BaseExceptionGroup as group:
            raise true_cause(group) from group
        completions = [task.result() for task in tasks]
        rewards = await scores.rewards()
        return [
            Rollout(
                sibling=sibling,
                turns=(Turn(prompt_ids=data.token_ids, completion=completion),),
                reward=rewards[sibling] if sibling in rewards else _unscored(completion),
            )
            for sibling, completion in enumerate(completions)
        ]

    async def _answer(
        self, engine: EpisodeEngine, data: Prompt, sibling: int, scores: GroupRewards
    ) -> Completion:
        completion = await engine.agenerate(data.token_ids.tolist(), sibling=sibling)
        if completion.stop_reason not in _UNFINISHED:
            await scores.add(
                sibling, reward_input(data, completion.text, completion.token_ids.tolist())
            )
        return completion


def reward_input(prompt: Prompt, completion: str, completion_ids: Sequence[int]) -> RewardInput:
    """An answer to ``prompt`` as reward functions get it."""
    return RewardInput(
        prompt=prompt.text,
        completion=completion,
        prompt_ids=prompt.token_ids.tolist(),
        completion_ids=completion_ids,
        columns=prompt.columns,
        messages=[{"role": m.role, "content": m.content} for m in prompt.messages],
    )


def _unscored(completion: Completion) -> Invalid:
    return Invalid(reason=f"generation ended with {completion.stop_reason.value!r}")
