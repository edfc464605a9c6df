"""From one reward per rollout to one advantage per token, without a critic.

Owns reward shaping and the broadcast to tokens; normalization is `normalize`. Knows no
configuration. The order is::

    per rollout:  overlong_penalty ─► shape_rewards ─► normalize ─► zero_truncated
    per token:    grpo_advantages ─► normalize

Legend: T tokens, R rows. All of it runs on the whole batch, before it is cut into minibatches, and
carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.algo.rows import at_least_float32


def overlong_penalty(
    lengths: Tensor, max_new_tokens: int, overlong_tokens: int, factor: float
) -> Tensor:
    """min( −(L − (M − k))/k · f, 0 ), added to the reward: grows over the last k tokens before M.

    Args:
        lengths: [R] int64, L, tokens that the policy wrote. max_new_tokens: M.
        overlong_tokens: k, in (0, M]. factor: f, the penalty at the limit, ≥ 0.

    Returns:
        [R] float32, ≤ 0.

    Raises:
        ValueError: overlong_tokens out of range.

    Source: DAPO, arXiv:2503.14476 (soft overlong punishment).
    """
    if not 0 < overlong_tokens <= max_new_tokens:
        raise ValueError(f"overlong_tokens must be in (0, {max_new_tokens}], got {overlong_tokens}")
    excess = (lengths - (max_new_tokens - overlong_tokens)).float()
    return (-excess / overlong_tokens * factor).clamp(max=0.0)


def shape_rewards(
    rewards: Tensor, *, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None
) -> Tensor:
    """clip( (r + bias)·scaling, ±clip ), [R].

    Args:
        rewards: [R] float, task rewards, length penalty included. bias, scaling: see the formula.
        clip: bound of the absolute value, > 0; None means no clip.

    Raises:
        ValueError: clip ≤ 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0, got {clip}")
    shaped = (at_least_float32(rewards) + bias) * scaling
    return shaped if clip is None else shaped.clamp(-clip, clip)


def zero_truncated(task_reward: Tensor, truncated: Tensor) -> Tensor:
    """`mask_no_eos_with_zero`: the reward that lands on an unfinished answer is 0, [R].

    Applied to the *normalized* reward, as AReaL does: the unfinished answer stays in its group's
    statistics and gets no push in either direction. A zero put in before normalization would be a
    penalty instead.

    Args:
        task_reward: [R] float, normalized. truncated: [R] bool, stopped by `length`, as the engine
            recorded it.
    """
    return torch.where(truncated, 0.0, task_reward)


def grpo_advantages(task_reward: Tensor, mask: Tensor, seq_id: Tensor) -> Tensor:
    """A_t = the row's task reward on every token that the policy wrote, 0 elsewhere; [T].

    This is generalized advantage estimation with γ = λ = 1 and V = 0: the reward lands on the last
    policy token, every δ before it is 0, and A_t = Σ_{t' ≥ t} δ_t' is the same number at each of
    them.

    Args:
        task_reward: [R] float, shaped and normalized. mask: [T] bool. seq_id: [T] int64 in [0, R).

    Source: GRPO, arXiv:2402.03300 (outcome supervision).
    """
    return torch.where(mask, at_least_float32(task_reward)[seq_id], 0.0)
