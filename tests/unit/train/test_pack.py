"""Micro-batches and minibatches are partitions with the promised shape."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import TrainingError
from offbeat.train.pack import pack, pack_siblings, split_minibatches

few = settings(max_examples=60, deadline=None)


@few
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120))
def test_every_row_is_in_exactly_one_bin_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(row for b in bins for row in b) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in b) <= budget for b in bins)
    assert all(b == sorted(b) and b for b in bins)


@few
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_a_bin_is_opened_only_when_no_other_has_room(lengths: list[int], budget: int) -> None:
    # Each bin was opened by a row (its longest) that fitted in none of the earlier ones.
    bins = pack(lengths, budget)
    for i, later in enumerate(bins):
        opener = max(lengths[row] for row in later)
        assert all(sum(lengths[row] for row in b) + opener > budget for b in bins[:i])


def test_a_row_joins_the_bin_with_the_fewest_rows_that_has_room() -> None:
    # 6 | 5 5 | then 4: the first bin has room and one row, so 4 goes there although it is not the
    # fullest; 1 fits in no full bin.
    assert pack([6, 5, 5, 4], budget=10) == [[0, 3], [1, 2]]
    assert pack([7, 6, 1, 1], budget=10) == [[0, 2], [1, 3]]


def test_longest_rows_are_placed_first_so_short_ones_fill_the_gaps() -> None:
    assert pack([2, 2, 8, 8], budget=10) == [[0, 2], [1, 3]]


def test_nothing_packs_into_no_bins() -> None:
    assert pack([], budget=10) == []


def test_a_row_longer_than_the_budget_is_named_with_the_budget() -> None:
    with pytest.raises(TrainingError, match=r"row 1 has 11 tokens.*budget of 10"):
        pack([3, 11, 2], budget=10)


# Siblings


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Lengths, group ids and shared tokens of rows in any order; lengths up to 50."""
    rows: list[tuple[int, int, int]] = []
    for group in range(draw(st.integers(0, 6))):
        shared = draw(st.integers(0, 30))
        own = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
        rows += [(shared + n or 1, group, shared) for n in own]
    rows = draw(st.permutations(rows))
    lengths, ids, shared_tokens = zip(*rows, strict=True) if rows else ((), (), ())
    return list(lengths), list(ids), list(shared_tokens)


def cost(rows: list[int], lengths: list[int], ids: list[int], shared: list[int]) -> int:
    """Tokens that a pass over ``rows`` computes."""
    prefixes = {ids[r]: shared[r] for r in rows}
    return sum(prefixes.values()) + sum(lengths[r] - shared[r] for r in rows)


@few
@given(groups(), st.integers(50, 120))
def test_siblings_are_packed_once_each_within_the_budget_of_computed_tokens(
    batch: tuple[list[int], list[int], list[int]], budget: int
) -> None:
    bins = pack_siblings(*batch, budget)
    assert sorted(row for b in bins for row in b) == list(range(len(batch[0])))
    assert all(cost(b, *batch) <= budget for b in bins)
    assert all(b == sorted(b) and b for b in bins)


@few
@given(groups(), st.integers(50, 120))
def test_siblings_stay_together_when_they_fit_and_a_larger_group_is_cut_only_when_full(
    batch: tuple[list[int], list[int], list[int]], budget: int
) -> None:
    _, ids, shared = batch
    home = {row: i for i, b in enumerate(pack_siblings(*batch, budget)) for row in b}
    for group in {g for g, n in zip(ids, shared, strict=True) if n}:
        rows = [r for r in home if ids[r] == group]
        if cost(rows, *batch) <= budget:
            assert len({home[r] for r in rows}) == 1
        # In the order of the rows each part takes what fits.
        parts: list[list[int]] = []
        for row in sorted(rows):
            if not parts or cost([*parts[-1], row], *batch) > budget:
                parts.append([])
            parts[-1].append(row)
        assert all(len({home[r] for r in part}) == 1 for part in parts)
        assert all(cost([*a, b[0]], *batch) > budget for a, b in pairwise(parts))


@few
@given(groups(), st.integers(50, 120))
def test_rows_that_share_nothing_are_packed_as_without_groups(
    batch: tuple[list[int], list[int], list[int]], budget: int
) -> None:
    lengths, ids, _ = batch
    assert pack_siblings(lengths, ids, [0] * len(ids), budget) == pack(lengths, budget)


def test_a_prefix_is_paid_for_once_in_each_part() -> None:
    # 8 shared + 2, 2, 2 = 14 together; with a budget of 12 the third pays for its own prefix.
    assert pack_siblings([10, 10, 10], [5, 5, 5], [8, 8, 8], budget=14) == [[0, 1, 2]]
    assert pack_siblings([10, 10, 10], [5, 5, 5], [8, 8, 8], budget=13) == [[0, 1], [2]]
    # Groups that fit beside each other share a bin.
    assert pack_siblings([6, 6, 6, 6], [1, 2, 1, 2], [5, 5, 5, 5], budget=14) == [[0, 1, 2, 3]]


def test_a_sibling_longer_than_the_budget_is_named_although_its_prefix_is_shared() -> None:
    with pytest.raises(TrainingError, match=r"row 1 has 11 tokens.*budget of 10"):
        pack_siblings([3, 11], [0, 0], [3, 3], budget=10)


# Minibatches


@few
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 2**63 - 1),
)
def test_minibatches_are_whole_groups_and_every_row_once(
    group_ids: list[int], n: int, seed: int
) -> None:
    groups = set(group_ids)
    n = min(n, len(groups))
    parts = split_minibatches(group_ids, n, seed)
    assert len(parts) == n
    assert sorted(row for part in parts for row in part) == list(range(len(group_ids)))
    groups_of = [{group_ids[row] for row in part} for part in parts]
    assert sum(len(g) for g in groups_of) == len(groups)
    sizes = [len(g) for g in groups_of]
    assert max(sizes) - min(sizes) <= 1


def test_minibatch_order_depends_on_the_seed_and_not_on_the_order_of_rows() -> None:
    ids = [i for i in range(16) for _ in range(2)]
    first = split_minibatches(ids, 4, seed=3)
    assert split_minibatches(ids, 4, seed=3) == first
    assert split_minibatches(ids, 4, seed=4) != first
    reversed_ids = ids[::-1]
    mirrored = split_minibatches(reversed_ids, 4, seed=3)
    assert [[reversed_ids[r] for r in part] for part in mirrored] == [
        [ids[r] for r in part] for part in first
    ]


def test_more_minibatches_than_groups_is_an_error() -> None:
    with pytest.raises(TrainingError, match="2 groups cannot be split into 3"):
        split_minibatches([5, 5, 9], 3, seed=0)


def test_fewer_than_one_minibatch_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        split_minibatches([5], 0, seed=0)
