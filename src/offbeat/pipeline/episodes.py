"""One group's episode: the engine a workflow sees, and the outcome of running it.

Consumes a ``Prompt``; produces a ``RolloutGroup`` or a reason to drop it. Waits for generator and
rewards, both with deadlines of their own.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from offbeat.data.tokens import TextCodec
from offbeat.errors import OffbeatError, PromptTooLong, RolloutError, boundary, true_cause
from offbeat.protocols import Generator, Workflow
from offbeat.rollout.samples import to_samples
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
    Scored,
)

_REWARD_LISTENER: ContextVar[Callable[[float, float], None] | None] = ContextVar(
    "reward_listener", default=None
)

EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)
"""Whether the task at work answers a validation row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Why a group does not train; ``error`` is the first real one where there was one."""

    reason: DropReason
    detail: str
    error: RolloutError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How answers are drawn: ``stream`` names the family of random streams, rollout or eval."""

    stream: str
    seed: int
    n_samples: int
    params: SamplingParams


class GroupEngine:
    """``EpisodeEngine`` bound to one prompt.

    Args:
        key: distinguishes the prompt within the plan's stream (group id, or row of the validation
            set).
        tag: put in front of request ids; unique among requests that run at the same time.
        on_start: called before every request.
        on_end: called after every request, however it ended, with its start and end
            (CLOCK_MONOTONIC seconds).
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
        on_end: Callable[[float, float], None] = lambda start, end: None,
    ) -> None:
        self._generator = generator
        self._codec = codec
        self._plan = plan
        self._group_id = group_id
        self._key = key
        self._tag = tag
        self._on_start = on_start
        self._on_end = on_end
        self._open: set[str] = set()
        self.generated_tokens = 0

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have no answer yet."""
        return tuple(sorted(self._open))

    @property
    def n_samples(self) -> int:
        """See ``EpisodeEngine``."""
        return self._plan.n_samples

    @property
    def params(self) -> SamplingParams:
        """See ``EpisodeEngine``."""
        return self._plan.params

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        """See ``EpisodeEngine``."""
        request = GenerateRequest(
            request_id=f"{self._tag}-{self._key}-{sibling}-{turn}",
            group_id=self._group_id,
            sibling=sibling,
            turn=turn,
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            params=params or self._plan.params,
            seed=derive(self._plan.seed, self._plan.stream, self._key, sibling, turn),
        )
        started = time.monotonic()
        self._open.add(request.request_id)
        self._on_start()
        try:
            completion = await self._generator.generate(request)
        except PromptTooLong as exc:
            if turn == 0:
                raise
            # The row fits: what the workflow added to it does not.
            raise RolloutError(
                f"turn {turn + 1} of sibling {sibling}: {exc}; let turns be shorter or fewer, "
                "lower train_dataset.max_prompt_len to leave them room, or raise "
                "model.max_model_len"
            ) from exc
        else:
            self.generated_tokens += len(completion.token_ids)
            return completion
        finally:
            self._open.discard(request.request_id)
            self._on_end(started, time.monotonic())

    def encode(self, text: str) -> list[int]:
        """See ``EpisodeEngine``."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See ``EpisodeEngine``."""
        return self._codec.decode(token_ids)


def reward_called(start: float, end: float) -> None:
    """Pass the times of a reward call on to the episode that made it, if it listens.

    The reward function is made before any episode and shared by all: the context tells them apart.
    """
    listener = _REWARD_LISTENER.get()
    if listener is not None:
        listener(start, end)


async def run_episode(
    workflow: Workflow,
    engine: GroupEngine,
    prompt: Prompt,
    admission_version: PolicyVersion,
    *,
    deadline_seconds: float | None = None,
    on_reward: Callable[[float, float], None] | None = None,
) -> RolloutGroup | Dropped:
    """Run the workflow on one prompt; a failure of this group alone becomes ``Dropped``.

    A group that is not complete after ``deadline_seconds`` is cancelled; None waits for it.
    ``on_reward`` gets start and end of each reward call. Raises whatever ends the run: a dead
    worker, a configuration or programming error of offbeat itself.
    """
    listening = _REWARD_LISTENER.set(on_reward)
    try:
        async with asyncio.timeout(deadline_seconds) as deadline:
            rollouts = await run_workflow(workflow, engine, prompt, _place(prompt))
        group = RolloutGroup(prompt=prompt, rollouts=rollouts, admission_version=admission_version)
        # Rows that cannot be made cost one group here; at the trainer's door they end the run.
        to_samples(group)
    except PromptTooLong as exc:
        return Dropped(reason=DropReason.TOO_LONG, detail=str(exc), error=exc)
    except RolloutError as exc:
        return Dropped(reason=DropReason.FAILED, detail=str(exc), error=exc)
    except TimeoutError:
        if not deadline.expired():
            raise
        late = RolloutError(
            f"{_place(prompt)}: not complete after {deadline_seconds:g} s "
            "(rollout.group_deadline_seconds)"
        )
        return Dropped(reason=DropReason.CANCELLED, detail=str(late), error=late)
    finally:
        _REWARD_LISTENER.reset(listening)
    return _with_enough_rewards(group)


async def run_workflow(
    workflow: Workflow, engine: GroupEngine, prompt: Prompt, where: str
) -> tuple[Rollout, ...]:
    """The siblings that ``workflow`` makes of one prompt; ``where`` names it in errors.

    Raises:
        RolloutError: it raised an error of its own, which is named with its place, or did not
            return each sibling once, with a reward.
    """
    try:
        with boundary(RolloutError, f"workflow, {where}"):
            rollouts = tuple(await workflow.arun_episode(engine, prompt))
    except RolloutError as exc:
        cause = None if exc.__cause__ is None else true_cause(exc.__cause__)
        if cause is None or isinstance(cause, OffbeatError):
            raise
        raise RolloutError(f"{exc}{_raised_at(cause)}") from exc.__cause__
    for rollout in rollouts:
        _check_rollout(rollout, f"workflow, {where}")
    siblings = [r.sibling for r in rollouts]
    if sorted(siblings) != list(range(engine.n_samples)):
        raise RolloutError(
            f"workflow, {where}: it returned siblings {siblings}; expected each of "
            f"0..{engine.n_samples - 1} once"
        )
    return rollouts


def _raised_at(error: BaseException) -> str:
    """Where the innermost call of its traceback stands, in parentheses."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _check_rollout(rollout: object, where: str) -> None:
    """A workflow is a user's: its mistakes are told where they are made."""
    if not isinstance(rollout, Rollout):
        raise RolloutError(
            f"{where}: arun_episode returned a list with a {type(rollout).__name__}; expected "
            "offbeat.types.Rollout"
        )
    if not isinstance(rollout.reward, Scored | Invalid):
        raise RolloutError(
            f"{where}: the reward of sibling {rollout.sibling} is {rollout.reward!r}; expected "
            "what awaiting the reward function gives, or offbeat.types.Scored(value=…)"
        )


def _with_enough_rewards(group: RolloutGroup) -> RolloutGroup | Dropped:
    """A baseline needs two rewards, or one where there is only one sibling."""
    if len(group.valid) >= min(2, len(group.rollouts)):
        return group
    error = _invalid_rewards(group)
    return Dropped(reason=DropReason.INVALID_REWARD, detail=str(error), error=error)


def _invalid_rewards(group: RolloutGroup) -> RolloutError | None:
    """The group's invalid rewards as one error; None when all are valid."""
    reasons = [r.reward.reason for r in group.rollouts if isinstance(r.reward, Invalid)]
    if not reasons:
        return None
    return RolloutError(
        f"{_place(group.prompt)}: {len(reasons)} of {len(group.rollouts)} rewards are invalid; the "
        f"first: {reasons[0]}"
    )


def _place(prompt: Prompt) -> str:
    return f"group {prompt.group_id} (row {prompt.row + 1})"


CHOSEN = (DropReason.FILTERED, DropReason.STALE)
"""Drops that the configuration asks for, of complete groups: no failures."""


class FailureBudget:
    """Ends a run whose groups keep failing; a plain counter, no clocks.

    Args:
        max_rate: share of failures among ended groups above which the run stops, judged from
            ``PATIENCE`` groups on. A single invalid reward is that share of its group.
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
        """Count one ended group; a complete one that is dropped later is counted as complete.

        Raises:
            RolloutError: the budget is spent; the message has the first real error of the run.
        """
        if isinstance(outcome, Dropped) and outcome.reason in CHOSEN:
            return
        if isinstance(outcome, Dropped) and outcome.reason is DropReason.TOO_LONG:
            self._too_long += 1
        else:
            self._too_long = 0
            self._count(outcome)
        self._judge()

    def _count(self, outcome: RolloutGroup | Dropped) -> None:
        self._ended += 1
        if isinstance(outcome, Dropped):
            self._failed += 1
            self._in_a_row += 1
            self._first = self._first or outcome.error
        else:
            self._failed += 1 - len(outcome.valid) / len(outcome.rollouts)
            self._in_a_row = 0
            self._first = self._first or _invalid_rewards(outcome)

    def _judge(self) -> None:
        if self._too_long >= self._rows:
            raise RolloutError(
                f"all of the last {self._too_long} prompts were too long, and the data set has "
                f"{self._rows} rows; raise train_dataset.max_prompt_len or model.max_model_len, or "
                "lower gconfig.max_new_tokens"
            )
        if self._in_a_row >= self._max_consecutive:
            self._stop(
                f"{self._in_a_row} groups in a row failed (rollout.max_consecutive_failures)"
            )
        if self._ended >= self.PATIENCE and self._failed / self._ended > self._max_rate:
            self._stop(
                f"{self._failed / self._ended:.0%} of {self._ended} groups failed "
                f"(rollout.max_failure_rate {self._max_rate})"
            )

    def _stop(self, why: str) -> None:
        raise RolloutError(f"{why}; the first error was: {self._first}") from self._first
