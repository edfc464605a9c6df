"""Estimators of the Kullback-Leibler divergence from samples, per token.

Owns k1, k2 and k3. Knows no mask and no coefficient. Everywhere x = log-prob under the *sampler* −
log-prob under the other policy, in nats, of a token that the sampler drew; the mean over such
tokens estimates KL(sampler ‖ other).

Source: J. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from offbeat.algo.rows import MAX_LOG_RATIO

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]


def k1(x: Tensor) -> Tensor:
    """x: unbiased, of either sign. As a loss its gradient is zero in expectation."""
    return x


def k2(x: Tensor) -> Tensor:
    """x²/2: never negative, biased; as a loss on policy its gradient is that of the divergence."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """e^{−x} − 1 + x: never negative, unbiased.

    `expm1` because near x = 0, where most tokens are, e^{−x} − 1 loses every digit in float32.
    Clamped before the
    exponential: it is infinite for x below −88.8.
    """
    return torch.expm1((-x).clamp(max=MAX_LOG_RATIO)) + x.clamp(min=-MAX_LOG_RATIO)


KL_ESTIMATORS: Mapping[KlEstimator, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators by their configuration names."""
