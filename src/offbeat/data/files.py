"""Read the rows of one file, whose suffix names its format.

Owns the formats: JSON lines, JSON, CSV and Parquet. Knows neither where files are looked up
(``data.dataset``) nor what columns mean (``data.columns``). A row that cannot be read is named by
file and line, with what was found there and what would be right.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final

from offbeat.data.rows import Row
from offbeat.errors import DataError, boundary

_SHOWN = 60
"""Characters of a wrong line that an error message shows."""


def read_file(file: Path, limit: int | None) -> list[Row]:
    """The first ``limit`` rows of ``file``, or all of them.

    JSON lines and CSV are not read past the limit. Blank lines are skipped.

    Raises:
        DataError: a suffix of no known format, or a row that cannot be read.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(
            f"{file}: the suffix {file.suffix!r} names no format of rows; it must be one of "
            f"{', '.join(_READERS)}"
        )
    return list(islice(reader(file), limit))


def _json_lines(file: Path) -> Iterator[Row]:
    for number, line in _lines(file):
        if line.strip():
            yield _json_line(line, f"{file}:{number}")


def _json_line(line: str, place: str) -> Row:
    try:
        row = _decoded(line, place)
    except json.JSONDecodeError as exc:
        raise DataError(
            f"{place}: not JSON: {exc.msg} at column {exc.colno} of {_shown(line)}; "
            "each line must be one JSON object"
        ) from exc
    return _object(row, place, line)


def _decoded(text: str, place: str) -> object:
    """What ``text`` holds.

    Raises:
        json.JSONDecodeError: it is not JSON; the caller knows where.
        DataError: it is, and cannot be read all the same.
    """
    try:
        content: object = json.loads(text, object_pairs_hook=_without_twins)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError as exc:
        problem = "brackets are nested too deep to be read"
        raise DataError(f"{place}: {problem}: {_shown(text)}") from exc
    except UnicodeEncodeError as exc:
        half = f"\\u{ord(exc.object[exc.start]):04x}"
        problem = f"{half} without its other half is no character; leave it out"
        raise DataError(f"{place}: {problem}: {_shown(text)}") from exc
    except DataError as exc:
        raise DataError(f"{place}: {exc}: {_shown(text)}") from exc
    except ValueError as exc:
        digits = sys.get_int_max_str_digits()
        problem = f"a number of more than {digits} digits; write it as a text, in quotes"
        raise DataError(f"{place}: {problem}: {_shown(text)}") from exc
    return content


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object as it was read; of two equal keys the later one would win, without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DataError(f"one object has the key {_twice([key for key, _ in pairs])!r} twice")
    return found


def _twice(names: Sequence[str]) -> str | None:
    """The first of ``names`` that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _object(row: object, place: str, text: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(
            f"{place}: a row must be a JSON object, got {type(row).__name__}: {_shown(text)}"
        )
    return row


def _json(file: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(file))
    try:
        content = _decoded(text, str(file))
    except json.JSONDecodeError as exc:
        hint = "; a file with one object a line is named .jsonl" if exc.lineno > 1 else ""
        raise DataError(
            f"{file}:{exc.lineno}: not JSON: {exc.msg} at column {exc.colno}{hint}"
        ) from exc
    for number, row in enumerate(_list_of(content, file), start=1):
        yield _object(row, f"{file}: row {number}", repr(row))


def _list_of(content: object, file: Path) -> list[object]:
    """The list that is ``content``, or the only list of objects in it."""
    if isinstance(content, list):
        return content
    wanted = "a JSON file holds a list of objects, or an object with one such list"
    if not isinstance(content, dict):
        raise DataError(f"{file}: {wanted}, got {type(content).__name__}")
    lists: dict[str, list[object]] = {
        name: value for name, value in content.items() if _is_rows(value)
    }
    if len(lists) != 1:
        found = f"lists of objects under {', '.join(lists)}" if lists else "no list of objects"
        raise DataError(f"{file}: {wanted}; found {found}, keys: {', '.join(content) or 'none'}")
    (only,) = lists.values()
    return only


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) for x in value)


def _csv(file: Path) -> Iterator[Row]:
    """Rows of text under the names of the first line; nothing is guessed to be a number."""
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
    header = _next_fields(reader, file)
    if header is None:
        return
    _check_header(header, file)
    while (fields := _next_fields(reader, file)) is not None:
        if len(fields) != len(header):
            raise DataError(
                f"{file}:{reader.line_num}: {len(fields)} fields under {len(header)} columns "
                f"({', '.join(header)}): {_shown(','.join(fields))}; put a text that has commas "
                "or line ends in double quotes"
            )
        yield dict(zip(header, fields, strict=True))


def _next_fields(reader: Iterator[list[str]], file: Path) -> list[str] | None:
    """The fields of the next line that is not blank; None at the end."""
    try:
        return next((fields for fields in reader if fields), None)
    except csv.Error as exc:
        number = getattr(reader, "line_num", 0)
        raise DataError(
            f"{file}:{number}: not CSV: {exc}; quote a text with double quotes and double those "
            "inside it, or convert the file to .jsonl"
        ) from exc


def _check_header(header: list[str], file: Path) -> None:
    twice = _twice(header)
    if twice is not None or "" in header:
        wrong = "a column without a name" if twice is None else f"the column {twice!r} twice"
        raise DataError(
            f"{file}:1: the first line names the columns, and it has {wrong}: "
            f"{_shown(','.join(header))}"
        )


def _parquet(file: Path) -> Iterator[Row]:
    # It loads for a third of a second, and no other format needs it.
    import pyarrow.parquet

    with (
        boundary(DataError, f"{file}: reading it as Parquet, which its suffix names"),
        pyarrow.parquet.ParquetFile(file) as table,
    ):
        twice = _twice(table.schema_arrow.names)
        if twice is not None:
            raise DataError(f"{file}: it has the column {twice!r} twice; rename or drop one")
        for batch in table.iter_batches():
            yield from batch.to_pylist()


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line; numbers start at 1."""
    # Binary iteration splits at \n only: JSON strings may hold U+2028 and friends as they are.
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                raise DataError(
                    f"{file}:{number}: not UTF-8 text: {exc}; save the file as UTF-8"
                ) from exc
            yield number, text


def _shown(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = MappingProxyType(
    {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".csv": _csv,
        ".parquet": _parquet,
    }
)
