"""What a value refuses to be: the checks that keep wrong data from travelling on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from offbeat import types
from offbeat.types import (
    Completion,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    TrainSample,
    Turn,
)

VALUES = [
    value
    for value in vars(types).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("cls", VALUES)
def test_every_noun_is_frozen_slotted_and_documented(cls: type) -> None:
    params = cls.__dataclass_params__
    assert params.frozen
    assert all(f.kw_only for f in dataclasses.fields(cls))
    assert "__slots__" in vars(cls)
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")


def completion(tokens: int = 3, logprobs: int = 3, versions: int = 3) -> Completion:
    return Completion(
        token_ids=np.arange(tokens),
        logprobs=np.zeros(logprobs, dtype=np.float32),
        versions=np.zeros(versions, dtype=np.int64),
        stop_reason=StopReason.STOP,
        text="abc",
    )


@pytest.mark.parametrize("lengths", [(3, 2, 3), (3, 3, 4), (0, 1, 1), (3, 0, 0)])
def test_a_completion_of_unequal_arrays_is_refused(lengths: tuple[int, int, int]) -> None:
    t, lp, v = lengths
    with pytest.raises(ValueError, match=f"token_ids {t}, logprobs {lp}, versions {v}"):
        completion(*lengths)


def test_an_empty_completion_is_a_completion() -> None:
    assert len(completion(0, 0, 0).token_ids) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_never_scored(value: float) -> None:
    with pytest.raises(ValueError, match=r"must be finite, got .*; use Invalid"):
        Scored(value=value)


def test_a_scored_reward_is_a_number_and_an_invalid_one_is_not() -> None:
    assert float(Scored(value=0.5, parts={"exact": 1.0})) == 0.5
    with pytest.raises(TypeError):
        float(Invalid(reason="timed out"))  # type: ignore[arg-type]


def rollout(sibling: int, reward: Scored | Invalid) -> Rollout:
    turn = Turn(prompt_ids=np.arange(2), completion=completion())
    return Rollout(sibling=sibling, turns=(turn,), reward=reward)


def test_a_rollout_without_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one turn"):
        Rollout(sibling=0, turns=(), reward=Scored(value=1.0))


def test_the_valid_rollouts_of_a_group_are_the_scored_ones_zero_included() -> None:
    prompt = Prompt(group_id=GroupId(0), epoch=0, row=0, token_ids=np.arange(2), text="1=")
    rewards = [Scored(value=0.0), Invalid(reason="None"), Scored(value=1.0)]
    group = RolloutGroup(
        prompt=prompt,
        rollouts=tuple(rollout(i, reward) for i, reward in enumerate(rewards)),
        admission_version=PolicyVersion(0),
    )
    assert [r.sibling for r in group.valid] == [0, 2]


def test_a_train_sample_of_unequal_arrays_is_refused_and_names_its_group() -> None:
    def sample(**changes: object) -> TrainSample:
        arrays: dict[str, object] = {
            "tokens": np.arange(4),
            "loss_mask": np.ones(4, dtype=np.bool_),
            "behave_logp": np.zeros(4, dtype=np.float32),
            "versions": np.zeros(4, dtype=np.int64),
        }
        return TrainSample(
            group_id=GroupId(7), sibling=0, reward=0.0, truncated=False, **{**arrays, **changes}
        )

    assert len(sample().tokens) == 4
    for name in ("tokens", "loss_mask", "behave_logp", "versions"):
        with pytest.raises(ValueError, match=r"of group 7 differ in length: \[3, 4\]"):
            sample(**{name: np.zeros(3)})
