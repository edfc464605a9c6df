"""Cutting a batch: whole groups into minibatches, rows into token-budgeted micro-batches.

Owns the two partitions of row indices; knows neither tensors nor samples. Both are pure functions
of their arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from offbeat.errors import TrainingError


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partition rows into bins of at most `budget` tokens, first-fit-decreasing and balanced.

    Rows go longest first (ties by index). Among the bins with room a row joins the one that holds
    the fewest rows (ties by age); only when none has room a new bin is opened.

    Args:
        lengths: tokens of each row, prompt included. budget: tokens per bin.

    Returns:
        Bins of ascending row indices, every row in exactly one.

    Raises:
        TrainingError: a row is longer than the budget. Raised before any bin is made: rows are
            never cut.

    Example:
        >>> pack([3, 5, 2, 2], budget=6)
        [[1], [0, 2], [3]]
    """
    for row, length in enumerate(lengths):
        _require_fits(row, length, budget)
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[row]]
        if fitting:
            chosen = min(fitting, key=lambda b: len(bins[b]))
        else:
            chosen = len(bins)
            bins.append([])
            room.append(budget)
        bins[chosen].append(row)
        room[chosen] -= lengths[row]
    return [sorted(rows) for rows in bins]


def _require_fits(row: int, length: int, budget: int) -> None:
    if length > budget:
        raise TrainingError(
            f"row {row} has {length} tokens, more than the micro-batch budget of {budget}; "
            "raise max_tokens_per_mb or shorten prompts and answers"
        )


def pack_siblings(
    lengths: Sequence[int], group_ids: Sequence[int], shared: Sequence[int], budget: int
) -> list[list[int]]:
    """Partition rows into bins of at most `budget` computed tokens, siblings together.

    The first `shared` tokens of a group's rows count once per bin. A group that fits a bin goes
    into one; a larger one is cut into as few parts as its order allows, each of which pays for the
    shared tokens.

    Args:
        lengths: tokens of each row. group_ids: the group of each row. shared: leading tokens of
            each row that all rows of its group have, the same number for all of them (or 0).
        budget: tokens per bin.

    Returns:
        Bins of ascending row indices, every row in exactly one.

    Raises:
        TrainingError: a row is longer than the budget.
    """
    parts: list[list[int]] = []
    costs: list[int] = []
    latest: dict[tuple[int, int], int] = {}
    for row, length in enumerate(lengths):
        _require_fits(row, length, budget)
        # A row that shares nothing stands alone.
        key = (group_ids[row], shared[row]) if shared[row] else (-1, -row)
        part = latest.get(key)
        if part is not None and costs[part] + length - shared[row] <= budget:
            parts[part].append(row)
            costs[part] += length - shared[row]
        else:
            latest[key] = len(parts)
            parts.append([row])
            costs.append(length)
    bins = pack(costs, budget)
    return [sorted(row for part in chosen for row in parts[part]) for chosen in bins]


def split_minibatches(group_ids: Sequence[int], n: int, seed: int) -> list[list[int]]:
    """Partition rows into `n` minibatches of whole groups, in a seeded order.

    The order of the groups depends on the set of ids, `seed` and nothing else, not on the order of
    the rows. The minibatches' numbers of groups differ by at most one, larger ones first.

    Args:
        group_ids: the group of each row, in any order. n: minibatches, ≥ 1. seed: of the
            permutation, ≥ 0.

    Returns:
        n non-empty lists of row indices: groups in the seeded order, ascending within a group;
        every row exactly once.

    Raises:
        ValueError: n < 1.
        TrainingError: fewer groups than minibatches; one of them would have no gradient.
    """
    if n < 1:
        raise ValueError(f"the number of minibatches must be >= 1, got {n}")
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(group_ids):
        rows_of[group].append(row)
    if n > len(rows_of):
        raise TrainingError(
            f"{len(rows_of)} groups cannot be split into {n} minibatches of whole groups; lower "
            "ppo_n_minibatches or train on more groups per step"
        )
    ids = sorted(rows_of)
    order = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids)).tolist()]
    return [
        [row for group in part.tolist() for row in rows_of[group]]
        for part in np.array_split(np.array(order, dtype=np.int64), n)
    ]
