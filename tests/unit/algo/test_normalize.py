"""Normalization by group or batch against a naive loop, and its rules for small and equal sets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algo.normalize import NormLevel, normalize

LEVELS: tuple[NormLevel, ...] = ("batch", "group", "none")
VALUES = [1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 3.0]
GROUPS = [9, 4, 9, 4, 9, 2, 4]
VALID = [True, True, True, True, True, True, False]


def naive(
    values: list[float],
    groups: list[int],
    valid: list[bool],
    mean_level: str,
    leave_one_out: bool,
    std_level: str,
    unbiased: bool,
    eps: float,
) -> list[float]:
    """The definition, element by element, in Python floats."""

    def members(i: int, level: str) -> list[int]:
        same = [j for j in range(len(values)) if level == "batch" or groups[j] == groups[i]]
        return [j for j in same if valid[j]]

    def mean(i: int) -> float:
        if mean_level == "none":
            return 0.0
        of = [j for j in members(i, mean_level) if not (leave_one_out and j == i)]
        return math.fsum(values[j] for j in of) / len(of) if of else 0.0

    def deviation(i: int) -> float:
        same = [values[j] for j in members(i, mean_level)] if mean_level != "none" else []
        return 0.0 if len(same) > 1 and len(set(same)) == 1 else values[i] - mean(i)

    out = []
    for i in range(len(values)):
        of = members(i, std_level)
        n = len(of) - unbiased
        square = math.fsum(deviation(j) ** 2 for j in of)
        std = math.sqrt(square / n) if n > 0 else 1.0
        scale = 1.0 if std_level == "none" else std + eps
        out.append(deviation(i) / scale if valid[i] else 0.0)
    return out


@pytest.mark.parametrize(
    ("mean_level", "std_level", "leave_one_out", "unbiased"),
    [
        case
        for case in itertools.product(LEVELS, LEVELS, (False, True), (False, True))
        if not (case[0] == "none" and case[2]) and not (case[1] == "none" and case[3])
    ],
)
def test_normalize_equals_a_naive_loop(
    mean_level: NormLevel, std_level: NormLevel, leave_one_out: bool, unbiased: bool
) -> None:
    found = normalize(
        torch.tensor(VALUES),
        torch.tensor(GROUPS),
        mean_level=mean_level,
        leave_one_out=leave_one_out,
        std_level=std_level,
        unbiased=unbiased,
        eps=1e-3,
        valid=torch.tensor(VALID),
    )
    expected = naive(VALUES, GROUPS, VALID, mean_level, leave_one_out, std_level, unbiased, 1e-3)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def group_zscore(values: list[float], groups: list[int], eps: float = 1e-9) -> list[float]:
    return normalize(
        torch.tensor(values), torch.tensor(groups), mean_level="group", std_level="group", eps=eps
    ).tolist()


@pytest.mark.parametrize("eps", [0.0, 1e-9])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e20])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_become_exactly_zero(value: float, eps: float, leave_one_out: bool) -> None:
    found = normalize(
        torch.full((7,), value, dtype=torch.float64),
        torch.zeros(7, dtype=torch.long),
        mean_level="group",
        leave_one_out=leave_one_out,
        std_level="group",
        eps=eps,
    )
    assert found.tolist() == [0.0] * 7


def test_one_group_of_equal_rewards_does_not_touch_another() -> None:
    found = group_zscore([0.1, 0.1, 0.1, 1.0, 0.0], [1, 1, 1, 2, 2])
    assert found == pytest.approx([0.0, 0.0, 0.0, 1.0, -1.0])


def test_equality_is_of_valid_rewards_only() -> None:
    found = normalize(
        torch.tensor([0.1, 0.1, 0.1, 5.0]),
        torch.zeros(4, dtype=torch.long),
        mean_level="group",
        std_level="group",
        eps=1e-12,
        valid=torch.tensor([True, True, True, False]),
    )
    assert found.tolist() == [0.0] * 4


def test_a_single_reward_has_leave_one_out_mean_zero_and_unbiased_std_one() -> None:
    found = normalize(
        torch.tensor([3.0]),
        torch.tensor([5]),
        mean_level="group",
        leave_one_out=True,
        std_level="group",
        unbiased=True,
        eps=0.0,
    )
    assert found.tolist() == [3.0]
    assert group_zscore([3.0], [5]) == [0.0]


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    found = normalize(
        torch.tensor([1.0, 2.0, 6.0]),
        torch.zeros(3, dtype=torch.long),
        mean_level="group",
        leave_one_out=True,
        std_level="none",
    )
    assert found.tolist() == [-3.0, -1.5, 4.5]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 4)), min_size=1, max_size=25),
    st.randoms(use_true_random=False),
)
def test_normalize_does_not_depend_on_the_order_of_rows(
    rows: list[tuple[float, int]], random: object
) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    values, groups = [r[0] for r in rows], [r[1] for r in rows]
    straight = group_zscore(values, groups, eps=1e-3)
    shuffled = group_zscore([values[i] for i in order], [groups[i] for i in order], eps=1e-3)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-5, abs=1e-6)


def test_group_ids_are_identities_and_not_positions() -> None:
    found = group_zscore([1.0, 5.0, 0.0, 7.0], [10**12, -3, 10**12, -3])
    assert found == pytest.approx([1.0, -1.0, -1.0, 1.0])


def test_an_invalid_value_leaves_the_statistics_even_if_it_is_nan() -> None:
    found = normalize(
        torch.tensor([1.0, math.nan, 0.0]),
        torch.zeros(3, dtype=torch.long),
        mean_level="group",
        std_level="none",
        valid=torch.tensor([True, False, True]),
    )
    assert found.tolist() == [0.5, 0.0, -0.5]


def test_statistics_are_taken_in_float64() -> None:
    # In float32 1e8 + 1 is 1e8: the mean and the small deviations from it would be lost.
    values = torch.tensor([1e8, 1e8 + 8, -2e8 - 8])
    found = normalize(
        values, torch.zeros(3, dtype=torch.long), mean_level="group", std_level="none"
    )
    mean = values.double().mean()
    assert torch.equal(found, (values.double() - mean).float())


def test_an_option_without_its_level_is_refused() -> None:
    values, groups = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="leave_one_out has no effect"):
        normalize(values, groups, mean_level="none", leave_one_out=True, std_level="none")
    with pytest.raises(ValueError, match="unbiased has no effect"):
        normalize(values, groups, mean_level="batch", std_level="none", unbiased=True)
    with pytest.raises(ValueError, match="one length"):
        normalize(values, groups[:1], mean_level="batch", std_level="none")
