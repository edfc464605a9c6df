"""Each format of a file gives the same rows, and a wrong row is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.data.dataset import load_rows
from offbeat.data.rows import Row
from offbeat.errors import DataError

ROWS: list[Row] = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": 'say "a, b"\nand \u2028 ä', "answer": "007"},
    {"prompt": "3", "answer": ""},
]
CSV = 'prompt,answer\n1+1=,2\n"say ""a, b""\nand \u2028 ä",007\n\n3,\n'
TEXTS = {
    "a.jsonl": "\n".join(json.dumps(row) for row in ROWS),
    "b.ndjson": "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "c.json": json.dumps(ROWS, indent=2),
    "d.json": json.dumps({"version": 1, "tags": ["x"], "data": ROWS}),
    "e.csv": CSV,
    "f.CSV": CSV.replace("\n3", "\r\n3"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_every_text_format_gives_the_same_rows(tmp_path: Path, name: str, mark: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(mark + TEXTS[name].encode())
    assert list(load_rows(str(file))) == ROWS
    assert list(load_rows(str(file), limit=2)) == ROWS[:2]


def test_parquet_keeps_nested_columns_and_stops_at_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "n": i,
        }
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    assert list(load_rows(str(file))) == rows
    assert list(load_rows(str(file), limit=3)) == rows[:3]


def test_limit_reads_no_line_after_its_rows(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": "1"}\nnot read'), ("a.csv", "a\n1\n2,3")):
        (tmp_path / name).write_text(text)
        assert list(load_rows(str(tmp_path / name), limit=1)) == [{"a": "1"}]


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": }', r"a\.jsonl:2: not JSON: Expecting value at column 7 of '"),
        (
            "a.jsonl",
            '{"a": 1}\n\n[1]',
            r"a\.jsonl:3: a row must be a JSON object, got list: '\[1\]'",
        ),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '[{"a": 1},\n {"a" 2}]', r"a\.json:2: not JSON: Expecting ':' delimiter at"),
        ("a.json", '{"a": 1}\n{"a": 2}', r"a\.json:2: not JSON: Extra data.*is named \.jsonl"),
        ("a.json", '[{"a": 1}, 2]', r"a\.json: row 2: a row must be a JSON object, got int: '2'"),
        ("a.json", "3", r"a\.json: a JSON file holds a list of objects.*got int"),
        ("a.json", '{"a": 1, "b": []}', r"found no list of objects, keys: a, b"),
        ("a.json", '{"a": [{}], "b": [{}]}', r"found lists of objects under a, b"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "a,b\n", "has no rows"),
        (
            "a.csv",
            "a,b\n1,2\n1,2,3\n",
            r"a\.csv:3: 3 fields under 2 columns \(a, b\): '1,2,3'; put",
        ),
        ("a.csv", "a,b\n\n1\n", r"a\.csv:3: 1 fields under 2 columns"),
        ("a.csv", 'a,b\n"1"x,2\n', r"a\.csv:2: not CSV: .*quote a text"),
        ("a.csv", 'a,b\n"1,2\n', r"a\.csv:2: not CSV: unexpected end of data"),
        ("a.csv", "a,a\n1,2\n", r"a\.csv:1: .* it has the column 'a' twice: 'a,a'"),
        ("a.csv", "a,\n1,2\n", r"a\.csv:1: .* it has a column without a name"),
        ("a.parquet", '{"a": 1}', r"a\.parquet: reading it as Parquet, which its suffix names: "),
        ("a.txt", '{"a": 1}', r"a\.txt: the suffix '\.txt' .*one of \.jsonl, .*\.parquet"),
        ("rows", '{"a": 1}', r"rows: the suffix '' names no format"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_line_and_way_out(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(str(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b'{"a": 1}\n\xff\xfe')
    with pytest.raises(DataError, match=rf"{name}:2: not UTF-8 text.*save the file as UTF-8"):
        load_rows(str(file))


def test_a_long_wrong_line_is_shown_in_part(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("x" * 1000)
    with pytest.raises(DataError, match=r"of 'x{57}\.\.\.'; each line"):
        load_rows(str(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": "1", "b": {"c": 1, "c": 2}}', "one object has the key 'c' twice"),
        ('{"a": "\\udc80"}', r"\\udc80 without its other half"),
        ('{"a": ' + "9" * 5000 + "}", "a number of more than 4300 digits"),
        ("[" * 5000, "brackets are nested too deep"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_that_python_would_misread_or_not_take_names_its_place(
    tmp_path: Path, text: str, problem: str, suffix: str
) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_text(text)
    with pytest.raises(DataError, match=rf"rows\.{suffix}.*{problem}"):
        load_rows(str(file))


def test_whole_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00"}')
    assert list(load_rows(str(tmp_path / "a.jsonl"))) == [{"prompt": "\N{GRINNING FACE}"}]


def test_a_column_that_parquet_has_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table([pa.array(["1"]), pa.array(["2"])], names=["prompt", "prompt"]), file)
    with pytest.raises(DataError, match=r"rows\.parquet: it has the column 'prompt' twice"):
        load_rows(str(file))
