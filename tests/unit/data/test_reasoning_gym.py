"""Rows that reasoning-gym makes up."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.data.dataset import load_rows
from offbeat.errors import DataError

MIX = [
    {"name": "chain_sum", "weight": 2, "config": {"max_digits": 1}},
    {"name": "letter_counting"},
]


def test_a_row_has_the_question_as_prompt_and_what_its_scorer_needs() -> None:
    rows = load_rows("reasoning_gym:chain_sum", args={"size": 3, "max_digits": 1})
    assert len(rows) == 3
    for row in rows:
        assert set(row) == {"prompt", "answer", "metadata", "task"}
        assert str(row["prompt"]).startswith("State the final answer")
        assert row["task"] == {"name": "chain_sum", "options": {"size": 3, "max_digits": 1}}
        assert pickle.loads(pickle.dumps(row)) == row


def test_rows_are_the_same_in_every_run_unless_the_seed_says_otherwise() -> None:
    def prompts(**args: object) -> list[object]:
        return [row["prompt"] for row in load_rows("reasoning_gym:gcd", args=args, limit=5)]

    assert prompts() == prompts() == prompts(seed=0)
    assert prompts(seed=1) != prompts()


def test_limit_makes_no_more_rows_than_it_keeps() -> None:
    assert len(load_rows("reasoning_gym:chain_sum", args={"size": 10**9}, limit=2)) == 2


def test_rows_of_a_mixture_name_the_task_that_each_comes_from() -> None:
    rows = load_rows("reasoning_gym:composite", args={"datasets": MIX, "size": 20})
    tasks = [row["task"] for row in rows]
    assert {"name": "chain_sum", "options": {"max_digits": 1}} in tasks
    assert {"name": "letter_counting", "options": {}} in tasks


def test_the_prefix_wins_over_a_module_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning_gym.py").write_text("def chain_sum():\n    return [{'prompt': 'mine'}]")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (row,) = load_rows("reasoning_gym:chain_sum", limit=1, search_dir=tmp_path)
    assert row["prompt"] != "mine"


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chain_sums", {}, r"no task 'chain_sums'; did you mean 'chain_sum'"),
        ("", {}, r"no task ''"),
        ("chain_sum", {"max_digit": 2}, r"no option 'max_digit'; did you mean 'max_digits'"),
        ("chain_sum", {"zzz": 2}, r"no option 'zzz'; in args it takes min_terms, max_terms"),
        ("chain_sum", {"min_terms": 0}, r"min_terms=0: AssertionError: min_terms must be positive"),
        ("composite", {}, r"mixes the tasks of args\.datasets, a list"),
        ("composite", {"datasets": ["gcd"]}, r"'gcd' in args\.datasets is no task to mix"),
        ("composite", {"datasets": [{"name": "gdc"}]}, r"no task 'gdc'; did you mean 'gcd'"),
        ("composite", {"datasets": [{"name": "composite"}]}, r"is no task to mix"),
        ("composite", {"datasets": [{"name": "gcd", "config": {"x": 1}}]}, r"'gcd' has no option"),
    ],
)
def test_unknown_task_or_option_is_named_with_what_is_there(
    name: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_rows(f"reasoning_gym:{name}", args=args, key="train_dataset.path")
    assert str(caught.value).startswith("train_dataset.path: ")


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("reasoning_gym:gcd", r"reasoning-gym package.*pip install reasoning-gym"),
        ("hub:org/name", r"datasets package.*pip install datasets"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, path: str, needs: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=needs):
        load_rows(path)


@pytest.mark.invariant("I16")
def test_optional_packages_are_imported_only_when_a_path_needs_them() -> None:
    code = (
        "import sys, offbeat.data.dataset\n"
        "sys.stdout.write(' '.join({'reasoning_gym', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")
