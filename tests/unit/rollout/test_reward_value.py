"""What counts as a reward."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from offbeat.errors import RewardError
from offbeat.rollout.reward_value import reward_of


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_a_finite_number_of_any_kind_is_a_reward(returned: object, value: float) -> None:
    assert reward_of(returned) == (value, {})


def test_a_mapping_gives_the_value_and_its_parts() -> None:
    returned = {"reward": np.float64(1.5), "format": 0.5, "correct": True}
    assert reward_of(returned) == (1.5, {"format": 0.5, "correct": 1.0})


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "returned None"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (10**400, "returned 1000000"),
        ("1.0", "returned '1.0'"),
        ([1.0], r"returned \[1.0\]"),
        (np.ones(1), r"returned array\(\[1\.\]\)"),
        (np.array("x"), "returned 'x'"),
        (1 + 0j, r"returned \(1\+0j\)"),
        ({"score": 1.0}, "its keys: score"),
        ({"reward": None}, 'returned "reward" = None'),
        ({"reward": 1.0, "format": "good"}, "returned the part 'format' = 'good'"),
        ({"reward": 1.0, "format": math.nan}, "returned the part 'format' = nan"),
    ],
)
def test_anything_else_is_refused_with_what_it_was(returned: object, shown: str) -> None:
    with pytest.raises(RewardError, match=shown):
        reward_of(returned)
