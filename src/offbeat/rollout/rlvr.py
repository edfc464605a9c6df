"""Reinforcement learning with verifiable rewards: one answer per sibling, scored by a function.

Owns the single-turn workflow; knows neither processes nor tensors.

Consumes a Prompt; produces its rollouts in sibling order; waits for the engine and for the reward
function; unblocked by their own deadlines. Each sibling is scored as soon as it is generated, while
others are still being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from offbeat.errors import true_cause
from offbeat.protocols import EpisodeEngine
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_pool import RewardSource
from offbeat.types import Completion, Invalid, Prompt, Reward, Rollout, StopReason, Turn

_UNFINISHED = (StopReason.ABORTED, StopReason.ERROR)


class RLVRWorkflow:
    """Generate ``engine.n_samples`` answers to a prompt and score each of them.

    The reward function is called as ``fn(prompt, completion, prompt_ids, completion_ids,
    **columns)``: two texts, two lists of token ids, and the other columns of the prompt's row by
    name. An empty answer (only the stop token) is scored like any other; one that the engine
    aborted or failed is ``Invalid`` without a call.

    Args:
        reward_fn: a function or "module:attr" (wrapped here with ``timeout_seconds`` and
            ``workers``), or an ``AsyncRewardWrapper``, which keeps its own.
        timeout_seconds: deadline of one call, > 0.
        workers: reward processes, >= 1.
    """

    def __init__(
        self,
        reward_fn: RewardSource | AsyncRewardWrapper,
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
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(self._sibling(engine, data, sibling))
                    for sibling in range(engine.n_samples)
                ]
        except BaseExceptionGroup as group:
            raise true_cause(group) from group
        return [task.result() for task in tasks]

    async def _sibling(self, engine: EpisodeEngine, data: Prompt, sibling: int) -> Rollout:
        completion = await engine.agenerate(data.token_ids.tolist(), sibling=sibling)
        reward = await self._reward(data, completion)
        turn = Turn(prompt_ids=data.token_ids, completion=completion)
        return Rollout(sibling=sibling, turns=(turn,), reward=reward)

    async def _reward(self, data: Prompt, completion: Completion) -> Reward:
        if completion.stop_reason in _UNFINISHED:
            return Invalid(reason=f"generation ended with {completion.stop_reason.value!r}")
        return await self.async_reward_fn(
            data.text,
            completion.text,
            data.token_ids.tolist(),
            completion.token_ids.tolist(),
            **data.columns,
        )
