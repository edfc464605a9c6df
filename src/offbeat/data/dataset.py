"""Load the rows of a data set: a file, a folder, the Hugging Face hub, a task or a function.

Owns telling from a path which of them it names, and the call of a function; how a file, a folder or
a task is read is ``data.files``, ``data.hub`` and ``data.reasoning_gym``. Does not know what the
columns mean (``data.columns``) nor in which order rows are used (``data.stream``). Everything is
read once, at start-up: a bad line ends the run before a worker starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from offbeat.config.plugins import resolve
from offbeat.data.files import read_file
from offbeat.data.hub import read_folder, read_hub
from offbeat.data.reasoning_gym import read_task
from offbeat.data.rows import Row, Rows
from offbeat.errors import DataError, boundary

HUB_PREFIX = "hub:"
TASK_PREFIX = "reasoning_gym:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_Reader: TypeAlias = Callable[[int | None], Sequence[Row]]
"""Reads the first so many rows of one place, or all."""


def load_rows(
    path: str,
    *,
    args: Mapping[str, object] | None = None,
    limit: int | None = None,
    search_dir: Path | None = None,
    key: str = "train_dataset.path",
) -> Rows:
    """Read the data set that ``path`` names.

    Five forms, told apart in this order:

    - ``reasoning_gym:NAME``: questions that the optional ``reasoning-gym`` package makes up, with
      ``args`` as the options of its task NAME.
    - ``hub:NAME[:CONFIG][@SPLIT]``: a data set of the Hugging Face hub, or a folder, through the
      optional ``datasets`` package; SPLIT is ``train`` unless given. Nothing else touches the
      network.
    - a file: .jsonl, .json, .csv or .parquet.
    - ``FOLDER[@SPLIT]``: a folder that ``save_to_disk`` wrote or that is laid out as on the hub.
      SPLIT is the only one, or ``train``, unless given.
    - ``module:function``, called with ``**args``; returns a non-empty sequence of mappings.

    Files and folders are looked up in the current directory, then in ``search_dir``.

    Args:
        path: one of the five forms.
        args: options of a task or keyword arguments of a function; an error for the other forms.
        limit: keep the first so many rows; None keeps all.
        search_dir: the configuration file's folder.
        key: configuration path of ``path``, for error messages.

    Raises:
        DataError: nothing there, a row that cannot be read, no rows, an unknown task or option, or
            a wrong return value.
        ConfigError: ``module:function`` cannot be imported.
    """
    if limit is not None and limit < 1:
        raise DataError(f"{key}: the row limit must be at least 1 or null (all rows), got {limit}")
    if path.startswith(TASK_PREFIX):
        items: Sequence[Row] = read_task(path.removeprefix(TASK_PREFIX), args or {}, limit, key=key)
    elif (read := _stored(path, search_dir, key)) is not None:
        _refuse_args(args, path, key)
        items = read(limit)
    elif _FUNCTION.fullmatch(path):
        items = _from_function(path, args or {}, search_dir, key)
    else:
        raise DataError(_not_found(path, search_dir, key))
    if not items:
        raise DataError(f"{key}: {path!r} has no rows")
    return Rows(name=path, items=items[:limit])


def _stored(path: str, search_dir: Path | None, key: str) -> _Reader | None:
    """The reader of the hub's data set, file or folder that ``path`` names; None: it names none."""
    if path.startswith(HUB_PREFIX):
        return _hub_reader(path, search_dir, key)
    if (file := _find(path, search_dir, Path.is_file)) is not None:
        return partial(read_file, file)
    if (folder := _find(path, search_dir, Path.is_dir)) is not None:
        return partial(read_folder, folder, None, None, key=key)
    name, _, split = path.rpartition("@")
    if name and (folder := _find(name, search_dir, Path.is_dir)) is not None:
        return partial(read_folder, folder, None, split or None, key=key)
    return None


def _hub_reader(path: str, search_dir: Path | None, key: str) -> _Reader:
    where, _, split = path.removeprefix(HUB_PREFIX).partition("@")
    name, _, config = where.partition(":")
    if not name:
        raise DataError(
            f"{key}: {path!r} names no data set; write {HUB_PREFIX}NAME[:CONFIG][@SPLIT]"
        )
    if (folder := _find(name, search_dir, Path.is_dir)) is not None:
        return partial(read_folder, folder, config or None, split or None, key=key)
    return partial(read_hub, name, config or None, split or None, key=key)


def _find(path: str, search_dir: Path | None, is_there: Callable[[Path], bool]) -> Path | None:
    """What ``path`` names from the current directory, else from ``search_dir``."""
    asked = Path(path).expanduser()
    candidates = [asked] if search_dir is None else [asked, search_dir / asked]
    return next(filter(is_there, candidates), None)


def _refuse_args(args: Mapping[str, object] | None, path: str, key: str) -> None:
    if args:
        raise DataError(
            f"{key}: arguments ({', '.join(args)}) are for a module:function or "
            f"{TASK_PREFIX}NAME; {path!r} takes none"
        )


def _not_found(path: str, search_dir: Path | None, key: str) -> str:
    here = Path.cwd()
    other = search_dir is not None and search_dir.resolve() != here
    looked = f"{here} and {search_dir}" if other else f"{here}"
    return (
        f"{key}: {path!r} is not a file or folder (looked in {looked}), not module:function, and "
        f"neither {HUB_PREFIX}NAME[:CONFIG][@SPLIT] nor {TASK_PREFIX}NAME"
    )


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
