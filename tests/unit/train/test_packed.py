"""Packed rows read for every policy token exactly what its row has before it, prefixes once."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.train.batch import TrainBatch
from offbeat.train.packed import PackedRows
from offbeat.types import GroupId, TrainSample

CPU = torch.device("cpu")
some = settings(max_examples=150, deadline=None)


def sample(group: int, tokens: list[int], written: list[int]) -> TrainSample:
    """A row of ``tokens``; the policy wrote those at the places ``written``."""
    mask = np.zeros(len(tokens), dtype=bool)
    mask[written] = True
    return TrainSample(
        group_id=GroupId(group),
        sibling=0,
        tokens=np.array(tokens, dtype=np.int64),
        loss_mask=mask,
        behave_logp=np.zeros(len(tokens), dtype=np.float32),
        versions=np.where(mask, 0, -1),
        reward=0.0,
        truncated=False,
    )


@st.composite
def row(draw: st.DrawFn) -> TrainSample:
    """Of two different tokens, so that prefixes often coincide; any places but the first."""
    tokens = draw(st.lists(st.integers(7, 8), min_size=1, max_size=12))
    written = [t for t in range(1, len(tokens)) if draw(st.booleans())]
    return sample(draw(st.integers(0, 3)), tokens, written)


batches = st.lists(row(), min_size=1, max_size=10).filter(
    lambda rows: any(s.loss_mask.any() for s in rows)
)


def read(s: TrainSample) -> list[int]:
    """What the model reads of a row: nothing is predicted from its last policy token on."""
    places = np.flatnonzero(s.loss_mask)
    return s.tokens[: places[-1]].tolist() if len(places) else []


def common(rows: list[list[int]]) -> int:
    n = 0
    while all(len(r) > n and r[n] == rows[0][n] for r in rows):
        n += 1
    return n


def shared_by_hand(samples: list[TrainSample]) -> list[int]:
    out = []
    for s in samples:
        readers = [read(x) for x in samples if x.group_id == s.group_id and read(x)]
        out.append(common(readers) if len(readers) > 1 and read(s) else 0)
    return out


@some
@given(batches)
def test_siblings_share_the_longest_prefix_that_all_of_them_read(
    samples: list[TrainSample],
) -> None:
    assert TrainBatch.build(samples, CPU).shared.tolist() == shared_by_hand(samples)
    off = TrainBatch.build(samples, CPU, share_prefixes=False)
    assert off.shared.tolist() == [0] * len(samples)


@pytest.mark.invariant("I09")
@some
@given(batches, st.booleans(), st.randoms(use_true_random=False))
def test_each_policy_token_is_predicted_from_all_its_row_has_before_it(
    samples: list[TrainSample], share: bool, random: Random
) -> None:
    batch = TrainBatch.build(samples, CPU, share_prefixes=share)
    rows = [r for r in range(batch.rows) if random.random() < 0.8]
    if not any(samples[r].loss_mask.any() for r in rows):
        rows = list(range(batch.rows))
    random.shuffle(rows)
    packed = PackedRows.build(batch.select(rows))
    contexts = list(visible(packed))
    expected = [
        (samples[r].tokens[:t].tolist(), int(samples[r].tokens[t]))
        for r in rows
        for t in np.flatnonzero(samples[r].loss_mask)
    ]
    assert contexts == expected
    assert packed.layout.positions[packed.states].tolist() == [len(c) - 1 for c, _ in expected]


def visible(packed: PackedRows) -> list[tuple[list[int], int]]:
    """For each policy token what attention shows the state that predicts it, and its id.

    Read from the blocks: the keys whose bias is 0 for the query, in order.
    """
    seen: dict[int, list[int]] = {}
    for block in packed.layout.blocks:
        places = block.targets.view(block.sequences, -1)
        keys = block.keys.view(block.sequences, -1)
        bias = block.bias.expand(block.sequences, -1, -1)
        for s, m in np.ndindex(*places.shape):
            if int(places[s, m]) < packed.layout.tokens:
                shown = keys[s][bias[s, m] == 0]
                seen[int(places[s, m])] = packed.tokens[shown].tolist()
    pairs = zip(packed.states.tolist(), packed.targets.tolist(), strict=True)
    return [(seen[state], target) for state, target in pairs]


@some
@given(batches)
def test_what_siblings_share_is_computed_once_and_nothing_that_predicts_nothing(
    samples: list[TrainSample],
) -> None:
    shared = shared_by_hand(samples)
    by_group: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s, n in zip(samples, shared, strict=True):
        if read(s):
            by_group[s.group_id].append((n, len(read(s)) - n))
    expected = sum(rows[0][0] + sum(own for _, own in rows) for rows in by_group.values())
    layout = PackedRows.build(TrainBatch.build(samples, CPU)).layout
    assert sum(layout.lengths) == expected
    assert layout.longest == max(len(read(s)) for s in samples)


def test_rows_within_the_prefix_have_no_segment_of_their_own() -> None:
    # 5 6 | 1 2 3 4: the first row reads 5 6 1, which the second reads, too; the third is empty.
    samples = [sample(0, [5, 6, 1, 2], [2, 3]), sample(0, [5, 6, 1, 2, 3, 4], [2, 3, 4, 5])]
    samples.append(sample(0, [5, 6], []))
    batch = TrainBatch.build(samples, CPU)
    assert batch.shared.tolist() == [3, 3, 0]
    packed = PackedRows.build(batch)
    assert packed.layout.lengths == (3, 2)
    assert packed.tokens[:5].tolist() == [5, 6, 1, 2, 3]
    assert packed.states.tolist() == [1, 2, 1, 2, 3, 4]
    assert packed.targets.tolist() == [1, 2, 1, 2, 3, 4]


def test_a_prefix_stays_shared_in_a_selection_and_the_rest_of_the_group_is_left_out() -> None:
    samples = [sample(g, [5, 6, 7, a, 8], [3, 4]) for g, a in ((0, 1), (1, 2), (0, 3), (0, 4))]
    batch = TrainBatch.build(samples, CPU)
    assert batch.shared.tolist() == [3, 0, 3, 3]
    assert PackedRows.build(batch.select([0, 3])).layout.lengths == (3, 1, 1)
    assert PackedRows.build(batch.select([2])).layout.lengths == (3, 1)
    assert PackedRows.build(batch.select([1])).layout.lengths == (4,)


def test_the_same_prefix_in_two_groups_is_not_shared_between_them() -> None:
    samples = [sample(g, [5, 6, 7, a], [3]) for g, a in ((0, 1), (0, 2), (1, 1), (1, 2))]
    assert PackedRows.build(TrainBatch.build(samples, CPU)).layout.lengths == (3, 3)
