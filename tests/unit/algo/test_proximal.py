"""The log-linear proximal policy and the errors of approximations."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

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


def naive_p(method: str, o: float, x: float, lag: int) -> float:
    """The formulas of the three approximations, in plain floats."""
    alpha = lag / (lag + 1)
    if method == "loglinear":
        return o + alpha * (x - o)
    if method == "linear":
        return math.log((1 - alpha) * math.exp(o) + alpha * math.exp(x))
    return o


@pytest.mark.parametrize("method", ["loglinear", "linear", "rollout"])
def test_errors_equal_a_naive_loop(method: str) -> None:
    recomputed = torch.tensor([-1.1, -1.6, -0.6, -2.5], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    found = errors(LOGP, BEHAVE, mask, recomputed)
    sums: dict[str, float] = defaultdict(float)
    for i in (0, 1, 3):
        o, p, x = float(BEHAVE[i]), float(recomputed[i]), float(LOGP[i])
        guess = naive_p(method, o, x, 4 - int(VERSIONS[i]))
        sums["logp_total"] += guess
        sums["abs_total"] += abs(guess - p)
        sums["abs_max"] = max(sums["abs_max"], abs(guess - p))
        sums["squared_total"] += (guess - p) ** 2
        for name, got, true in (
            ("behave", math.exp(guess - o), math.exp(p - o)),
            ("ratio", math.exp(x - guess), math.exp(x - p)),
        ):
            sums[f"{name}_total"] += got
            sums[f"{name}_abs_total"] += abs(got - true)
            sums[f"{name}_relative_total"] += abs(got - true) / true
    measured = dataclasses.asdict(getattr(found, method))
    assert {name: float(value) for name, value in measured.items()} == pytest.approx(dict(sums))
    assert found.recomputed_total.item() == pytest.approx(-1.1 - 1.6 - 2.5)
    assert found.recomputed_abs_total.item() == pytest.approx(1.1 + 1.6 + 2.5)


@pytest.mark.parametrize("lag", [0, 1, 2, 4, 9])
def test_in_the_first_minibatch_the_errors_are_how_far_each_stays_behind(lag: int) -> None:
    # There the present weights are those at the start of the step: p = ℓ.
    found = approximation_errors(
        logp=LOGP,
        behave_logp=BEHAVE,
        recomputed_logp=LOGP,
        versions=torch.full((4,), 20 - lag),
        produced_version=21,
        mask=MASK,
    )
    behind = float((LOGP - BEHAVE).abs().sum())
    assert found.rollout.abs_total.item() == pytest.approx(behind)
    assert found.loglinear.abs_total.item() == pytest.approx(behind / (lag + 1))
    assert found.loglinear.ratio_total.item() == pytest.approx(
        sum(math.exp(float(d) / (lag + 1)) for d in LOGP - BEHAVE)
    )
    if lag == 0:
        assert found.linear.abs_total.item() == found.rollout.abs_total.item()
    else:
        assert found.linear.abs_total < found.rollout.abs_total


def test_on_policy_tokens_of_the_present_version_have_no_error_and_unit_weights() -> None:
    found = approximation_errors(
        logp=BEHAVE,
        behave_logp=BEHAVE,
        recomputed_logp=BEHAVE,
        versions=torch.full((4,), 7),
        produced_version=8,
        mask=MASK,
    )
    for method in (found.loglinear, found.linear, found.rollout):
        measured = {k: float(v) for k, v in dataclasses.asdict(method).items()}
        weights = {"logp_total": -6.5, "behave_total": 4.0, "ratio_total": 4.0}
        assert measured == dict.fromkeys(measured, 0.0) | weights


def test_errors_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    recomputed = (BEHAVE + LOGP) / 3
    whole = errors(LOGP, BEHAVE, MASK, recomputed)
    halves = [
        errors(LOGP, BEHAVE, torch.tensor(half), recomputed)
        for half in ([True, True, False, False], [False, False, True, True])
    ]
    for method in ("loglinear", "linear", "rollout"):
        parts = [dataclasses.asdict(getattr(h, method)) for h in halves]
        for name, value in dataclasses.asdict(getattr(whole, method)).items():
            merge = max if name == "abs_max" else sum
            assert float(value) == pytest.approx(merge(float(p[name]) for p in parts)), name


def test_token_stamped_with_the_produced_version_counts_as_fresh() -> None:
    # (v_θ − 1 − v_b)/(v_θ − v_b) is −1/0 there.
    same = torch.full((4,), 5)
    assert interpolation_weight(same, 5).tolist() == [0.0] * 4
    assert torch.equal(loglinear(BEHAVE, LOGP, same, 5), BEHAVE)
    assert torch.equal(linear(BEHAVE, LOGP, same, 5), BEHAVE)


@pytest.mark.parametrize("method", [loglinear, linear])
def test_approximations_of_half_precision_log_probs_are_computed_in_float32(
    method: Callable[..., Tensor],
) -> None:
    behave, logp = BEHAVE.to(torch.bfloat16), LOGP.to(torch.bfloat16)
    found = method(behave, logp, VERSIONS, 5)
    assert found.dtype == torch.float32
    exact = method(behave.double(), logp.double(), VERSIONS, 5)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


@pytest.mark.parametrize("lag", [1, 2, 4, 30])
def test_recompute_is_exact_and_loglinear_between_recorded_and_current(lag: int) -> None:
    versions = torch.full((4,), 40 - lag)
    prox = loglinear(BEHAVE, LOGP, versions, 41)
    for got, o, x in zip(prox.tolist(), BEHAVE.tolist(), LOGP.tolist(), strict=True):
        assert got == pytest.approx((o + lag * x) / (lag + 1))
        assert min(o, x) < got < max(o, x)
    mixed = linear(BEHAVE, LOGP, versions, 41)
    assert (mixed >= prox - 1e-12).all()  # the mean of numbers is at least that of their logs


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
        measured, expected = (dataclasses.asdict(getattr(e, name)) for e in (found, without))
        assert measured == expected
    assert found.recomputed_abs_total == without.recomputed_abs_total
