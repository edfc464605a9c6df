"""Centering and scaling of rewards or advantages, over groups or the whole batch.

Owns `NormConfig`'s mathematics as plain arguments; knows neither rewards nor tokens: the elements
are rollouts (reward normalization) or policy tokens (advantage normalization:
`groups=row_groups[seq_id]`, `valid=mask`). Statistics need the whole batch of all ranks, so this
runs before any cut into minibatches.

Legend: n elements; a set is what one statistic is taken over (a group, or the batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from offbeat.algo.rows import require_same_length

NormLevel: TypeAlias = Literal["batch", "group", "none"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sets:
    """The set of each element.

    Attributes:
        index: [n] int64 in [0, count). size: [n] float64, valid elements of the element's set.
        valid: [n] bool.
    """

    index: Tensor
    count: int
    size: Tensor
    valid: Tensor

    def total(self, values: Tensor) -> Tensor:
        """[n] sum over the valid elements of each element's set."""
        masked = torch.where(self.valid, values, 0.0)
        return masked.new_zeros(self.count).index_add(0, self.index, masked)[self.index]

    def all_equal(self, values: Tensor) -> Tensor:
        """[n] bool: the valid elements of the set are two or more, and exactly equal."""
        low = torch.where(self.valid, values, torch.inf)
        high = torch.where(self.valid, values, -torch.inf)
        smallest = low.new_full((self.count,), torch.inf).scatter_reduce(0, self.index, low, "amin")
        largest = high.new_full((self.count,), -torch.inf).scatter_reduce(
            0, self.index, high, "amax"
        )
        return (smallest == largest)[self.index] & (self.size > 1)


def normalize(
    values: Tensor,
    groups: Tensor,
    *,
    mean_level: NormLevel,
    leave_one_out: bool = False,
    std_level: NormLevel,
    unbiased: bool = False,
    eps: float = 1e-5,
    valid: Tensor | None = None,
) -> Tensor:
    """(x − mean) / (std + eps), each over the batch, the element's group, or not at all.

    mean = Σx/n of the set; leave-one-out: (Σx − x_i)/(n − 1), and 0 for n = 1; level none: 0.
    std² = Σ(x − mean)²/n, or /(n − 1) when unbiased, with std = 1 for n = 1; level none: no
    division. The deviations are from the chosen mean, at whatever level that is.
    A set of two or more exactly equal values is centered to exactly 0: the rounding of its mean
    over a tiny std would be a spike.

    Args:
        values: [n] float, finite where valid. groups: [n] int64, any ids in any order, groups of
            any size.
        mean_level, leave_one_out, std_level, unbiased: see above.
        eps: added to the std, ≥ 0; not used when std_level is none.
        valid: [n] bool; the others leave every statistic and come out as 0. None means all.

    Returns:
        [n] float32; computed in float64.

    Raises:
        ValueError: lengths differ, or leave-one-out or unbiased without the level it acts on.

    Example:
        >>> rewards, group = torch.tensor([1.0, 0.0]), torch.tensor([7, 7])
        >>> normalize(rewards, group, mean_level="group", std_level="none").tolist()
        [0.5, -0.5]
    """
    if leave_one_out and mean_level == "none":
        raise ValueError("leave_one_out has no effect with mean_level 'none'")
    if unbiased and std_level == "none":
        raise ValueError("unbiased has no effect with std_level 'none'")
    counted = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    require_same_length(values=values, groups=groups, valid=counted)
    x = torch.where(counted, values.detach().double(), 0.0)
    centered = _centered(x, groups, counted, mean_level, leave_one_out)
    scale = _scale(centered, groups, counted, std_level, unbiased, eps)
    # A zero over a zero std (eps = 0) is a zero: nothing deviates.
    scaled = torch.where(centered == 0.0, 0.0, centered / scale)
    return torch.where(counted, scaled, 0.0).float()


def _sets(groups: Tensor, valid: Tensor, level: NormLevel) -> _Sets:
    if level == "group":
        ids, index = torch.unique(groups, return_inverse=True)
        count = ids.shape[0]
    else:
        index, count = torch.zeros_like(groups), 1
    size = valid.new_zeros(count, dtype=torch.float64).index_add(0, index, valid.double())[index]
    return _Sets(index=index, count=count, size=size, valid=valid)


def _centered(
    x: Tensor, groups: Tensor, valid: Tensor, level: NormLevel, leave_one_out: bool
) -> Tensor:
    if level == "none":
        return x
    sets = _sets(groups, valid, level)
    total = sets.total(x)
    if leave_one_out:
        mean = torch.where(sets.size > 1, (total - x) / (sets.size - 1).clamp(min=1), 0.0)
    else:
        mean = total / sets.size.clamp(min=1)
    return torch.where(sets.all_equal(x), 0.0, x - mean)


def _scale(
    centered: Tensor, groups: Tensor, valid: Tensor, level: NormLevel, unbiased: bool, eps: float
) -> Tensor:
    if level == "none":
        return torch.ones_like(centered)
    sets = _sets(groups, valid, level)
    squares = sets.total(centered.square())
    if unbiased:
        variance = torch.where(sets.size > 1, squares / (sets.size - 1).clamp(min=1), 1.0)
    else:
        variance = squares / sets.size.clamp(min=1)
    return variance.sqrt() + eps
