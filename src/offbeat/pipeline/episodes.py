"""One group's episode: the engine a workflow sees, and the outcome of running it.

Consumes a ``Prompt``; produces a ``RolloutGroup`` or a reason to drop it. Waits for generator and rewards, both with deadlines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.data.tokens import TextCodec
from offbeat.errors import PromptTooLong, RolloutError, boundary
from offbeat.protocols import Generator, Workflow
from offbeat.seeds import derive
from offbeat.types import (
    Completion,
    DropReason,
    GenerateRequest,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Why a group does not train; ``error`` is the first real one where there was one."""

    reason: DropReason
    detail: str
    error: RolloutError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How answers are drawn: ``stream`` names the family of random streams (``rollout`` or ``eval``)."""

    stream: str
    seed: int
    n_samples: int
    params: SamplingParams


class GroupEngine:
    """``EpisodeEngine`` bound to one prompt.

    Args:
        key: distinguishes the prompt within the plan's stream (group id, or row of the validation set).
        tag: put in front of request ids; unique among requests that run at the same time.
        on_start, on_end: called around every request.
    """

    def __init__(
        self,
        generator: Generator,
        codec: TextCodec,
        plan: SamplingPlan,
        *,
        group_id: GroupId,
        key: int,
        tag: str,
        on_start: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._generator = generator
        self._codec = codec
        self._plan = plan
        self._group_id = group_id
        self._key = key
        self._tag = tag
        self._on_start = on_start
        self._on_end = on_end
        self.generated_tokens = 0

    @property
    def n_samples(self) -> int:
        return self._plan.n_samples

    @property
    def params(self) -> SamplingParams:
        return self._plan.params

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        request = GenerateRequest(
            request_id=f"{self._tag}-{self._key}-{sibling}-{turn}",
            group_id=self._group_id,
            sibling=sibling,
            turn=turn,
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            params=params or self._plan.params,
            seed=derive(self._plan.seed, self._plan.stream, self._key, sibling, turn),
        )
        self._on_start()
        try:
            completion = await self._generator.generate(request)
            self.generated_tokens += len(completion.token_ids)
            return completion
        finally:
            self._on_end()

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)


async def run_episode(
    workflow: Workflow, engine: GroupEngine, prompt: Prompt, admission_version: PolicyVersion
) -> RolloutGroup | Dropped:
    """Run the workflow on one prompt; a failure of this group alone becomes ``Dropped``.

    Raises whatever ends the run: a dead worker, a configuration or programming error of offbeat itself.
    """
    try:
        with boundary(RolloutError, f"workflow, group {prompt.group_id} (row {prompt.row})"):
            rollouts = tuple(await workflow.arun_episode(engine, prompt))
            _check(rollouts, engine.n_samples)
    except PromptTooLong as exc:
        return Dropped(reason=DropReason.TOO_LONG, detail=str(exc), error=exc)
    except RolloutError as exc:
        return Dropped(reason=DropReason.FAILED, detail=str(exc), error=exc)
    group = RolloutGroup(prompt=prompt, rollouts=rollouts, admission_version=admission_version)
    if len(group.valid) < min(2, engine.n_samples):
        reasons = [r.reward.reason for r in rollouts if isinstance(r.reward, Invalid)]
        detail = f"{len(reasons)} of {len(rollouts)} rewards are invalid; the first: {reasons[0]}"
        error = RolloutError(f"group {prompt.group_id} (row {prompt.row}): {detail}")
        return Dropped(reason=DropReason.INVALID_REWARD, detail=detail, error=error)
    return group


def _check(rollouts: Sequence[Rollout], expected: int) -> None:
    siblings = [r.sibling for r in rollouts]
    if sorted(siblings) != list(range(expected)):
        raise RolloutError(
            f"the workflow returned siblings {siblings}; expected each of 0..{expected - 1} once"
        )


class FailureBudget:
    """Ends a run whose groups keep failing; a plain counter, no clocks.

    Args:
        max_rate: share of failures among ended groups above which the run stops, judged from ``PATIENCE`` groups on.
        max_consecutive: failed groups in a row after which the run stops.
        rows: rows of the data set; that many too-long prompts in a row mean that none fits.
    """

    PATIENCE = 20

    def __init__(self, *, max_rate: float, max_consecutive: int, rows: int) -> None:
        self._max_rate = max_rate
        self._max_consecutive = max_consecutive
        self._rows = rows
        self._ended = 0
        self._failed = 0.0
        self._in_a_row = 0
        self._too_long = 0
        self._first: RolloutError | None = None

    def record(self, outcome: RolloutGroup | Dropped) -> None:
        """Count one ended group.

        Raises:
            RolloutError: the budget is spent; the message has the first real error of the run.
        """
        if isinstance(outcome, RolloutGroup):
            self._ended += 1
            self._failed += 1 - len(outcome.valid) / len(outcome.rollouts)
            self._in_a_row = self._too_long = 0
        elif outcome.reason is DropReason.TOO_LONG:
            self._too_long += 1
        else:
            self._ended += 1
            self._failed += 1
            self._in_a_row += 1
            self._first = self._first or outcome.error
        if self._too_long >= self._rows:
            raise RolloutError(
                f"all of the last {self._too_long} prompts were too long, and the data set has {self._rows} rows; "
                "raise train_dataset.max_prompt_len or model.max_model_len, or lower gconfig.max_new_tokens"
            )
        if self._in_a_row >= self._max_consecutive:
            self._stop(
                f"{self._in_a_row} groups in a row failed (rollout.max_consecutive_failures)"
            )
        if self._ended >= self.PATIENCE and self._failed / self._ended > self._max_rate:
            share = self._failed / self._ended
            self._stop(
                f"{share:.0%} of {self._ended} groups failed (rollout.max_failure_rate {self._max_rate})"
            )

    def _stop(self, why: str) -> None:
        first = (
            f"the first error was: {self._first}"
            if self._first
            else "rewards of single rollouts were invalid"
        )
        raise RolloutError(f"{why}; {first}") from self._first
