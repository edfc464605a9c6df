"""The log-linear proximal policy and the errors of approximations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offbeat.algo.proximal import (
    ApproximationErrors,
    approximation_errors,
    interpolation_weight,
    linear,
    loglinear,
)
from offbeat.algo.surrogate import Denominators, policy_loss

BEHAVE = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
LOGP = torch.tensor([-1.5, -1.0, -0.7, -2.0], dtype=torch.float64)
# Start version k = 4, so the update produces 5; the lags are 0, 1, 4, 4.
VERSIONS = torch.tensor([4, 3, 0, 0])
MASK = torch.ones(4, dtype=torch.bool)


def test_interpolation_weight_is_lag_over_lag_plus_one() -> None:
    alpha = interpolation_weight(torch.tensor([4, 3, 2, 1, 0]), 5)
    assert alpha.tolist() == pytest.approx([0.0, 1 / 2, 2 / 3, 3 / 4, 4 / 5])


def test_interpolation_weight_is_finite_where_no_version_was_recorded() -> None:
    assert interpolation_weight(torch.tensor([-1, 5]), 5).isfinite().all()


def test_loglinear_lies_between_behavior_and_current_policy() -> None:
    prox = loglinear(BEHAVE, LOGP, VERSIONS, 5)
    assert prox.tolist() == pytest.approx([-1.0, -1.5, -0.66, -2.2])


def test_lag_zero_is_exactly_the_behavior_policy() -> None:
    behave = torch.randn(100, generator=torch.Generator().manual_seed(0))
    versions = torch.full((100,), 7)
    assert torch.equal(loglinear(behave, behave * 3, versions, 8), behave)


def test_approximations_carry_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    assert not loglinear(BEHAVE, logp, VERSIONS, 5).requires_grad
    assert not linear(BEHAVE, logp, VERSIONS, 5).requires_grad


def test_linear_mixes_probabilities_and_is_exact_at_lag_zero() -> None:
    prox = linear(BEHAVE, LOGP, VERSIONS, 5).tolist()
    alphas = (0.0, 0.5, 0.8, 0.8)
    expected = [
        math.log((1 - a) * math.exp(o) + a * math.exp(x))
        for a, o, x in zip(alphas, BEHAVE.tolist(), LOGP.tolist(), strict=True)
    ]
    assert prox == pytest.approx(expected)
    assert prox[0] == BEHAVE[0].item()


def gradient(prox: Tensor, logp: Tensor, *, decoupled: bool) -> Tensor:
    current = logp.clone().requires_grad_()
    terms = policy_loss(
        logp=current,
        prox_logp=prox,
        behave_logp=BEHAVE,
        advantage=torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64),
        mask=MASK,
        seq_id=torch.tensor([0, 0, 1, 1]),
        level="token",
        eps_clip=0.2,
        eps_clip_higher=None,
        c_clip=None,
        behavior_mode="token_mask" if decoupled else "disabled",
        behavior_cap=5.0 if decoupled else None,
        behavior_floor=None,
        aggregation="token_mean",
        denominators=Denominators(
            tokens=4, rows=2, constant_tokens=20, row_tokens=torch.tensor([2, 2])
        ),
    )
    return torch.autograd.grad(terms.loss, current)[0]


def test_lag_one_batch_has_another_gradient_than_naive_ppo() -> None:
    # Where nothing is clipped w·u = π_θ/π_behave whatever the proximal policy is; it matters by
    # the clip: e^0.3 = 1.35 is outside 1 ± 0.2, its square root 1.16 is inside.
    logp = BEHAVE + 0.3
    lag_one = torch.full((4,), 4)
    corrected = gradient(loglinear(BEHAVE, logp, lag_one, 6), logp, decoupled=True)
    naive = gradient(BEHAVE, logp, decoupled=False)
    weighted = -torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64) * math.exp(0.3) / 4
    assert corrected.tolist() == pytest.approx(weighted.tolist())
    assert naive.tolist() == pytest.approx([0.0, weighted[1].item(), 0.0, 0.0])
    # With the start version in place of the produced one the correction would be gone.
    uncorrected = gradient(loglinear(BEHAVE, logp, lag_one, 5), logp, decoupled=True)
    assert torch.equal(uncorrected, naive)


def errors(logp: Tensor, behave: Tensor, mask: Tensor, recomputed: Tensor) -> ApproximationErrors:
    return approximation_errors(
        logp=logp,
        behave_logp=behave,
        recomputed_logp=recomputed,
        versions=VERSIONS,
        produced_version=5,
        mask=mask,
    )


def test_errors_equal_a_naive_loop() -> None:
    recomputed = torch.tensor([-1.1, -1.6, -0.6, -2.5], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    found = errors(LOGP, BEHAVE, mask, recomputed).rollout
    pairs = [(float(BEHAVE[i]), float(recomputed[i]), float(LOGP[i])) for i in (0, 1, 3)]
    assert found.abs_total.item() == pytest.approx(sum(abs(o - p) for o, p, _ in pairs))
    assert found.abs_max.item() == pytest.approx(max(abs(o - p) for o, p, _ in pairs))
    assert found.ratio_abs_total.item() == pytest.approx(
        sum(abs(math.exp(x - o) - math.exp(x - p)) for o, p, x in pairs)
    )


def test_an_approximation_that_is_right_has_no_error() -> None:
    exact = errors(LOGP, BEHAVE, MASK, loglinear(BEHAVE, LOGP, VERSIONS, 5))
    assert exact.loglinear.abs_max.item() == 0.0
    assert exact.loglinear.ratio_abs_total.item() == 0.0
    assert exact.linear.abs_max.item() > 0.0
    assert exact.rollout.abs_max.item() > 0.0
    mixed = errors(LOGP, BEHAVE, MASK, linear(BEHAVE, LOGP, VERSIONS, 5))
    assert mixed.linear.abs_max.item() == 0.0


def test_a_nonfinite_behavior_logp_stays_out_of_the_errors() -> None:
    broken = BEHAVE.clone()
    broken[1] = math.nan
    found = errors(LOGP, broken, MASK, LOGP)
    without = errors(LOGP, BEHAVE, torch.tensor([True, False, True, True]), LOGP)
    for name in ("loglinear", "linear", "rollout"):
        assert getattr(found, name).abs_total == getattr(without, name).abs_total
        assert getattr(found, name).ratio_abs_total == getattr(without, name).ratio_abs_total
