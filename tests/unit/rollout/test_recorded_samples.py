"""What a trainer was given can be rebuilt from the rollouts file, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.launch.codec import decode, encode
from offbeat.observe.rollouts import RolloutLog, read_rollouts
from offbeat.rollout.samples import recorded_samples, to_samples
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

IDS = st.lists(st.integers(0, 200_000), max_size=4)
LOGPROBS = st.floats(-100, 0, width=32)
REWARDS = st.one_of(
    st.builds(Invalid, reason=st.text(max_size=3)),
    st.builds(Scored, value=st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(Scored, value=st.integers(-3, 3)),
)


def ids(found: list[int]) -> np.ndarray:
    return np.array(found, dtype=np.int64)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(IDS)
    n = len(tokens)
    return Completion(
        token_ids=ids(tokens),
        logprobs=np.array(draw(st.lists(LOGPROBS, min_size=n, max_size=n)), dtype=np.float32),
        versions=ids(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
        stop_reason=draw(st.sampled_from(StopReason)),
        text="",
    )


@st.composite
def rollouts(draw: st.DrawFn, sibling: int) -> Rollout:
    """One to three turns, each of which begins with the one before."""
    turns: list[Turn] = []
    read = [1, *draw(IDS)]
    for _ in range(draw(st.integers(1, 3))):
        answer = draw(completions())
        turns.append(Turn(prompt_ids=ids(read), completion=answer))
        read = [*read, *answer.token_ids.tolist(), *draw(IDS)]
    return Rollout(sibling=sibling, turns=tuple(turns), reward=draw(REWARDS))


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    number = GroupId(draw(st.integers(0, 2**40)))
    prompt = Prompt(group_id=number, epoch=0, row=0, token_ids=ids([1]), text="")
    siblings = draw(st.permutations(range(draw(st.integers(1, 3)))))
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(draw(rollouts(sibling)) for sibling in siblings),
        admission_version=PolicyVersion(0),
    )


def bits(samples: list[TrainSample]) -> list[list[object]]:
    """Every field as it goes to the trainer, arrays with their dtype and bytes."""
    sent = decode(encode(samples), list[TrainSample])
    values = [[getattr(sample, field.name) for field in fields(sample)] for sample in sent]
    return [
        [
            (v.dtype, v.tobytes())
            if isinstance(v, np.ndarray)
            else np.float64(v).tobytes()
            if isinstance(v, float)
            else v
            for v in row
        ]
        for row in values
    ]


@pytest.mark.invariant("I05")
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(groups(), min_size=1, max_size=3))
def test_samples_from_the_file_are_those_that_the_trainer_was_given_bit_for_bit(
    batch: list[RolloutGroup],
) -> None:
    with TemporaryDirectory() as folder:
        RolloutLog(Path(folder)).write(1, batch)
        found = recorded_samples(read_rollouts(Path(folder), 1))
    assert bits(found) == bits([sample for group in batch for sample in to_samples(group)])
