"""The clipped policy-gradient objective on packed rows, from ratio to scalar.

Owns PPO's surrogate (token and sequence ratio, asymmetric clip, dual clip), its aggregation to a
scalar, and the decoupled composition of both with the behavior weight. Knows no configuration,
optimizer, process group or micro-batch: the denominators of the whole minibatch are arguments, so
the losses of its micro-batches add up.

Legend: T tokens of this micro-batch, R its rows. Log-probs are in nats. Masks are bool, true on
tokens that the policy wrote (the sampled stop token included). ℓ, p, o are the log-probs under the
current, the proximal and the behavior policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from offbeat.algo.behavior import BehaviorMode, behavior_weight
from offbeat.algo.rows import (
    clamped_exp,
    log_ratio,
    require_same_length,
    row_mean,
    row_sum,
)

RatioLevel: TypeAlias = Literal["token", "sequence"]
Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denominators:
    """Counts of one optimizer step, before any filter.

    That is of the global minibatch: all its micro-batches on all ranks.

    Attributes:
        tokens: N, policy tokens.
        rows: rows.
        constant_tokens: rows × `max_new_tokens`, for the `constant` aggregation.
        row_tokens: [R] int or float, policy tokens of each row of *this micro-batch*, unfiltered
            too.
    """

    tokens: float
    rows: float
    constant_tokens: float
    row_tokens: Tensor

    def __post_init__(self) -> None:
        counts = (self.tokens, self.rows, self.constant_tokens)
        if not all(count > 0 for count in counts):
            raise ValueError(
                "a minibatch without trainable tokens has no loss: Denominators(tokens, rows, "
                f"constant_tokens) must be > 0, got {counts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurrogateTerms:
    """`loss_T`: [T] float; `clipped_T`, `dual_clipped_T`: [T] bool, where it was bounded."""

    loss_T: Tensor
    clipped_T: Tensor
    dual_clipped_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """The differentiable loss, and detached per-token facts for metrics.

    Attributes:
        loss: [] this micro-batch's share of the minibatch loss.
        ratio_T: u, current over proximal policy; outside the mask 1, or the ratio of the row.
        weight_T: w, behavior weight; 0 where the token is not kept.
        clipped_T, dual_clipped_T: bool, among kept tokens.
        kept_T: bool, policy tokens that are in the numerator.
        nonfinite_T: bool, policy tokens dropped because their behavior log-prob is not finite.
    """

    loss: Tensor
    ratio_T: Tensor
    weight_T: Tensor
    clipped_T: Tensor
    dual_clipped_T: Tensor
    kept_T: Tensor
    nonfinite_T: Tensor


def importance_ratio(
    logp: Tensor, prox_logp: Tensor, mask: Tensor, seq_id: Tensor, rows: int, level: RatioLevel
) -> Tensor:
    """u = π_θ/π_prox of each token, or of each sequence as the geometric mean of its tokens.

    token:     u_i = exp(ℓ_i − p_i)
    sequence:  u_i = exp( Σ_s m(ℓ−p) / Σ_s m ), the gradient goes through the mean

    Args:
        logp: [T] float, nats, current policy, with gradient. prox_logp: [T] float, nats, detached
            here.
        mask: [T] bool. seq_id: [T] int64. rows: R. level: "token" or "sequence".

    Returns:
        [T], at least float32. 1 outside the mask (token) or in rows without masked tokens
        (sequence). NaN where a masked log-prob is not finite.

    Source: PPO, arXiv:1707.06347; GSPO, arXiv:2507.18071.
    """
    x = log_ratio(logp, prox_logp.detach(), mask)
    match level:
        case "token":
            return clamped_exp(x)
        case "sequence":
            return clamped_exp(row_mean(x, mask, seq_id, rows))[seq_id]
    assert_never(level)


def clipped_surrogate(
    ratio: Tensor,
    advantage: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> SurrogateTerms:
    """PPO's pessimistic surrogate, a loss (lower is better).

    surr = max(−A·u, −A·clip(u, 1 − eps_clip, 1 + eps_clip_higher))
    dual clip (c_clip = c): where A < 0, surr = min(surr, −c·A)

    Args:
        ratio: [T] float, with gradient. advantage: [T] float, detached here.
        eps_clip: lower width of the trust region; `math.inf` never clips.
        eps_clip_higher: upper width; None means `eps_clip`.
        c_clip: dual clip, > 1: bounds the loss of a bad token whose ratio exploded. None switches
            it off.

    Returns:
        SurrogateTerms. `clipped_T` is true where the clip bound the value, so that no gradient
        flows.

    Raises:
        ValueError: c_clip ≤ 1.

    Source: PPO, arXiv:1707.06347; clip-higher, DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729.
    """
    if c_clip is not None and c_clip <= 1.0:
        raise ValueError(f"c_clip must be > 1, got {c_clip}")
    a = advantage.detach()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    plain = -a * ratio
    bounded = -a * ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    # `where` instead of `maximum`: at the usual tie (u inside the range) the gradient takes one
    # branch, not two halves.
    clipped = bounded > plain
    loss = torch.where(clipped, bounded, plain)
    if c_clip is None:
        return SurrogateTerms(
            loss_T=loss, clipped_T=clipped, dual_clipped_T=torch.zeros_like(clipped)
        )
    ceiling = -c_clip * a
    dual = (a < 0) & (loss > ceiling)
    return SurrogateTerms(
        loss_T=torch.where(dual, ceiling, loss), clipped_T=clipped, dual_clipped_T=dual
    )


def aggregate(
    values_T: Tensor,
    mask_T: Tensor,
    seq_id: Tensor,
    rows: int,
    method: Aggregation,
    denominators: Denominators,
) -> Tensor:
    """This micro-batch's share of the minibatch mean of `values_T`; the shares add up to it.

    token_mean:     Σ m'·x / N
    sequence_mean:  Σ_s ( Σ_{i∈s} m'·x / tokens_s ) / rows;  an empty row adds 0 and still counts
    constant:       Σ m'·x / (rows × max_new_tokens)

    Args:
        values_T: [T] float. mask_T: [T] bool, m': tokens in the numerator. Filters shrink it, never
            the denominators.
        seq_id: [T] int64. rows: R. method: which mean. denominators: counts of the whole minibatch.

    Returns:
        [] at least float32.
    """
    sums = row_sum(values_T, mask_T, seq_id, rows)
    match method:
        case "token_mean":
            return sums.sum() / denominators.tokens
        case "sequence_mean":
            return (sums / denominators.row_tokens.clamp(min=1)).sum() / denominators.rows
        case "constant":
            return sums.sum() / denominators.constant_tokens
    assert_never(method)


def policy_loss(
    *,
    logp: Tensor,
    prox_logp: Tensor,
    behave_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    seq_id: Tensor,
    level: RatioLevel,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    behavior_mode: BehaviorMode,
    behavior_cap: float | None,
    behavior_floor: float | None,
    aggregation: Aggregation,
    denominators: Denominators,
) -> LossTerms:
    """loss = Σ m'·w·surr(u, A) / denominator: the decoupled PPO objective, and PPO with w = 1.

    u = π_θ/π_prox carries the gradient; w = π_prox/π_behave and A are constants. Not decoupled:
    pass p = recomputed log-prob or p = o, with `behavior_mode="disabled"`. On-policy (o = p = ℓ)
    every ratio and weight is 1. Where nothing is clipped or capped w·u = π_θ/π_behave whatever p
    is: p decides *which* tokens are.

    Args:
        logp: [T] float, nats, current policy, with gradient; finite on the mask.
        prox_logp, behave_logp: [T] float, nats. A token whose behavior log-prob is not finite
            leaves every sum of this function, in every mode, but not the denominators.
        advantage: [T] float; at level "sequence" it is averaged over the row first.
        mask: [T] bool. seq_id: [T] int64; the rows are those of `denominators.row_tokens`.
        level, eps_clip, eps_clip_higher, c_clip: see `importance_ratio` and `clipped_surrogate`.
        behavior_mode, behavior_cap, behavior_floor: see `behavior_weight`.
        aggregation, denominators: see `aggregate`.

    Returns:
        LossTerms. A non-finite `logp` or `prox_logp` of a kept token makes the loss NaN.

    Raises:
        ValueError: [T] lengths differ, or an argument of a part is out of range.

    Source: decoupled objective, arXiv:2110.00641; in this form AReaL, arXiv:2505.24298.
    """
    require_same_length(logp=logp, prox_logp=prox_logp, behave_logp=behave_logp,
                        advantage=advantage, mask=mask, seq_id=seq_id)  # fmt: skip
    rows = denominators.row_tokens.shape[0]
    behavior = behavior_weight(
        prox_logp, behave_logp, mask, seq_id, rows, behavior_mode, behavior_cap, behavior_floor
    )
    usable = mask & ~behavior.nonfinite_T
    ratio = importance_ratio(logp, prox_logp, usable, seq_id, rows, level)
    if level == "sequence":
        advantage = row_mean(advantage, usable, seq_id, rows)[seq_id]
    terms = clipped_surrogate(ratio, advantage, eps_clip, eps_clip_higher, c_clip)
    loss = aggregate(
        behavior.weight_T * terms.loss_T, behavior.kept_T, seq_id, rows, aggregation, denominators
    )
    return LossTerms(
        loss=loss,
        ratio_T=ratio.detach(),
        weight_T=behavior.weight_T,
        clipped_T=terms.clipped_T & behavior.kept_T,
        dual_clipped_T=terms.dual_clipped_T & behavior.kept_T,
        kept_T=behavior.kept_T,
        nonfinite_T=behavior.nonfinite_T,
    )
