"""The entropy bonus of the loss.

Owns the sign and the normalization of the term; the entropy itself is computed where the logits
are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.algo.rows import at_least_float32


def entropy_bonus(entropy_T: Tensor, mask: Tensor, coefficient: float, tokens: float) -> Tensor:
    """−c·Σ mH/N, to be added to the loss: a positive coefficient rewards entropy.

    Args:
        entropy_T: [T] float, nats, with gradient, of the distribution that each token is predicted
            from.
        mask: [T] bool. coefficient: c ≥ 0. tokens: N, policy tokens of the whole minibatch, > 0.

    Returns:
        [] this micro-batch's share.

    Raises:
        ValueError: tokens ≤ 0.
    """
    if not tokens > 0:
        raise ValueError(f"tokens must be > 0, got {tokens}")
    return -coefficient * torch.where(mask, at_least_float32(entropy_T), 0.0).sum() / tokens
