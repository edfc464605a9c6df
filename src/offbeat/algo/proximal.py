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
    """One approximation p̂ against p over policy tokens, [] each; totals add up over micro-batches.

    Attributes:
        logp_total: Σ p̂, nats.
        abs_total, abs_max: |p̂ − p|, nats.
        squared_total: (p̂ − p)², nats².
        behave_total, behave_abs_total, behave_relative_total: of the behavior weight
            ŵ = exp(p̂ − o) against w = exp(p − o): Σ ŵ, Σ |ŵ − w|, Σ |ŵ − w|/w.
        ratio_total, ratio_abs_total, ratio_relative_total: the same of the importance ratio
            û = exp(ℓ − p̂) against u = exp(ℓ − p).
    """

    logp_total: Tensor
    abs_total: Tensor
    abs_max: Tensor
    squared_total: Tensor
    behave_total: Tensor
    behave_abs_total: Tensor
    behave_relative_total: Tensor
    ratio_total: Tensor
    ratio_abs_total: Tensor
    ratio_relative_total: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ApproximationErrors:
    """Errors by approximation: log-linear, linear (mixture of probabilities), rollout (p̂ = o).

    ``recomputed_total`` is Σ p and ``recomputed_abs_total`` Σ |p| of the same tokens, [] nats: what
    a log-prob error is relative to. A single |p| is no yardstick, it is almost 0 where the policy
    is certain.
    """

    recomputed_total: Tensor
    recomputed_abs_total: Tensor
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

    In the first minibatch of a step p = ℓ: what is measured there is how far p̂ stays behind ℓ,
    (1 − α)|ℓ − o| for the log-linear one. At lag 0 every approximation is o.

    Args:
        logp, behave_logp, recomputed_logp: [T] float, nats. versions: [T] int64. mask: [T] bool;
            tokens with a non-finite behavior log-prob are left out.
        produced_version: see `interpolation_weight`.
    """
    valid = mask & torch.isfinite(behave_logp)
    # Every input outside `valid` becomes 0 before it is used: no NaN can reach a sum.
    o, now, p = (
        torch.where(valid, at_least_float32(x), 0.0) for x in (behave_logp, logp, recomputed_logp)
    )

    def against(approximate: Tensor) -> LogprobError:
        return _error(torch.where(valid, approximate, 0.0), p, o, now, valid)

    return ApproximationErrors(
        recomputed_total=p.sum(),
        recomputed_abs_total=p.abs().sum(),
        loglinear=against(loglinear(o, now, versions, produced_version)),
        linear=against(linear(o, now, versions, produced_version)),
        rollout=against(o),
    )


def _error(approximate: Tensor, p: Tensor, o: Tensor, now: Tensor, valid: Tensor) -> LogprobError:
    """p̂ against p, [T] each; all are 0 outside ``valid``, where weights then are 1 and masked."""
    distance = (approximate - p).abs()
    behave, behave_true = clamped_exp(approximate - o), clamped_exp(p - o)
    ratio, ratio_true = clamped_exp(now - approximate), clamped_exp(now - p)

    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values, 0.0).sum()

    return LogprobError(
        logp_total=approximate.sum(),
        abs_total=distance.sum(),
        abs_max=torch.cat([distance, distance.new_zeros(1)]).max(),
        squared_total=distance.square().sum(),
        behave_total=total(behave),
        behave_abs_total=total((behave - behave_true).abs()),
        behave_relative_total=total((behave - behave_true).abs() / behave_true),
        ratio_total=total(ratio),
        ratio_abs_total=total((ratio - ratio_true).abs()),
        ratio_relative_total=total((ratio - ratio_true).abs() / ratio_true),
    )
