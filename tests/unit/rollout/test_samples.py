"""to_samples: masks, log-probs and versions of one and of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from offbeat.errors import RolloutError
from offbeat.protocols import EpisodeEngine
from offbeat.rollout.samples import to_samples
from offbeat.types import (
    Completion,
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
)

PROMPT = Prompt(
    group_id=GroupId(5), epoch=0, row=2, token_ids=np.array([1, 2, 3], dtype=np.int64), text="go"
)


class CountingEngine:
    """Writes [100 * (turn + 1) + sibling, 2] and stamps turn and turn + 1 as versions."""

    n_samples = 2
    params = SamplingParams(max_new_tokens=2)

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        await asyncio.sleep(0)
        return Completion(
            # 2 is a token of the prompt and of the environment too: a mask by value would show.
            token_ids=np.array([100 * (turn + 1) + sibling, 2], dtype=np.int64),
            logprobs=np.array([-0.25 * (turn + 1), -1.0], dtype=np.float32),
            versions=np.array([turn, turn + 1], dtype=np.int64),
            stop_reason=StopReason.LENGTH if sibling else StopReason.STOP,
            text="",
        )

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class TwoTurns:
    """Answers, reads what the environment replies, and answers again."""

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        return [await self._sibling(engine, data, s) for s in range(engine.n_samples)]

    async def _sibling(self, engine: EpisodeEngine, data: Prompt, sibling: int) -> Rollout:
        first = await engine.agenerate(data.token_ids.tolist(), sibling=sibling)
        reply = engine.encode("2 9")
        so_far = np.concatenate([data.token_ids, first.token_ids, np.array(reply)])
        second = await engine.agenerate(so_far.tolist(), sibling=sibling, turn=1)
        turns = (
            Turn(prompt_ids=data.token_ids, completion=first),
            Turn(prompt_ids=so_far, completion=second),
        )
        return Rollout(sibling=sibling, turns=turns, reward=Scored(value=float(sibling)))


async def two_turn_group() -> RolloutGroup:
    rollouts = await TwoTurns().arun_episode(CountingEngine(), PROMPT)
    return RolloutGroup(prompt=PROMPT, rollouts=tuple(rollouts), admission_version=PolicyVersion(0))


def with_reward(group: RolloutGroup, sibling: int, reward: Reward) -> RolloutGroup:
    rollouts = tuple(
        replace(r, reward=reward) if r.sibling == sibling else r for r in group.rollouts
    )
    return replace(group, rollouts=rollouts)


@pytest.mark.invariant("I06")
async def test_two_turns_become_one_row_that_trains_on_what_the_policy_wrote() -> None:
    first, second = to_samples(await two_turn_group())
    assert first.tokens.tolist() == [1, 2, 3, 100, 2, 2, 9, 200, 2]
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert first.behave_logp.tolist() == [0, 0, 0, -0.25, -1, 0, 0, -0.5, -1]
    assert first.versions.tolist() == [-1, -1, -1, 0, 1, -1, -1, 1, 2]
    assert (first.group_id, first.sibling, first.reward, first.truncated) == (5, 0, 0.0, False)
    assert (second.sibling, second.reward, second.truncated) == (1, 1.0, True)
    assert (first.tokens.dtype, first.behave_logp.dtype) == (np.int64, np.float32)
    assert (first.versions.dtype, first.loss_mask.dtype) == (np.int64, np.bool_)


async def test_an_invalid_reward_leaves_its_row_out_and_the_others_keep_their_identity() -> None:
    group = with_reward(await two_turn_group(), 0, Invalid(reason="timed out"))
    assert [(sample.sibling, sample.reward) for sample in to_samples(group)] == [(1, 1.0)]


@pytest.mark.parametrize(
    ("prompt_ids", "position"),
    [
        ([1, 2, 3, 101, 4, 2, 9], 4),  # the answer was decoded and encoded again
        ([7, 2, 3, 101, 2, 2, 9], 0),
        ([1, 2, 3, 101], 4),  # the history was cut
    ],
)
async def test_a_turn_that_does_not_continue_the_last_one_is_an_error_that_says_where(
    prompt_ids: list[int], position: int
) -> None:
    group = await two_turn_group()
    broken = group.rollouts[1]
    later = replace(broken.turns[1], prompt_ids=np.array(prompt_ids, dtype=np.int64))
    rollouts = (group.rollouts[0], replace(broken, turns=(broken.turns[0], later)))
    with pytest.raises(RolloutError, match=f"group 5, sibling 1, turn 1: .*position {position}"):
        to_samples(replace(group, rollouts=rollouts))


async def test_a_log_prob_that_is_not_finite_never_becomes_a_row() -> None:
    group = await two_turn_group()
    turn = group.rollouts[0].turns[0]
    bad = replace(turn.completion, logprobs=np.array([-0.5, np.nan], dtype=np.float32))
    rollout = Rollout(sibling=0, turns=(replace(turn, completion=bad),), reward=Scored(value=1.0))
    with pytest.raises(RolloutError, match=r"group 5, sibling 0, turn 0: .*position 4"):
        to_samples(replace(group, rollouts=(rollout,)))
