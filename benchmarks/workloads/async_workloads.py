"""Rows, rewards and workflows of the workloads of ``benchmarks/async_vs_sync.py``.

Nothing here is meant to be learned: the tasks have the cost that a workload is about, and the same
cost in every run. Lengths and waits are drawn from the row or the group and the sibling, so a
synchronous and an asynchronous run draw the same ones.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from offbeat.protocols import EpisodeEngine
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.rlvr import RLVRWorkflow
from offbeat.seeds import derive
from offbeat.types import Completion, Prompt, Rollout, SamplingParams

SEED = 1

LENGTH_CV = 1.3
"""Standard deviation over mean of the log-normal lengths, before they are cut."""

LENGTH_MEAN = 32

SHORTEST_WAIT, LONGEST_WAIT = 0.5, 5.0
"""Seconds that a waiting reward takes, uniform."""


def rows(n: int, digits: int = 6) -> list[dict[str, object]]:
    """``n`` rows: a prompt of digits, and the row's number for the rewards."""
    draw = random.Random(SEED)
    return [
        {"prompt": f"{draw.randrange(10**digits):0{digits}d}=", "number": number}
        for number in range(n)
    ]


def even_share(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    **columns: object,
) -> float:
    """Share of even token ids: a reward that costs nothing and differs between siblings."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


async def wait_then_score(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    number: int,
    **columns: object,
) -> float:
    """`even_share` after a wait, as a tool, a judge or a sandbox would take.

    The wait comes from the row and the answer's tokens: siblings wait differently.
    """
    draw = random.Random(derive(SEED, "wait", number, *completion_ids[:4]))
    await asyncio.sleep(draw.uniform(SHORTEST_WAIT, LONGEST_WAIT))
    return even_share(prompt, completions, prompt_ids, completion_ids)


def drawn_length(group_id: int, sibling: int, longest: int) -> int:
    """Tokens of one answer: log-normal with mean `LENGTH_MEAN`, cut to 1..``longest``."""
    sigma = math.sqrt(math.log(1 + LENGTH_CV**2))
    mu = math.log(LENGTH_MEAN) - sigma**2 / 2
    draw = random.Random(derive(SEED, "length", group_id, sibling))
    return min(longest, max(1, round(draw.lognormvariate(mu, sigma))))


class _DrawnLengths:
    """An ``EpisodeEngine`` whose answers have exactly the drawn length of their sibling."""

    def __init__(self, engine: EpisodeEngine, group_id: int) -> None:
        self._engine = engine
        self._group_id = group_id

    @property
    def n_samples(self) -> int:
        return self._engine.n_samples

    @property
    def params(self) -> SamplingParams:
        return self._engine.params

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        own = params or self.params
        length = drawn_length(self._group_id, sibling, own.max_new_tokens)
        own = replace(own, max_new_tokens=length, ignore_eos=True)
        return await self._engine.agenerate(prompt_ids, sibling=sibling, turn=turn, params=own)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)


class DrawnLengthWorkflow:
    """One answer per sibling whose length is drawn, as answers of a real task vary.

    A model with random weights has no end of its own: the length limit of each request is the
    draw, and end tokens are ignored. Nobody downstream knows the lengths beforehand.
    """

    def __init__(self, reward_fn: AsyncRewardWrapper) -> None:
        self._inner = RLVRWorkflow(reward_fn)

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        """See ``Workflow``."""
        return await self._inner.arun_episode(_DrawnLengths(engine, data.group_id), data)
