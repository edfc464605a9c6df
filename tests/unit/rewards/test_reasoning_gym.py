"""Answers to reasoning-gym's questions get the score that reasoning-gym gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from offbeat.config import load
from offbeat.data.columns import ColumnMap
from offbeat.data.dataset import load_rows
from offbeat.errors import RewardError
from offbeat.rewards.reasoning_gym import reward
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.types import Scored

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "reasoning_gym.yaml"
SPEC = "offbeat.rewards.reasoning_gym:reward"


def columns_of(name: str, options: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """What the reward gets of the first row of a task."""
    (row,) = load_rows(f"reasoning_gym:{name}", args=options or {}, limit=1)
    return ColumnMap().read(row, "row 1").columns


def score(completion: str, columns: Mapping[str, object]) -> float:
    return reward("asked", completion, [1], [2], **columns)["reward"]


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "countdown", "knights_knaves"])
def test_the_gold_answer_scores_one_and_a_wrong_one_less(name: str) -> None:
    columns = columns_of(name)
    gold = str(columns["answer"])
    assert reward("asked", gold, [1], [2], **columns) == {"reward": 1.0, "solved": 1.0}
    wrong = reward("asked", "no idea", [1], [2], **columns)
    assert wrong["reward"] < 0.1
    assert wrong["solved"] == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("{gold}", 1.0),
        ("  {gold}\n", 1.0),
        ("I add them. <answer>{gold}</answer>", 1.0),
        ("<answer> {gold} </answer> done", 1.0),
        ("<answer>-1</answer> no, <answer>{gold}</answer>", 1.0),
        ("<answer>{gold}</answer> no, <answer>-1</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_tagged_answer_counts_else_the_whole_text(
    completion: str, expected: float
) -> None:
    columns = columns_of("chain_sum")
    assert score(completion.format(gold=columns["answer"]), columns) == expected


def test_a_scorer_that_heeds_the_options_gets_those_of_the_row() -> None:
    columns = columns_of("puzzle24", {"max_value": 5})
    assert score("1 * 2 * 3 * 4", columns) == 1.0
    assert score("6 * 4 * 1 * 1", columns) < 0.1
    wider = columns_of("puzzle24", {"max_value": 9})
    assert score("6 * 4 * 1 * 1", wider) == 1.0


def test_a_row_saved_by_other_means_is_scored_by_its_metadata() -> None:
    columns = {name: value for name, value in columns_of("chain_sum").items() if name != "task"}
    assert score(str(columns["answer"]), columns) == 1.0


@pytest.mark.parametrize("columns", [{}, {"answer": "4"}, {"answer": "4", "metadata": {}}])
def test_a_row_from_elsewhere_is_refused_with_the_columns_it_has(
    columns: dict[str, object],
) -> None:
    with pytest.raises(RewardError, match=r"columns answer, metadata .* and task; this row has"):
        reward("asked", "4", [1], [2], **columns)


async def test_the_recipe_scores_its_own_rows_in_a_reward_process() -> None:
    cfg = load(RECIPE)
    data = cfg.train_dataset
    rows = load_rows(data.path, args=data.args, limit=3)
    asked = ColumnMap(prompt_template=data.prompt_template).read(rows[0], "row 1")
    letters = str(asked.columns["answer"])[::-1]
    assert asked.text == f"1{letters[0]}2{letters[1]}3{letters[2]}="
    async with AsyncRewardWrapper(cfg.rollout.reward_fn, workers=1) as scorer:
        outcome = await scorer(asked.text, str(asked.columns["answer"]), [1], [2], **asked.columns)
    assert isinstance(outcome, Scored)
    assert outcome.value == 1.0
    assert outcome.parts == {"solved": 1.0}


def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('no reasoning_gym', name='reasoning_gym')"
    (tmp_path / "reasoning_gym.py").write_text(missing)
    done = subprocess.run(
        [sys.executable, "-c", f"import {SPEC.partition(':')[0]}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "ConfigError" in done.stderr
    assert "pip install reasoning-gym" in done.stderr
