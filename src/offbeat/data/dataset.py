"""Load the rows of a data set: a JSON-lines file, a Python function, or the Hugging Face hub.

Owns finding and reading the rows; does not know what the columns mean (``data.columns``) nor in
which order they are used (``data.stream``). Everything is read once, at start-up: a bad line ends
the run before a worker starts.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, overload

from offbeat.config.plugins import resolve
from offbeat.errors import DataError, boundary

Row: TypeAlias = Mapping[str, object]

HUB_PREFIX = "hub:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Sequence[Row]):
    """The rows of one data set, in file order, and the name that error messages give it."""

    name: str
    items: Sequence[Row]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(name=self.name, items=self.items[index])
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def load_rows(
    path: str,
    *,
    args: Mapping[str, object] | None = None,
    limit: int | None = None,
    search_dir: Path | None = None,
    key: str = "train_dataset.path",
) -> Rows:
    """Read the data set that ``path`` names.

    Three forms, told apart in this order:

    - ``hub:NAME[:CONFIG][@SPLIT]``: a data set of the Hugging Face hub, or a folder in its layout,
      through the optional ``datasets`` package; SPLIT is ``train`` unless given. Nothing else
      touches the network.
    - a JSON-lines file, looked up in the current directory, then in ``search_dir``. Blank lines are
      skipped.
    - ``module:function``, called with ``**args``; returns a non-empty sequence of mappings.

    Args:
        path: one of the three forms.
        args: keyword arguments for ``module:function``; an error for the other forms.
        limit: keep the first so many rows; None keeps all.
        search_dir: the configuration file's folder.
        key: configuration path of ``path``, for error messages.

    Raises:
        DataError: nothing there, a line that is not a JSON object, no rows, or a wrong return
            value.
        ConfigError: ``module:function`` cannot be imported.
    """
    if limit is not None and limit < 1:
        raise DataError(f"{key}: the row limit must be at least 1 or null (all rows), got {limit}")
    if path.startswith(HUB_PREFIX):
        _refuse_args(args, path, key)
        items: Sequence[Row] = _from_hub(path, limit, key)
    elif (file := _find_file(path, search_dir)) is not None:
        _refuse_args(args, path, key)
        items = _from_file(file, limit)
    elif _FUNCTION.fullmatch(path):
        items = _from_function(path, args or {}, search_dir, key)
    else:
        raise DataError(_not_found(path, search_dir, key))
    if not items:
        raise DataError(f"{key}: {path!r} has no rows")
    return Rows(name=path, items=items[:limit])


def _refuse_args(args: Mapping[str, object] | None, path: str, key: str) -> None:
    if args:
        raise DataError(
            f"{key}: arguments ({', '.join(args)}) are for a module:function; {path!r} takes none"
        )


def _find_file(path: str, search_dir: Path | None) -> Path | None:
    """The file that ``path`` names from the current directory, then from ``search_dir``."""
    asked = Path(path).expanduser()
    candidates = [asked] if search_dir is None else [asked, search_dir / asked]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _not_found(path: str, search_dir: Path | None, key: str) -> str:
    asked = Path(path).expanduser()
    if asked.is_dir() or (search_dir is not None and (search_dir / asked).is_dir()):
        return (
            f"{key}: {path!r} is a folder; name a .jsonl file in it, or {HUB_PREFIX + path!r} "
            "for a folder in the Hugging Face layout"
        )
    looked = f"{Path.cwd()}" + (f" and {search_dir}" if search_dir is not None else "")
    return (
        f"{key}: {path!r} is not a file (looked in {looked}), not module:function, and not "
        f"{HUB_PREFIX}NAME[:CONFIG][@SPLIT]"
    )


def _from_file(file: Path, limit: int | None) -> list[Row]:
    rows: list[Row] = []
    for number, line in _lines(file):
        rows.append(_parse(line, f"{file}:{number}"))
        if len(rows) == limit:
            break
    return rows


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank; numbers start at 1."""
    # Binary iteration splits at \n only: JSON strings may hold U+2028 and friends as they are.
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as exc:
                raise DataError(f"{file}:{number}: not UTF-8 text: {exc}") from exc
            if text.strip():
                yield number, text


def _parse(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise DataError(f"{place}: not JSON: {exc.msg} at column {exc.colno}") from exc
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
    return row


def _from_function(
    path: str, args: Mapping[str, object], search_dir: Path | None, key: str
) -> Sequence[Row]:
    function = resolve(path, search_dir, key)
    if not callable(function):
        raise DataError(f"{key}: {path!r} is {type(function).__name__}, not a function")
    call = f"{path}({', '.join(f'{name}={value!r}' for name, value in args.items())})"
    with boundary(DataError, f"{key}: calling {call}"):
        result: object = function(**args)
    if not isinstance(result, Sequence) or isinstance(result, str | bytes):
        raise DataError(
            f"{key}: {call} returned {type(result).__name__}; return a list of mappings"
        )
    if not result:
        raise DataError(f"{key}: {call} returned an empty {type(result).__name__}")
    for index, row in enumerate(result):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{key}: {call} returned {type(row).__name__} as row {index + 1}; "
                "each row is a mapping from column to value"
            )
    return result


def _from_hub(path: str, limit: int | None, key: str) -> list[Row]:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{key}: {path!r} needs the datasets package, which is not installed: "
            "pip install 'offbeat[hub]'"
        )
    name, config, split = _hub_parts(path)
    datasets = importlib.import_module("datasets")
    with boundary(DataError, f"{key}: loading {path!r}"):
        table = datasets.load_dataset(name, config, split=split)
        count = len(table) if limit is None else min(limit, len(table))
        return [dict(table[index]) for index in range(count)]


def _hub_parts(path: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of ``hub:NAME[:CONFIG][@SPLIT]``."""
    where, _, split = path.removeprefix(HUB_PREFIX).partition("@")
    name, _, config = where.partition(":")
    if not name:
        raise DataError(f"{path!r} names no data set; write {HUB_PREFIX}NAME[:CONFIG][@SPLIT]")
    return name, config or None, split or "train"
