"""The shipped recipes: rows that never leak into evaluation, rewards that score what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.plugins import resolve

ROOT = Path(__file__).resolve().parents[3]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def recipe(spec: str) -> Callable[..., Any]:
    found = resolve(spec, ROOT / "recipes", "test")
    assert callable(found)
    return found


def score(name: str, completions: str, answer: str) -> float:
    given = recipe(f"{name}:reward")("asked", completions, [1], [2], answer=answer, other=3)
    return given["reward"] if isinstance(given, dict) else given


def test_reverse_rows_are_the_same_every_time_and_reversed() -> None:
    rows = recipe("reverse:rows")
    assert rows(50) == rows(50)
    assert rows(50) == rows(100)[:50]
    assert rows(50) != rows(50, seed=2)
    for row in rows(50, digits=5):
        digits = row["answer"][::-1]
        assert row["prompt"] == "".join(p + d for p, d in zip("abcde", digits, strict=True)) + "="
        assert len(row["answer"]) == 5


@pytest.mark.parametrize(
    ("digits", "train", "held_out"), [(1, 9, 1), (2, 90, 10), (6, 20_000, 200)]
)
def test_reverse_never_trains_on_a_held_out_row(digits: int, train: int, held_out: int) -> None:
    rows = recipe("reverse:rows")
    seen = {row["prompt"] for row in rows(train, digits=digits)}
    kept = {row["prompt"] for row in rows(held_out, digits=digits, held_out=True)}
    assert len(seen) == train
    assert len(kept) == held_out
    assert not seen & kept


@pytest.mark.parametrize("args", [{"n": 0}, {"n": 91, "digits": 2}, {"n": 201, "held_out": True}])
def test_reverse_refuses_a_number_of_rows_it_does_not_have(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="n must be between 1 and"):
        recipe("reverse:rows")(**args)


def test_reverse_answer_that_goes_on_with_invisible_tokens_is_not_exact() -> None:
    reward = recipe("reverse:reward")
    ended = reward("asked", "654321", [1], [0] * 7, answer="654321")
    going_on = reward("asked", "654321", [1], [0] * 8, answer="654321")
    assert ended == {"reward": 1.0, "exact": 1.0}
    assert going_on == {"reward": 6 / 7, "exact": 0.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("654321", 1.0),
        ("654320", 5 / 6),
        ("6543210", 6 / 7),
        ("65", 2 / 6),
        ("", 0.0),
        (" 654321", 0.0),
        ("123456", 0.0),
    ],
)
def test_reverse_reward_is_the_share_of_right_positions(given: str, expected: float) -> None:
    assert score("reverse", given, "654321") == pytest.approx(expected)


def test_addition_holds_out_pairs_in_both_orders() -> None:
    rows = recipe("smollm2_addition:rows")

    def pairs(found: list[dict[str, Any]]) -> set[frozenset[str]]:
        questions = [row["messages"][-1]["content"] for row in found]
        return {frozenset(q.split(" ")[2].rstrip("?").split("+")) for q in questions}

    train, held_out = rows(), rows(held_out=True)
    assert len(train) + len(held_out) == 21 * 21
    assert not pairs(train) & pairs(held_out)
    assert len(pairs(held_out)) == 24
    assert rows(10) == train[:10]
    for row in train + held_out:
        a, b = row["messages"][-1]["content"].split(" ")[2].rstrip("?").split("+")
        assert int(a) + int(b) == int(row["answer"])


def test_addition_refuses_a_number_of_rows_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="n must be between 1 and"):
        recipe("smollm2_addition:rows")(1000)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("19", 1.0),
        (" 19.", 1.0),
        ("7 + 12 = 19", 1.0),
        ("19, or 20", 0.0),
        ("119", 0.0),
        ("nineteen", 0.0),
        ("", 0.0),
    ],
)
def test_addition_reward_counts_the_last_number(given: str, expected: float) -> None:
    assert score("smollm2_addition", given, "19") == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 eggs\n#### 18", "18"),
        ("#### 5\nno, #### $1,000.50 for 3 days", "1000.50"),
        ("so \\boxed{\\text{about }\\$2,400} for 7", "2400"),
        ("\\boxed{1} then \\boxed{\\frac{3}{4}}", "4"),
        ("\\boxed{12", "12"),
        ("#### none, yet 4 remain", "4"),
        ("16-3=13", "13"),
        ("it fell to -5", "-5"),
        ("it fell to \N{MINUS SIGN}5", "-5"),
        ("a loss of -$7", "-7"),
        ("left: 20-3", "3"),
        ("that is 18.", "18"),
        ("only .5", "0.5"),
        ("1,234,567 in all", "1234567"),
        ("one of 3,4", "4"),
    ],
)
def test_gsm8k_final_number(text: str, number: str) -> None:
    assert recipe("gsm8k:final_number")(text) == Decimal(number)


def test_gsm8k_without_a_number_scores_zero_and_bad_data_raises() -> None:
    assert score("gsm8k", "", "#### 1") == 0.0
    assert score("gsm8k", "I do not know", "#### 1") == 0.0
    with pytest.raises(ValueError, match="no number"):
        score("gsm8k", "1", "none")


@pytest.mark.skipif(not (GSM8K / "test.jsonl").is_file(), reason="GSM8K is not on this machine")
def test_every_gold_solution_of_gsm8k_scores_one_and_its_neighbor_zero() -> None:
    text = (GSM8K / "test.jsonl").read_text(encoding="utf-8")
    answers = [json.loads(line)["answer"] for line in text.strip().split("\n")]
    gold = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    assert len(answers) == 1319
    differing = 0
    for index, answer in enumerate(answers):
        following = (index + 1) % len(answers)
        assert score("gsm8k", answer, answer) == 1.0
        if gold[index] != gold[following]:
            differing += 1
            assert score("gsm8k", answer, answers[following]) == 0.0
    assert differing > 1200
