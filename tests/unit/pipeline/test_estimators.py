"""pass@k against counting every choice, and means with their standard error."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from offbeat.pipeline.estimators import estimate, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        answers = [i < c for i in range(n)]
        for k in range(1, n + 1):
            choices = [any(chosen) for chosen in combinations(answers, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(choices) / len(choices), abs=1e-15)


def test_pass_at_1_is_the_share_of_passes_and_pass_at_n_is_whether_there_is_one() -> None:
    assert [pass_at_k(8, c, 1) for c in range(9)] == pytest.approx([c / 8 for c in range(9)])
    assert [pass_at_k(8, c, 8) for c in range(9)] == [0.0] + [1.0] * 8


def test_pass_at_k_of_numbers_whose_binomials_overflow_is_exact() -> None:
    n, c, k = 5000, 7, 2000
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)  # integers: no rounding before the division
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12)
    assert math.comb(n, k) > 10**1000


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_impossible_counts_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs 1 <= k <= n and 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_the_standard_error_is_the_sample_deviation_over_the_root_of_the_prompts() -> None:
    found = estimate([0.0, 1.0, 1.0, 0.5])
    assert found.mean == 0.625
    variance = sum((x - 0.625) ** 2 for x in (0.0, 1.0, 1.0, 0.5)) / 3
    assert found.standard_error == pytest.approx(math.sqrt(variance / 4))
    assert found.prompts == 4


def test_too_few_prompts_have_no_error_and_none_has_no_mean() -> None:
    one, none = estimate([0.5]), estimate([])
    assert one.mean == 0.5
    assert math.isnan(one.standard_error)
    assert (none.prompts, math.isnan(none.mean)) == (0, True)
