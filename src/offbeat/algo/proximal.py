"""The proximal log-prob without a forward pass, and how wrong the approximations are.

Owns the log-linear interpolation between behavior and current policy, its linear cousin, and their
errors against a recomputed log-prob. Knows no loss; nothing here carries a gradient.

Legend: T tokens; ℓ current, o behavior, p proximal log-prob, nats; v_b version stamped on the
token, v_θ version that the update *produces* (start version + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.algo.rows import at_least_float32, clamped_exp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobError:
    """Error of one approximation over policy tokens, [] each; totals add up over micro-batches.

    Attributes:
        abs_total, abs_max: |p̂ − p|, nats.
        ratio_abs_total: |exp(ℓ − p̂) − exp(ℓ − p)|, the error of the importance ratio.
    """

    abs_total: Tensor
    abs_max: Tensor
    ratio_abs_total: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ApproximationErrors:
    """Errors by approximation: log-linear, linear (mixture of probabilities), rollout (p̂ = o)."""

    loglinear: LogprobError
    linear: LogprobError
    rollout: LogprobError


def interpolation_weight(versions: Tensor, produced_version: int) -> Tensor:
    """α = clamp((v_θ − 1 − v_b)/(v_θ − v_b), 0, 1) = lag/(lag + 1).

    0 at lag 0 (p = o), 1/2 at lag 1, 4/5 at lag 4.

    Args:
        versions: [T] int64, v_b < v_θ on policy tokens; what other tokens hold does not matter.
        produced_version: v_θ = k + 1, the version this update produces. With k instead, lag-1
            tokens would get α = 0, and the decoupled loss would silently be the plain one for them.

    Returns:
        [T] float32.
    """
    age = produced_version - versions
    return ((age - 1) / age).clamp(0.0, 1.0)


@torch.no_grad()
def loglinear(behave_logp: Tensor, logp: Tensor, versions: Tensor, produced_version: int) -> Tensor:
    """p = o + α(ℓ − o), ℓ detached; [T]. Exactly o where the lag is 0.

    Args:
        behave_logp, logp: [T] float, nats. versions: [T] int64. produced_version: see
            `interpolation_weight`.

    Source: A-3PO, arXiv:2512.06547.
    """
    o = at_least_float32(behave_logp)
    return o + interpolation_weight(versions, produced_version) * (at_least_float32(logp) - o)


@torch.no_grad()
def linear(behave_logp: Tensor, logp: Tensor, versions: Tensor, produced_version: int) -> Tensor:
    """p = log((1−α)e^o + αe^ℓ), ℓ detached; [T]. Measured against `loglinear`, never trained on."""
    alpha = interpolation_weight(versions, produced_version)
    # log 0 = -inf at α = 0 is what logaddexp expects: it then returns o.
    return torch.logaddexp(
        torch.log1p(-alpha) + at_least_float32(behave_logp), alpha.log() + at_least_float32(logp)
    )


@torch.no_grad()
def approximation_errors(
    *,
    logp: Tensor,
    behave_logp: Tensor,
    recomputed_logp: Tensor,
    versions: Tensor,
    produced_version: int,
    mask: Tensor,
) -> ApproximationErrors:
    """How far each approximation of p is from the recomputed one.

    Args:
        logp, behave_logp, recomputed_logp: [T] float, nats. versions: [T] int64. mask: [T] bool;
            tokens with a non-finite behavior log-prob are left out.
        produced_version: see `interpolation_weight`.
    """
    valid = mask & torch.isfinite(behave_logp)

    def error(approximate: Tensor) -> LogprobError:
        difference = (approximate - recomputed_logp).abs()
        ratio = clamped_exp(logp - approximate) - clamped_exp(logp - recomputed_logp)
        masked = torch.where(valid, difference, 0.0)
        return LogprobError(
            abs_total=masked.sum(),
            abs_max=torch.cat([masked, masked.new_zeros(1)]).max(),
            ratio_abs_total=torch.where(valid, ratio.abs(), 0.0).sum(),
        )

    return ApproximationErrors(
        loglinear=error(loglinear(behave_logp, logp, versions, produced_version)),
        linear=error(linear(behave_logp, logp, versions, produced_version)),
        rollout=error(at_least_float32(behave_logp)),
    )
