"""How much a token counts that another policy sampled: weight, cap and filter, and what they did.

Owns ρ = π_prox/π_behave in its five modes, and the statistics that tell how far the two policies
are apart. Knows no loss and no configuration. Nothing here carries a gradient.

Legend: T tokens, R rows; p proximal and o behavior log-prob, nats. Statistics come as sums and
extremes over the tokens given: combine them over micro-batches and ranks, then divide once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from offbeat.algo.kl import k1, k3
from offbeat.algo.rows import at_least_float32, clamped_exp, log_ratio, row_mean

BehaviorMode: TypeAlias = Literal[
    "disabled", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BehaviorWeight:
    """What each token counts.

    Attributes:
        weight_T: [T] float, w; 0 where the token is not kept.
        kept_T: [T] bool, policy tokens that stay in the numerator of the loss.
        nonfinite_T: [T] bool, policy tokens dropped because their behavior log-prob is not finite.
    """

    weight_T: Tensor
    kept_T: Tensor
    nonfinite_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSums:
    """Σw and Σw² over policy tokens, [] each; additive over micro-batches and ranks."""

    total: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RatioStatistics:
    """How far proximal and behavior policy are apart, over tokens with a finite log-ratio; [] each.

    Attributes:
        tokens: their number; `ratio_total`, `k1_total`, `k3_total` divided by it are means.
        ratio_total, ratio_min, ratio_max: ρ = exp(p − o); extremes of no tokens are +inf and -inf.
        k1_total, k3_total: KL estimates of x = o − p, nats.
    """

    tokens: Tensor
    ratio_total: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    k1_total: Tensor
    k3_total: Tensor


@torch.no_grad()
def behavior_weight(
    prox_logp: Tensor,
    behave_logp: Tensor,
    mask: Tensor,
    seq_id: Tensor,
    rows: int,
    mode: BehaviorMode,
    cap: float | None,
    floor: float | None = None,
) -> BehaviorWeight:
    """w from ρ = π_prox/π_behave, capped or filtered per token or per sequence.

    disabled           w = 1
    token_truncate     w = min(ρ_i, cap)          sequence_truncate   w = min(ρ_s, cap)
    token_mask         w = ρ_i                    sequence_mask       w = ρ_s

    with ρ_i = exp(p_i − o_i) and ρ_s = exp( Σ_s m(p−o) / Σ_s m ); the mask modes drop tokens
    outside [floor, cap], w = 0.

    Args:
        prox_logp, behave_logp: [T] float, nats. mask: [T] bool. seq_id: [T] int64. rows: R.
        mode: one of `BehaviorMode`.
        cap: > 1; None exactly when disabled. floor: mask modes only, in [0, 1); None means no
            floor.

    Returns:
        BehaviorWeight. A non-finite `behave_logp` drops the token in every mode, and leaves its
        row's mean. A non-finite `prox_logp` gives a NaN weight, so that the loss says so.

    Raises:
        ValueError: cap or floor missing, out of range, or without effect in this mode.

    Source: AReaL, arXiv:2505.24298 (cap); token filter, IcePop; sequence level, MIS.
    """
    _check_bounds(mode, cap, floor)
    usable = mask & torch.isfinite(behave_logp)
    x = log_ratio(prox_logp, behave_logp, usable)
    match mode:
        case "disabled":
            rho = torch.ones_like(x)
        case "token_truncate" | "token_mask":
            rho = clamped_exp(x)
        case "sequence_truncate" | "sequence_mask":
            rho = clamped_exp(row_mean(x, usable, seq_id, rows))[seq_id]
        case _:
            assert_never(mode)
    kept = usable
    if cap is not None and mode.endswith("_truncate"):
        rho = rho.clamp(max=cap)
    elif cap is not None:
        # Negated, so that a NaN weight is kept and seen rather than filtered.
        kept = kept & ~(rho > cap)
    if floor is not None:
        kept = kept & ~(rho < floor)
    return BehaviorWeight(
        weight_T=torch.where(kept, rho, 0.0), kept_T=kept, nonfinite_T=mask & ~usable
    )


def _check_bounds(mode: BehaviorMode, cap: float | None, floor: float | None) -> None:
    if mode == "disabled":
        if cap is not None or floor is not None:
            raise ValueError(
                f"cap {cap} and floor {floor} have no effect in mode 'disabled'; pass None"
            )
        return
    if cap is None or not cap > 1.0:
        raise ValueError(f"mode {mode!r} needs a cap > 1, got {cap}")
    if floor is not None and not mode.endswith("_mask"):
        raise ValueError(
            f"floor {floor} has no effect in mode {mode!r}; only the mask modes use it"
        )
    if floor is not None and not 0.0 <= floor < 1.0:
        raise ValueError(f"floor must be in [0, 1), got {floor}")


@torch.no_grad()
def weight_sums(weight_T: Tensor, mask: Tensor) -> WeightSums:
    """Σw and Σw² over the mask, the parts of the effective sample size that add up."""
    w = torch.where(mask, at_least_float32(weight_T), 0.0)
    return WeightSums(total=w.sum(), squares=w.square().sum())


def effective_sample_size(sums: WeightSums, tokens: float) -> Tensor:
    """ESS = (Σw)² / (N·Σw²) in [0, 1].

    1 for equal weights, 1/N when one token has all the weight, 0 when none has any.

    Args:
        sums: over the whole minibatch. tokens: N, policy tokens of the same minibatch before any
            filter.

    Source: Kong 1992, normalized by the sample size.
    """
    tiny = torch.finfo(sums.squares.dtype).tiny
    return sums.total.square() / (tokens * sums.squares.clamp(min=tiny))


@torch.no_grad()
def ratio_statistics(prox_logp: Tensor, behave_logp: Tensor, mask: Tensor) -> RatioStatistics:
    """ρ = exp(p − o) and the KL estimates of x = o − p, over masked tokens with a finite x."""
    x = log_ratio(behave_logp, prox_logp, mask)
    valid = mask & torch.isfinite(x)
    x = torch.where(valid, x, 0.0)
    rho = clamped_exp(-x)
    return RatioStatistics(
        tokens=valid.sum(),
        ratio_total=torch.where(valid, rho, 0.0).sum(),
        ratio_min=_extreme(torch.where(valid, rho, torch.inf), torch.inf, smallest=True),
        ratio_max=_extreme(torch.where(valid, rho, -torch.inf), -torch.inf, smallest=False),
        k1_total=k1(x).sum(),
        k3_total=k3(x).sum(),
    )


def _extreme(values: Tensor, empty: float, *, smallest: bool) -> Tensor:
    padded = torch.cat([values, values.new_full((1,), empty)])
    return padded.min() if smallest else padded.max()
