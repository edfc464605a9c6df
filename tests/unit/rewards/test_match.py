"""Exact and numeric match."""

from __future__ import annotations

from fractions import Fraction

import pytest

from offbeat.errors import DataError
from offbeat.rewards import exact_match, numeric_match
from offbeat.rewards.match import last_number


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(" Paris\n", {"answer": "Paris"}) == 1.0
    assert exact_match("Paris.", {"answer": "Paris"}) == 0.0
    assert exact_match("paris", {"answer": "Paris"}) == 0.0
    assert exact_match("paris", {"answer": "Paris"}, ignore_case=True) == 1.0
    assert exact_match("New  York", {"answer": "New York"}) == 0.0
    assert exact_match("New  York", {"answer": "New York"}, ignore_whitespace=True) == 1.0


@pytest.mark.parametrize(
    "columns",
    [
        {"answer": "4"},
        {"answer": 4},
        {"ground_truth": "4"},
        {"reference": "4"},
        {"reward_model": {"ground_truth": "4"}},
        {"answer": None, "reference": "4"},
    ],
)
def test_the_reference_is_found_under_each_of_its_names(columns: dict[str, object]) -> None:
    assert exact_match("4", columns) == 1.0


def test_a_row_without_reference_is_an_error_that_names_its_columns() -> None:
    with pytest.raises(DataError) as caught:
        exact_match("4", {"question": "2+2", "solution": "4"})
    assert "answer, ground_truth, reference" in str(caught.value)
    assert "question, solution" in str(caught.value)
    with pytest.raises(DataError, match="must be text or a number, got list"):
        exact_match("4", {"answer": ["4"]})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 1,000 euros", 1000),
        ("$1,234.50", Fraction("1234.5")),
        ("-$3", -3),
        ("5 - 3", 3),
        ("16-3", 3),
        ("x = -3", -3),
        ("x = \N{MINUS SIGN}3", -3),
        ("1e3", 1000),
        ("2.5e-2", Fraction("0.025")),
        ("1/2", Fraction(1, 2)),
        ("first 3/4, then 5.", 5),
        (".5", Fraction(1, 2)),
        ("50%", 50),
        ("7 and 1/0", 7),
        ("12,34", 34),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Fraction | int | None) -> None:
    assert last_number(text) == number


def test_numbers_are_compared_by_value_and_within_the_tolerances() -> None:
    row = {"answer": "so 3 + 4 = 7\n#### 1,000"}
    assert numeric_match("The total is $1000.00.", row) == 1.0
    assert numeric_match("1001", row) == 0.0
    assert numeric_match("1001", row, relative=0.001) == 1.0
    assert numeric_match("1002", row, relative=0.001) == 0.0
    assert numeric_match("1002", row, absolute=2) == 1.0
    assert numeric_match("I do not know", row) == 0.0
    assert numeric_match("0.1", {"answer": 0.1}) == 1.0


def test_a_reference_without_number_is_a_fault_of_the_data() -> None:
    with pytest.raises(DataError, match="has no number: 'Paris'"):
        numeric_match("4", {"answer": "Paris"})
    with pytest.raises(ValueError, match="tolerances must be >= 0"):
        numeric_match("4", {"answer": "4"}, relative=-1)
