"""Sums, means and broadcasts over the rows of a packed batch.

Owns the one representation of `algo/`: tokens of several rows one after the other in 1-D tensors
`[T]`, and `seq_id`, which names the row of each token. Knows nothing of losses, padding or
micro-batches.

Legend: T tokens, R rows. `seq_id`: [T] int64, ascending, in [0, R); a row may have no token.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`.

Float32 `exp` is infinite from 88.8 on, and the square of a ratio (effective sample size) from 44.4
on. e^20 = 4.9e8 is beyond every cap and clip range in use.
"""


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or unchanged when wider; what every reduction here accumulates in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def row_sum(values: Tensor, mask: Tensor, seq_id: Tensor, rows: int) -> Tensor:
    """Σ of the masked values of each row.

    Args:
        values: [T] float. mask: [T] bool. seq_id: [T] int64.
        rows: R, the rows of this batch; a row without masked tokens sums to 0.

    Returns:
        [R], at least float32. The order of summation is the token order of the row, so the sum does
        not depend on which other rows are packed beside it.
    """
    wide = torch.where(mask, at_least_float32(values), 0.0)
    return wide.new_zeros(rows).index_add(0, seq_id, wide)


def row_mean(values: Tensor, mask: Tensor, seq_id: Tensor, rows: int) -> Tensor:
    """Mean of the masked values of each row, [R]; 0 for a row without masked tokens."""
    count = row_sum(torch.ones_like(values), mask, seq_id, rows)
    return row_sum(values, mask, seq_id, rows) / count.clamp(min=1.0)


def log_ratio(numerator_logp: Tensor, denominator_logp: Tensor, mask: Tensor) -> Tensor:
    """Masked difference of log-probabilities, [T], not yet clamped; exactly 0 outside the mask.

    The `where` is on the difference, so a log-prob of -inf outside the mask reaches neither value
    nor gradient.
    """
    difference = at_least_float32(numerator_logp) - at_least_float32(denominator_logp)
    return torch.where(mask, difference, 0.0)


def clamped_exp(log_values: Tensor) -> Tensor:
    """`exp` of log-ratios clamped to ±`MAX_LOG_RATIO`; NaN where the log-ratio is not finite.

    The clamp is for large finite differences. An infinite one is a broken log-prob: the clamp alone
    would turn it into an ordinary ratio, NaN makes the loss say so.
    """
    clamped = log_values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(torch.isfinite(log_values), clamped, torch.nan).exp()


def require_same_length(**tensors: Tensor) -> None:
    """Raise ValueError, naming every length, unless all tensors are 1-D and of one length.

    A `[1]` tensor among `[T]` ones would otherwise broadcast without a word.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"packed tensors must be 1-D and of one length, got {shapes}")
