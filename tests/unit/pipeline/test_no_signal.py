"""Groups that teach nothing are named, counted, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.errors import RolloutError
from offbeat.observe.metrics import NO_SIGNAL
from offbeat.pipeline.no_signal import ADVICE, SignalRules, SignalWatch
from offbeat.types import (
    Completion,
    GroupId,
    Invalid,
    NoSignal,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    Turn,
)

GRPO = SignalRules(group_baseline=True, truncated_count=True)


def rollout(
    sibling: int, reward: Reward, *, tokens: int = 2, stop: StopReason = StopReason.STOP
) -> Rollout:
    completion = Completion(
        token_ids=np.zeros(tokens, dtype=np.int64),
        logprobs=np.zeros(tokens, dtype=np.float32),
        versions=np.zeros(tokens, dtype=np.int64),
        stop_reason=stop,
        text="x" * tokens,
    )
    turn = Turn(prompt_ids=np.zeros(1, dtype=np.int64), completion=completion)
    return Rollout(sibling=sibling, turns=(turn,), reward=reward)


def group(*rollouts: Rollout) -> RolloutGroup:
    prompt = Prompt(
        group_id=GroupId(0), epoch=0, row=0, token_ids=np.zeros(1, dtype=np.int64), text=""
    )
    return RolloutGroup(prompt=prompt, rollouts=rollouts, admission_version=PolicyVersion(0))


def scored(*values: float, **kind: object) -> RolloutGroup:
    rollouts = [
        rollout(i, Scored(value=v), **kind)  # type: ignore[arg-type]  # a test's keywords
        for i, v in enumerate(values)
    ]
    return group(*rollouts)


def test_different_rewards_are_a_signal() -> None:
    assert GRPO.why_none(scored(0.0, 0.0, 1.0)) is None


def test_equal_rewards_are_none_when_the_group_is_the_baseline() -> None:
    assert GRPO.why_none(scored(0.5, 0.5)) is NoSignal.EQUAL
    batch = SignalRules(group_baseline=False, truncated_count=True)
    assert batch.why_none(scored(0.5, 0.5)) is None


def test_an_invalid_reward_is_not_compared() -> None:
    bad = rollout(2, Invalid(reason="no"))
    mixed = group(rollout(0, Scored(value=1.0)), rollout(1, Scored(value=1.0)), bad)
    assert GRPO.why_none(mixed) is NoSignal.EQUAL


def test_cut_answers_are_a_signal_unless_the_objective_leaves_them_out() -> None:
    cut = scored(0.0, 1.0, stop=StopReason.LENGTH)
    assert GRPO.why_none(cut) is None
    strict = SignalRules(group_baseline=True, truncated_count=False)
    assert strict.why_none(cut) is NoSignal.TRUNCATED
    one_whole = group(
        rollout(0, Scored(value=0.0), stop=StopReason.LENGTH), rollout(1, Scored(value=1.0))
    )
    assert strict.why_none(one_whole) is None


def test_answers_without_tokens_are_none() -> None:
    assert GRPO.why_none(scored(0.0, 1.0, tokens=0)) is NoSignal.EMPTY


def test_so_many_in_a_row_end_the_run_with_the_cause_and_what_to_try() -> None:
    watch = SignalWatch(3)
    watch.record(NoSignal.EQUAL)
    watch.record(NoSignal.TRUNCATED)
    with pytest.raises(RolloutError, match=r"the last 3 groups .* 2 of them because all rewards"):
        watch.record(NoSignal.EQUAL)


def test_one_group_with_signal_starts_the_count_again() -> None:
    watch = SignalWatch(2)
    for cause in (NoSignal.EQUAL, None, NoSignal.EQUAL, None, NoSignal.EQUAL):
        watch.record(cause)
    with pytest.raises(RolloutError, match="the last 2 groups"):
        watch.record(NoSignal.EQUAL)


def test_without_a_limit_nothing_ends() -> None:
    watch = SignalWatch(None)
    for _ in range(10_000):
        watch.record(NoSignal.EQUAL)


def test_every_cause_has_advice_and_a_name() -> None:
    assert set(ADVICE) == set(NO_SIGNAL) == set(NoSignal)


def test_groups_without_signal_are_counted_by_cause() -> None:
    rules = SignalRules(group_baseline=True, truncated_count=False)
    groups = [
        scored(0.5, 0.5),
        scored(0.0, 1.0),
        scored(1.0, 1.0),
        scored(0.0, 1.0, stop=StopReason.LENGTH),
    ]
    assert rules.counts(groups) == {
        "groups/no_signal_empty_count": 0.0,
        "groups/no_signal_truncated_count": 1.0,
        "groups/no_signal_equal_count": 2.0,
    }
