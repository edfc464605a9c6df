"""Finding and reading rows."""

from __future__ import annotations

import importlib.util
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


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [row["prompt"] for row in load_rows(str(file))] == ["a", "b"]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": }\n', r"train\.jsonl:2: not JSON: Expecting value at column 7"),
        ('{"a": 1}\n\n[1]\n', r"train\.jsonl:3: a row must be a JSON object, got list"),
        ("", "has no rows"),
        ("\n \n", "has no rows"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(DataError, match=message):
        load_rows(str(file))


def test_binary_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b'{"a": 1}\n\xff\xfe')
    with pytest.raises(DataError, match=r"x\.parquet:2: not UTF-8"):
        load_rows(str(file))


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
    with pytest.raises(DataError, match=r"valid_dataset\.path: 'trian\.jsonl' is not a file"):
        load_rows("trian.jsonl", search_dir=tmp_path, key="valid_dataset.path")
    with pytest.raises(DataError, match=r"is a folder; name a \.jsonl file"):
        load_rows(str(tmp_path))
    with pytest.raises(ConfigError, match="has no 'absent'"):
        load_rows("made_rows:absent", search_dir=functions)


@pytest.mark.invariant("I15")
def test_arguments_for_a_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, '{"a": 1}')
    with pytest.raises(DataError, match=r"arguments \(n\) are for a module:function"):
        load_rows(str(file), args={"n": 3})


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is there")
def test_hub_without_the_datasets_package_names_the_extra() -> None:
    with pytest.raises(DataError, match=r"offbeat\[hub\]"):
        load_rows("hub:org/name:main@test")


FAKE_DATASETS = """
class Table(list):
    pass

def load_dataset(name, config, split):
    return Table({"prompt": f"{name} {config} {split} {i}"} for i in range(5))
"""


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("hub:org/name", "org/name None train 0"),
        ("hub:org/name@test", "org/name None test 0"),
        ("hub:org/name:main@test[:5]", "org/name main test[:5] 0"),
    ],
)
def test_hub_name_configuration_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, first: str
) -> None:
    (tmp_path / "datasets.py").write_text(FAKE_DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    rows = load_rows(path, limit=2)
    monkeypatch.delitem(sys.modules, "datasets")
    assert len(rows) == 2
    assert rows[0]["prompt"] == first


def test_hub_path_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets.py").write_text(FAKE_DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="names no data set"):
        load_rows("hub:@train")


def test_rows_survive_json(tmp_path: Path) -> None:
    row = {"prompt": "ä", "n": 1.5, "deep": {"a": [None, True]}}
    file = write(tmp_path, json.dumps(row, ensure_ascii=False))
    assert load_rows(str(file))[0] == row
