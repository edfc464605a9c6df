"""The entropy bonus lowers the loss of uncertain policies."""

from __future__ import annotations

import pytest
import torch

from offbeat.algo.entropy import entropy_bonus

MASK = torch.tensor([True, False, True])


def test_bonus_is_minus_c_times_the_mean_over_policy_tokens() -> None:
    entropy = torch.tensor([1.0, 100.0, 3.0])
    assert entropy_bonus(entropy, MASK, 0.5, tokens=2).item() == -1.0


@pytest.mark.invariant("I10")
def test_each_input_of_the_bonus_changes_the_gradient() -> None:
    def gradient(mask: torch.Tensor, coefficient: float, tokens: float) -> torch.Tensor:
        entropy = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        loss = entropy_bonus(entropy, mask, coefficient, tokens)
        return torch.autograd.grad(loss, entropy)[0]

    reference = gradient(MASK, 0.5, 2.0)
    assert reference.tolist() == [-0.25, 0.0, -0.25]
    # The entropy's own value does not matter: the bonus is linear in it.
    assert not torch.equal(gradient(~MASK, 0.5, 2.0), reference)
    assert not torch.equal(gradient(MASK, 0.6, 2.0), reference)
    assert not torch.equal(gradient(MASK, 0.5, 3.0), reference)


def test_no_tokens_is_an_error_and_not_a_bonus_of_zero() -> None:
    with pytest.raises(ValueError, match="tokens must be > 0"):
        entropy_bonus(torch.zeros(3), MASK, 0.5, tokens=0)
