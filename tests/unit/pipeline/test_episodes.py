"""What a group's episode can come to, and when failures end a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from offbeat.data.tokens import TextCodec
from offbeat.errors import (
    ConfigError,
    GenerationError,
    PromptTooLong,
    RolloutError,
    WorkerError,
    true_cause,
)
from offbeat.pipeline.episodes import (
    Dropped,
    FailureBudget,
    GroupEngine,
    SamplingPlan,
    reward_called,
    run_episode,
)
from offbeat.protocols import EpisodeEngine
from offbeat.types import (
    Completion,
    DropReason,
    GenerateRequest,
    GeneratorStats,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Scored,
    StopReason,
    Turn,
    WeightUpdate,
)

PROMPT = Prompt(
    group_id=GroupId(3), epoch=0, row=6, token_ids=np.array([7, 8], dtype=np.int64), text="34"
)
OK = Scored(value=1.0)
BAD = Invalid(reason="timed out after 2 s")


def completion(*token_ids: int, logp: float = -1.0) -> Completion:
    n = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=np.full(n, logp, dtype=np.float32),
        versions=np.zeros(n, dtype=np.int64),
        stop_reason=StopReason.STOP,
        text="x",
    )


def rollout(sibling: int, reward: Reward = OK, *turns: Turn) -> Rollout:
    one = Turn(prompt_ids=PROMPT.token_ids, completion=completion(5, 2))
    return Rollout(sibling=sibling, turns=turns or (one,), reward=reward)


class Echo:
    """A generator whose answer is always the same, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return completion(5, 6, 2)

    async def stage(self, update: WeightUpdate) -> None: ...

    async def commit(self, version: PolicyVersion) -> float:
        return 0.0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    async def stats(self) -> GeneratorStats:
        raise NotImplementedError


@dataclass(frozen=True)
class Plain:
    """A workflow that is one function."""

    make: Callable[[EpisodeEngine, Prompt], Awaitable[Sequence[Rollout]]]

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        return await self.make(engine, data)


def returning(*rollouts: Rollout) -> Plain:
    async def make(engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        return rollouts

    return Plain(make)


def raising(error: BaseException) -> Plain:
    async def make(engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        raise error

    return Plain(make)


def engine_of(codec: TextCodec, generator: Echo | None = None, **hooks: object) -> GroupEngine:
    plan = SamplingPlan(
        stream="rollout", seed=1, n_samples=2, params=SamplingParams(max_new_tokens=4)
    )
    return GroupEngine(
        generator or Echo(), codec, plan, group_id=GroupId(3), key=3, tag="train", **hooks
    )  # type: ignore[arg-type]  # hooks of the test


async def outcome_of(workflow: Plain, codec: TextCodec) -> RolloutGroup | Dropped:
    return await run_episode(workflow, engine_of(codec), PROMPT, PolicyVersion(5))


async def test_the_siblings_become_a_group_with_its_admission_version(codec: TextCodec) -> None:
    outcome = await outcome_of(returning(rollout(1), rollout(0, BAD), rollout(2)), codec)
    assert isinstance(outcome, Dropped)
    outcome = await outcome_of(returning(rollout(1), rollout(0)), codec)
    assert isinstance(outcome, RolloutGroup)
    assert outcome.admission_version == 5
    assert outcome.prompt is PROMPT


@pytest.mark.parametrize(
    ("error", "reason", "said"),
    [
        (ValueError("mine"), DropReason.FAILED, "workflow, group 3 (row 7): ValueError: mine"),
        (GenerationError("lost"), DropReason.FAILED, "lost"),
        (PromptTooLong("30 tokens"), DropReason.TOO_LONG, "30 tokens"),
        (
            ExceptionGroup("siblings", [ExceptionGroup("inner", [PromptTooLong("31 tokens")])]),
            DropReason.TOO_LONG,
            "31 tokens",
        ),
        (
            ExceptionGroup("siblings", [GenerationError("lost"), KeyError("mine")]),
            DropReason.FAILED,
            "workflow, group 3 (row 7): KeyError: 'mine'",
        ),
    ],
)
async def test_an_error_of_one_group_drops_that_group(
    codec: TextCodec, error: Exception, reason: DropReason, said: str
) -> None:
    outcome = await outcome_of(raising(error), codec)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is reason
    # What is the workflow's own is told with its place.
    place = re.fullmatch(rf"{re.escape(said)}( \(.*test_episodes\.py:\d+\))?", outcome.detail)
    assert place is not None
    assert (place[1] is not None) == (type(error) is ValueError)
    assert str(outcome.error) == outcome.detail


@pytest.mark.parametrize("siblings", [[0], [0, 0], [1, 2], [0, 1, 2], []])
async def test_a_workflow_must_return_each_sibling_once(
    codec: TextCodec, siblings: list[int]
) -> None:
    outcome = await outcome_of(returning(*map(rollout, siblings)), codec)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.FAILED
    assert f"it returned siblings {siblings}; expected each of 0..1 once" in outcome.detail


async def test_a_workflow_that_returns_something_else_drops_the_group(codec: TextCodec) -> None:
    outcome = await outcome_of(returning(OK, OK), codec)  # type: ignore[arg-type]  # on purpose
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.FAILED
    assert "a list with a Scored; expected offbeat.types.Rollout" in outcome.detail


async def test_a_workflow_whose_reward_is_a_bare_number_is_told_what_is_expected(
    codec: TextCodec,
) -> None:
    bare = rollout(1, 1.0)  # type: ignore[arg-type]  # on purpose
    outcome = await outcome_of(returning(rollout(0), bare), codec)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.FAILED
    assert "the reward of sibling 1 is 1.0; expected what awaiting the reward" in outcome.detail


async def test_a_later_turn_that_does_not_fit_is_the_workflows_failure(codec: TextCodec) -> None:
    engine = engine_of(codec, Echo(PromptTooLong("300 prompt tokens")))
    with pytest.raises(PromptTooLong):
        await engine.agenerate([1], sibling=0)
    with pytest.raises(RolloutError, match=r"turn 2 of sibling 0: 300 prompt tokens; let turns"):
        await engine.agenerate([1], sibling=0, turn=1)


async def test_fewer_than_two_valid_rewards_are_no_group(codec: TextCodec) -> None:
    outcome = await outcome_of(returning(rollout(0, BAD), rollout(1)), codec)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.INVALID_REWARD
    assert outcome.detail == (
        "group 3 (row 7): 1 of 2 rewards are invalid; the first: timed out after 2 s"
    )


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (
            (
                Turn(prompt_ids=PROMPT.token_ids, completion=completion(5, 2)),
                Turn(prompt_ids=np.array([7, 8, 5, 9, 4]), completion=completion(2)),
            ),
            "group 3, sibling 1, turn 1: the prompt does not start with the tokens of turn 0",
        ),
        (
            (Turn(prompt_ids=PROMPT.token_ids, completion=completion(5, logp=np.nan)),),
            "group 3, sibling 1, turn 0: log-prob at position 2 is not finite",
        ),
    ],
)
async def test_rollouts_that_cannot_be_trained_on_cost_their_group_and_not_the_run(
    codec: TextCodec, turns: tuple[Turn, ...], said: str
) -> None:
    outcome = await outcome_of(returning(rollout(0), rollout(1, OK, *turns)), codec)
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.FAILED
    assert said in outcome.detail


async def test_a_dead_worker_ends_the_run_also_out_of_a_nested_task_group(
    codec: TextCodec,
) -> None:
    async def one(engine: EpisodeEngine, sibling: int) -> Rollout:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(engine.agenerate([7, 8], sibling=sibling))
        return rollout(sibling)

    async def make(engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(one(engine, i)) for i in range(2)]
        return [t.result() for t in tasks]

    engine = engine_of(codec, Echo(WorkerError("generator-0 died")))
    with pytest.raises(WorkerError, match="generator-0 died"):
        await run_episode(Plain(make), engine, PROMPT, PolicyVersion(0))


async def test_a_configuration_error_and_a_cancellation_pass_unchanged(codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match="no such function"):
        await outcome_of(raising(ConfigError("no such function")), codec)
    with pytest.raises(asyncio.CancelledError):
        await outcome_of(raising(asyncio.CancelledError()), codec)


def test_what_ends_the_run_is_the_true_cause_and_a_rollout_error_only_the_last_resort() -> None:
    rollout_error, own, worker = RolloutError("r"), ValueError("v"), WorkerError("w")
    inner = ExceptionGroup("inner", [own, worker])
    assert true_cause(ExceptionGroup("outer", [rollout_error, inner])) is worker
    assert true_cause(ExceptionGroup("outer", [rollout_error, own])) is own
    assert true_cause(ExceptionGroup("outer", [ExceptionGroup("i", [rollout_error])])) is (
        rollout_error
    )
    assert true_cause(own) is own


# The engine a workflow sees


async def test_a_request_names_its_group_sibling_and_turn_and_draws_from_a_stream_of_its_own(
    codec: TextCodec,
) -> None:
    generator = Echo()
    engine = engine_of(codec, generator)
    for sibling, turn in ((0, 0), (1, 0), (1, 1)):
        await engine.agenerate([7, 8], sibling=sibling, turn=turn)
    assert [r.request_id for r in generator.requests] == [
        "train-3-0-0",
        "train-3-1-0",
        "train-3-1-1",
    ]
    assert len({r.seed for r in generator.requests}) == 3
    assert engine.generated_tokens == 9
    other = SamplingParams(max_new_tokens=1)
    await engine.agenerate([7], sibling=0, params=other)
    assert generator.requests[-1].params is other
    assert generator.requests[0].params == engine.params
    assert engine.decode(engine.encode("12")) == "12"


@pytest.mark.invariant("I03")
async def test_the_random_stream_of_an_answer_is_that_of_its_place_in_the_run(
    codec: TextCodec,
) -> None:
    drawn = []
    for order in ((0, 1), (1, 0)):
        generator = Echo()
        engine = engine_of(codec, generator)
        for sibling in order:
            await engine.agenerate([7, 8], sibling=sibling)
        drawn.append({r.sibling: r.seed for r in generator.requests})
    assert drawn[0] == drawn[1]


async def test_the_hooks_surround_every_request_also_one_that_fails(codec: TextCodec) -> None:
    said: list[str] = []
    times: list[tuple[float, float]] = []

    def on_end(start: float, end: float) -> None:
        said.append("end")
        times.append((start, end))

    engine = engine_of(
        codec,
        Echo(GenerationError("lost")),
        on_start=lambda: said.append("start"),
        on_end=on_end,
    )
    with pytest.raises(GenerationError):
        await engine.agenerate([7], sibling=0)
    assert said == ["start", "end"]
    assert times[0][0] <= times[0][1]


async def test_reward_calls_are_told_to_the_episode_that_made_them(codec: TextCodec) -> None:
    async def score(start: float) -> None:
        reward_called(start, start + 1)

    async def make(engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        async with asyncio.TaskGroup() as tasks:
            for i in range(2):
                tasks.create_task(score(10.0 * data.group_id + i))
        return [rollout(0), rollout(1)]

    heard: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 3: []}

    async def episode(group_id: int) -> None:
        await run_episode(
            Plain(make),
            engine_of(codec),
            replace(PROMPT, group_id=GroupId(group_id)),
            PolicyVersion(0),
            on_reward=lambda start, end: heard[group_id].append((start, end)),
        )

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(episode(1))
        tasks.create_task(episode(2))
    await episode(3)
    reward_called(0.0, 1.0)
    assert heard.pop(3) == [(30, 31), (31, 32)]
    assert heard == {1: [(10, 11), (11, 12)], 2: [(20, 21), (21, 22)]}


# The failure budget


def good(invalid: int = 0, n: int = 4) -> RolloutGroup:
    rewards = [BAD] * invalid + [OK] * (n - invalid)
    rollouts = tuple(rollout(i, r) for i, r in enumerate(rewards))
    return RolloutGroup(prompt=PROMPT, rollouts=rollouts, admission_version=PolicyVersion(0))


def failed(number: int) -> Dropped:
    error = RolloutError(f"error {number}")
    return Dropped(reason=DropReason.FAILED, detail=str(error), error=error)


TOO_LONG = Dropped(reason=DropReason.TOO_LONG, detail="too long")


def budget(max_rate: float = 0.5, max_consecutive: int = 1000, rows: int = 100) -> FailureBudget:
    return FailureBudget(max_rate=max_rate, max_consecutive=max_consecutive, rows=rows)


def test_failures_in_a_row_end_the_run_with_the_first_real_error() -> None:
    spending = budget(max_consecutive=3)
    for outcome in (failed(1), failed(2), good(), failed(3), failed(4)):
        spending.record(outcome)
    with pytest.raises(RolloutError, match=r"3 groups in a row failed.*first error was: error 1"):
        spending.record(failed(5))


def test_the_failure_rate_is_judged_after_some_patience() -> None:
    spending = budget(max_rate=0.5)
    for i in range(FailureBudget.PATIENCE - 1):
        spending.record(failed(i))
    with pytest.raises(RolloutError, match=r"100% of 20 groups failed .*0\.5\).*error 0"):
        spending.record(failed(99))


def test_a_failure_rate_at_the_limit_is_tolerated_and_above_it_is_not() -> None:
    spending = budget(max_rate=0.5)
    for i in range(20):
        spending.record(good())
        spending.record(failed(i))
    with pytest.raises(RolloutError, match="51% of 41 groups failed"):
        spending.record(failed(20))


def test_single_invalid_rewards_count_as_their_share_and_the_first_is_named() -> None:
    spending = budget(max_rate=0.4)
    for _ in range(FailureBudget.PATIENCE - 1):
        spending.record(good(invalid=2))
    with pytest.raises(RolloutError, match=r"50% of 20 groups failed.*timed out after 2 s"):
        spending.record(good(invalid=2))


def test_a_prompt_that_is_too_long_is_no_failure() -> None:
    spending = budget(max_consecutive=2, rows=100)
    for _ in range(30):
        spending.record(TOO_LONG)
    for _ in range(5):
        spending.record(failed(1))
        spending.record(good())


def test_a_whole_data_set_of_too_long_prompts_ends_the_run() -> None:
    spending = budget(rows=3)
    for outcome in (TOO_LONG, TOO_LONG, good(), TOO_LONG, TOO_LONG, failed(1), TOO_LONG, TOO_LONG):
        spending.record(outcome)
    with pytest.raises(RolloutError, match=r"all of the last 3 prompts.*data set has 3 rows"):
        spending.record(TOO_LONG)
