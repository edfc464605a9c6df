"""The KL estimators: closed forms, expectation, and behavior at the extremes."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.algo.kl import KL_ESTIMATORS, k1, k2, k3


def test_estimators_at_known_points() -> None:
    x = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert k1(x).tolist() == [0.0, 1.0, -1.0]
    assert k2(x).tolist() == [0.0, 0.5, 0.5]
    assert k3(x).tolist() == pytest.approx([0.0, 1 / math.e, math.e - 2])


def test_k1_and_k3_have_the_divergence_as_their_expectation_and_k2_has_not() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    x = (p / q).log()
    exact = float((p * x).sum())
    mean = {name: float((p * k(x)).sum()) for name, k in KL_ESTIMATORS.items()}
    assert mean["k1"] == pytest.approx(exact)
    assert mean["k3"] == pytest.approx(exact)
    assert mean["k2"] != pytest.approx(exact, rel=1e-3)


def test_k2_loss_has_the_gradient_of_the_divergence_in_expectation_and_k1_none() -> None:
    logits = torch.tensor([0.4, -0.2, 0.7], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-0.3, 0.5, 0.1], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    sampler = logp.detach().exp()
    exact = torch.autograd.grad((logp.exp() * (logp - other)).sum(), logits, retain_graph=True)[0]
    via_k2 = torch.autograd.grad((sampler * k2(logp - other)).sum(), logits, retain_graph=True)[0]
    via_k1 = torch.autograd.grad((sampler * k1(logp - other)).sum(), logits)[0]
    assert torch.allclose(via_k2, exact, atol=1e-12)
    assert torch.allclose(via_k1, torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_k3_keeps_its_digits_near_zero_and_is_finite_far_away() -> None:
    small = torch.tensor([1e-3, -1e-3], dtype=torch.float32)
    assert k3(small).tolist() == pytest.approx([5e-7, 5e-7], rel=2e-3)
    far = k3(torch.tensor([-1000.0, 1000.0]))
    assert far.tolist() == pytest.approx([math.exp(20) - 21, 999.0])


def test_estimators_pass_gradcheck() -> None:
    x = torch.tensor([-1.3, 0.2, 2.0], dtype=torch.float64, requires_grad=True)
    assert all(torch.autograd.gradcheck(k, (x,)) for k in KL_ESTIMATORS.values())
