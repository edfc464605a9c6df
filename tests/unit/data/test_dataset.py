"""Finding and reading rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offbeat.data.dataset import load_rows
from offbeat.errors import ConfigError, DataError

FUNCTIONS = """
def rows(n=3, word="row"):
    return [{"prompt": f"{word} {i}"} for i in range(n)]

def generator():
    yield {"prompt": "a"}

def mixed():
    return [{"prompt": "a"}, "b"]

def nothing():
    return None

def broken():
    raise KeyError("inner")

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of row functions, forgotten again after the test."""
    (tmp_path / "made_rows.py").write_text(FUNCTIONS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "made_rows", raising=False)
    return tmp_path


def write(folder: Path, text: str, name: str = "train.jsonl") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_file_rows_keep_their_order_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b\u2028c"}\n   \n{"prompt": "d"}')
    rows = load_rows(str(file))
    assert [row["prompt"] for row in rows] == ["a", "b\u2028c", "d"]
    assert rows.name == str(file)
    assert rows[-1] == {"prompt": "d"}
    assert [row["prompt"] for row in rows[1:]] == ["b\u2028c", "d"]


def test_current_folder_comes_before_the_configuration_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    here.mkdir()
    beside.mkdir()
    write(beside, '{"prompt": "beside"}')
    monkeypatch.chdir(here)
    assert load_rows("train.jsonl", search_dir=beside)[0]["prompt"] == "beside"
    write(here, '{"prompt": "here"}')
    assert load_rows("train.jsonl", search_dir=beside)[0]["prompt"] == "here"


def test_limit_keeps_the_first_rows_and_does_not_read_on(tmp_path: Path) -> None:
    file = write(tmp_path, '{"a": 1}\n{"a": 2}\nnot read\n')
    assert [row["a"] for row in load_rows(str(file), limit=2)] == [1, 2]
    with pytest.raises(DataError, match="at least 1 or null"):
        load_rows(str(file), limit=0)


def test_function_gets_its_arguments(functions: Path) -> None:
    rows = load_rows("made_rows:rows", args={"n": 4, "word": "x"}, limit=3, search_dir=functions)
    assert [row["prompt"] for row in rows] == ["x 0", "x 1", "x 2"]
    assert rows.name == "made_rows:rows"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("generator", {}, r"made_rows:generator\(\) returned generator; return a list"),
        ("mixed", {}, "returned str as row 2"),
        ("nothing", {}, "returned NoneType"),
        ("rows", {"n": 0}, r"made_rows:rows\(n=0\) returned an empty list"),
        ("broken", {}, r"data\.path: calling made_rows:broken\(\): KeyError: 'inner'"),
        ("rows", {"m": 1}, r"calling made_rows:rows\(m=1\): TypeError"),
        ("constant", {}, "is int, not a function"),
    ],
)
def test_function_that_does_not_return_rows_is_named(
    functions: Path, name: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(f"made_rows:{name}", args=args, search_dir=functions, key="data.path")


@pytest.mark.invariant("I15")
def test_path_that_names_nothing_says_where_it_looked(
    tmp_path: Path, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"valid_dataset\.path: 'trian\.jsonl' is not a file or"):
        load_rows("trian.jsonl", search_dir=tmp_path, key="valid_dataset.path")
    with pytest.raises(DataError, match=r"'gone@test' is not a file or folder"):
        load_rows("gone@test")
    with pytest.raises(ConfigError, match="has no 'absent'"):
        load_rows("made_rows:absent", search_dir=functions)


@pytest.mark.invariant("I15")
def test_arguments_for_a_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, '{"a": 1}')
    with pytest.raises(DataError, match=r"arguments \(n\) are for a module:function"):
        load_rows(str(file), args={"n": 3})


def test_rows_survive_json(tmp_path: Path) -> None:
    row = {"prompt": "ä", "n": 1.5, "deep": {"a": [None, True]}}
    file = write(tmp_path, json.dumps(row, ensure_ascii=False))
    assert load_rows(str(file))[0] == row
