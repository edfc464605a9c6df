"""The rewards of one group's answers, from one or several functions.

Owns what a failure means: ``Invalid`` with its reason, never a number; the weighted sum of several
functions; and that a function of lists gets exactly one group's answers, once.

Consumes answers as they are written; produces ``Scored`` or ``Invalid`` for each; waits and is
unblocked as reward_pool.py says.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from offbeat.errors import true_cause
from offbeat.rollout.reward_failures import FailureLog
from offbeat.rollout.reward_pool import RewardFailure, RewardPool
from offbeat.rollout.reward_source import RewardPart
from offbeat.rollout.reward_wire import Answer
from offbeat.rollout.signatures import RewardInput
from offbeat.types import Invalid, Reward, Scored

Outcome: TypeAlias = Answer | RewardFailure

T = TypeVar("T")


async def together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """The results of calls that run at the same time; the first error cancels the others."""

    async def wait(call: Awaitable[T]) -> T:
        return await call

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise true_cause(errors) from errors
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One function of the reward and the processes that run it."""

    part: RewardPart
    pool: RewardPool
    failures: FailureLog

    async def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Outcome:
        """One call with these arguments."""
        outcome = await self.pool.call(*args, **kwargs)
        self._note([outcome])
        return outcome

    async def score(self, answers: Sequence[RewardInput]) -> list[Outcome]:
        """One call that scores these answers."""
        outcomes = await self.pool.score(answers)
        self._note(outcomes)
        return outcomes

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        """Report what failed; a call that failed as a whole is one failure, not one per answer."""
        failed = {id(o): o for o in outcomes if isinstance(o, RewardFailure)}
        for failure in failed.values():
            self.failures.add(self.part.label, failure)


def summed(parts: Sequence[RewardPart], outcomes: Sequence[Outcome]) -> Reward:
    """The weighted sum of what the functions said of one answer, or why there is none."""
    value, named = 0.0, {}
    for part, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            prefix = f"{part.name}: " if part.name else ""
            return Invalid(reason=f"{prefix}{outcome.reason}")
        value += part.weight * outcome.value
        if part.name:
            named[part.name] = outcome.value
        dot = f"{part.name}." if part.name else ""
        named.update({f"{dot}{name}": number for name, number in outcome.parts.items()})
    if not math.isfinite(value):
        return Invalid(reason=f"the weighted sum is {value}")
    return Scored(value=value, parts=named)


class GroupRewards:
    """The rewards of one group's answers; ``AsyncRewardWrapper.group`` makes one.

    A function of one answer is called as soon as an answer is added; a function of lists once, when
    all answers are there.
    """

    def __init__(self, judges: Sequence[Judge], on_call: Callable[[float, float], None] | None):
        self._judges = judges
        self._on_call = on_call
        self._answers: dict[int, RewardInput] = {}
        self._outcomes: dict[int, dict[int, Outcome]] = {}

    async def add(self, sibling: int, answer: RewardInput) -> None:
        """Score an answer with the functions that take one at a time.

        Raises:
            ConfigError: a function cannot be loaded, or has none of the known signatures.
            WorkerError: its processes die while they start, or the wrapper is closed.
        """
        assert sibling not in self._answers, f"sibling {sibling} was added twice"
        self._answers[sibling] = answer
        await self._score([sibling], batched=False)

    async def rewards(self) -> dict[int, Reward]:
        """The reward of every answer that was added, by sibling. Raises as ``add`` does."""
        siblings = sorted(self._answers)
        if siblings:
            await self._score(siblings, batched=True)
        parts = [judge.part for judge in self._judges]
        indices = range(len(parts))
        return {s: summed(parts, [self._outcomes[s][i] for i in indices]) for s in siblings}

    async def _score(self, siblings: Sequence[int], *, batched: bool) -> None:
        asked = [
            index
            for index, judge in enumerate(self._judges)
            if await judge.pool.is_batched() is batched
        ]
        if not asked:
            return
        answers = [self._answers[sibling] for sibling in siblings]
        started = time.monotonic()
        try:
            scored = await together([self._judges[index].score(answers) for index in asked])
        finally:
            if self._on_call is not None:
                self._on_call(started, time.monotonic())
        for index, outcomes in zip(asked, scored, strict=True):
            for sibling, outcome in zip(siblings, outcomes, strict=True):
                self._outcomes.setdefault(sibling, {})[index] = outcome
