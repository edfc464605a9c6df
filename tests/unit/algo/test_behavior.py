"""Behavior weight: five modes against a naive loop, dropped tokens, statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offbeat.algo.behavior import (
    BehaviorMode,
    behavior_weight,
    effective_sample_size,
    ratio_statistics,
    weight_sums,
)

SEQ_ID = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([False, True, True, True, True, True])
BEHAVE = torch.tensor([-1.0, -1.0, -3.0, -2.0, -2.0, -1.0], dtype=torch.float64)
PROX = torch.tensor([5.0, -0.5, -1.0, -2.5, -1.9, -4.0], dtype=torch.float64)
ALL_MODES: tuple[BehaviorMode, ...] = (
    "disabled",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)


def naive(mode: str, cap: float | None, floor: float | None) -> list[float]:
    """The weights by a loop over tokens, in Python floats."""
    weights = []
    for i, row in enumerate(SEQ_ID.tolist()):
        members = [j for j in range(6) if SEQ_ID[j] == row and MASK[j]]
        if "token" in mode:
            members = [i]
        rho = math.exp(sum(float(PROX[j] - BEHAVE[j]) for j in members) / len(members))
        if mode == "disabled":
            rho = 1.0
        elif "truncate" in mode:
            rho = min(rho, cap or math.inf)
        elif rho > (cap or math.inf) or rho < (floor or 0.0):
            rho = 0.0
        weights.append(rho if MASK[i] else 0.0)
    return weights


@pytest.mark.parametrize("mode", ALL_MODES)
def test_weight_equals_a_naive_loop(mode: BehaviorMode) -> None:
    cap = None if mode == "disabled" else 2.0
    result = behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, mode, cap)
    assert result.weight_T.tolist() == pytest.approx(naive(mode, cap, None))
    assert torch.equal(result.kept_T, result.weight_T > 0)
    assert not result.nonfinite_T.any()


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_floor_filters_low_ratios(mode: BehaviorMode) -> None:
    with_floor = behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, mode, 2.0, 0.5)
    assert with_floor.weight_T.tolist() == pytest.approx(naive(mode, 2.0, 0.5))
    without = behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, mode, 2.0)
    assert with_floor.kept_T.sum() < without.kept_T.sum()


def test_masking_and_truncating_differ_only_above_the_cap() -> None:
    masked = behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, "token_mask", 2.0)
    truncated = behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, "token_truncate", 2.0)
    above = MASK & ((PROX - BEHAVE).exp() > 2.0)
    assert above.any()
    assert masked.weight_T[above].eq(0).all()
    assert truncated.weight_T[above].eq(2.0).all()
    assert torch.equal(masked.weight_T[~above], truncated.weight_T[~above])


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_nonfinite_behavior_logp_drops_the_token_and_leaves_its_row_mean(
    mode: BehaviorMode, bad: float
) -> None:
    cap = None if mode == "disabled" else 9.0
    broken = BEHAVE.clone()
    broken[2] = bad
    result = behavior_weight(PROX, broken, MASK, SEQ_ID, 3, mode, cap)
    without = MASK.clone()
    without[2] = False
    expected = behavior_weight(PROX, BEHAVE, without, SEQ_ID, 3, mode, cap)
    assert result.nonfinite_T.tolist() == [False, False, True, False, False, False]
    assert torch.equal(result.weight_T, expected.weight_T)
    assert torch.equal(result.kept_T, expected.kept_T)


def test_nonfinite_logp_outside_the_mask_is_not_counted() -> None:
    broken = BEHAVE.clone()
    broken[0] = math.nan
    result = behavior_weight(PROX, broken, MASK, SEQ_ID, 3, "token_mask", 5.0)
    assert not result.nonfinite_T.any()
    assert result.weight_T.isfinite().all()


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "token_truncate"])
def test_nonfinite_proximal_logp_is_seen_and_not_filtered(mode: BehaviorMode) -> None:
    broken = PROX.clone()
    broken[5] = -math.inf
    result = behavior_weight(broken, BEHAVE, MASK, SEQ_ID, 3, mode, 5.0)
    assert result.kept_T[5]
    assert result.weight_T[5].isnan()
    assert result.weight_T[:5].isfinite().all()


def test_weight_carries_no_gradient() -> None:
    prox = PROX.clone().requires_grad_()
    assert not behavior_weight(
        prox, BEHAVE, MASK, SEQ_ID, 3, "token_mask", 5.0
    ).weight_T.requires_grad


@pytest.mark.parametrize(
    ("mode", "cap", "floor", "message"),
    [
        ("disabled", 5.0, None, "no effect in mode 'disabled'"),
        ("disabled", None, 0.5, "no effect in mode 'disabled'"),
        ("token_mask", None, None, "needs a cap > 1, got None"),
        ("token_mask", 1.0, None, "needs a cap > 1, got 1.0"),
        ("token_mask", math.nan, None, "needs a cap > 1, got nan"),
        ("token_truncate", 5.0, 0.5, "only the mask modes"),
        ("sequence_mask", 5.0, 1.0, r"floor must be in \[0, 1\)"),
    ],
)
def test_a_bound_without_effect_or_out_of_range_is_refused(
    mode: BehaviorMode, cap: float | None, floor: float | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        behavior_weight(PROX, BEHAVE, MASK, SEQ_ID, 3, mode, cap, floor)


def ess(weights: list[float], tokens: float) -> float:
    values = torch.tensor(weights)
    return effective_sample_size(weight_sums(values, values >= 0), tokens).item()


def test_effective_sample_size_at_its_limits() -> None:
    assert ess([3.0, 3.0, 3.0, 3.0], 4) == pytest.approx(1.0)
    assert ess([7.0, 0.0, 0.0, 0.0], 4) == pytest.approx(0.25)
    assert ess([0.0, 0.0, 0.0, 0.0], 4) == 0.0
    assert ess([1.0, 2.0, 3.0], 3) == pytest.approx(36 / (3 * 14))


def test_weight_sums_of_parts_add_up_to_the_whole() -> None:
    w = torch.tensor([1.0, 2.0, 3.0, 100.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    whole, first, rest = (weight_sums(w[s], mask[s]) for s in (slice(4), slice(2), slice(2, 4)))
    assert whole.total.item() == first.total.item() + rest.total.item() == 6.0
    assert whole.squares.item() == first.squares.item() + rest.squares.item() == 14.0


def statistics(prox: Tensor, behave: Tensor, mask: Tensor) -> dict[str, float]:
    s = ratio_statistics(prox, behave, mask)
    names = ("tokens", "ratio_total", "ratio_min", "ratio_max", "k1_total", "k3_total")
    return {name: float(getattr(s, name)) for name in names}


def test_ratio_statistics_equal_a_naive_loop_over_policy_tokens() -> None:
    xs = [float(BEHAVE[i] - PROX[i]) for i in range(6) if MASK[i]]
    rhos = [math.exp(-x) for x in xs]
    assert statistics(PROX, BEHAVE, MASK) == pytest.approx(
        {
            "tokens": 5,
            "ratio_total": sum(rhos),
            "ratio_min": min(rhos),
            "ratio_max": max(rhos),
            "k1_total": sum(xs),
            "k3_total": sum(math.exp(-x) - 1 + x for x in xs),
        }
    )


@pytest.mark.invariant("I08")
def test_on_policy_statistics_are_exact() -> None:
    assert statistics(BEHAVE, BEHAVE, MASK) == {
        "tokens": 5,
        "ratio_total": 5.0,
        "ratio_min": 1.0,
        "ratio_max": 1.0,
        "k1_total": 0.0,
        "k3_total": 0.0,
    }


def test_statistics_of_no_tokens_do_not_disturb_those_of_others() -> None:
    none = statistics(PROX, BEHAVE, torch.zeros(6, dtype=torch.bool))
    assert none["tokens"] == 0
    assert none["ratio_total"] == 0.0
    assert (none["ratio_min"], none["ratio_max"]) == (math.inf, -math.inf)
