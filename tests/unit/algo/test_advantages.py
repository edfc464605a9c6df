"""From rewards to token advantages: closed forms and the equivalence with GAE."""

from __future__ import annotations

import pytest
import torch

from offbeat.algo.advantages import (
    grpo_advantages,
    overlong_penalty,
    shape_rewards,
    zero_truncated,
)
from offbeat.algo.normalize import normalize

SEQ_ID = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
MASK = torch.tensor([False, True, True, False, True, False, True, True])


def test_overlong_penalty_is_zero_up_to_the_buffer_and_grows_linearly_to_the_limit() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100])
    assert overlong_penalty(lengths, 100, 20, 2.0).tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_buffer_outside_the_answer_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=r"overlong_tokens must be in \(0, 100\]"):
        overlong_penalty(torch.tensor([1]), 100, buffer, 1.0)


def test_shaping_adds_scales_and_clips_in_that_order() -> None:
    rewards = torch.tensor([1.0, 0.0, -4.0])
    assert shape_rewards(rewards, bias=-0.5, scaling=10.0, clip=20.0).tolist() == [5.0, -5.0, -20.0]
    assert shape_rewards(rewards).tolist() == rewards.tolist()


def test_a_clip_of_zero_is_refused_instead_of_erasing_the_rewards() -> None:
    with pytest.raises(ValueError, match="clip must be > 0"):
        shape_rewards(torch.ones(2), clip=0.0)


def test_an_unfinished_answer_gets_no_push_but_stays_in_the_baseline() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0])
    truncated = torch.tensor([False, False, True])
    normalized = normalize(
        rewards, torch.zeros(3, dtype=torch.long), mean_level="group", std_level="none"
    )
    landed = zero_truncated(normalized, truncated)
    assert landed.tolist() == pytest.approx([2 / 3, -1 / 3, 0.0])


def test_advantage_is_the_row_reward_on_policy_tokens_and_zero_elsewhere() -> None:
    found = grpo_advantages(torch.tensor([1.5, -2.0, 0.5]), MASK, SEQ_ID)
    assert found.tolist() == [0.0, 1.5, 1.5, 0.0, -2.0, 0.0, -2.0, 0.5]


def test_broadcast_equals_gae_with_gamma_and_lambda_one_and_no_critic() -> None:
    rewards = torch.tensor([1.5, -2.0, 0.5])
    expected = []
    for row in range(3):
        policy_tokens = [t for t in range(8) if SEQ_ID[t] == row and MASK[t]]
        advantage, gae = {}, 0.0
        for t in reversed(policy_tokens):
            delta = float(rewards[row]) if t == policy_tokens[-1] else 0.0
            gae = delta + gae
            advantage[t] = gae
        expected += [advantage.get(t, 0.0) for t in range(8) if SEQ_ID[t] == row]
    assert grpo_advantages(rewards, MASK, SEQ_ID).tolist() == expected


def test_token_level_normalization_weighs_rows_by_their_policy_tokens() -> None:
    advantage = grpo_advantages(torch.tensor([1.0, 0.0, 4.0]), MASK, SEQ_ID)
    row_groups = torch.tensor([3, 3, 8])
    found = normalize(
        advantage, row_groups[SEQ_ID], mean_level="batch", std_level="batch", eps=0.0, valid=MASK
    )
    tokens = advantage[MASK].double()
    expected = (tokens - tokens.mean()) / tokens.std(correction=0)
    assert torch.allclose(found[MASK].double(), expected, atol=1e-6)
    assert found[~MASK].eq(0).all()


def test_siblings_can_be_permuted() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0])
    order = torch.tensor([2, 0, 1])
    groups = torch.zeros(3, dtype=torch.long)
    straight = normalize(rewards, groups, mean_level="group", std_level="group")
    permuted = normalize(rewards[order], groups, mean_level="group", std_level="group")
    assert torch.allclose(permuted, straight[order], atol=1e-7)
