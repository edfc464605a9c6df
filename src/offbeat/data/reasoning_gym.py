"""Questions that the package ``reasoning-gym`` makes up, as rows.

Owns the choice of a task and its options. A row has what the reward
``offbeat.rewards.reasoning_gym`` needs to score an answer, as plain data: ``answer``, ``metadata``,
and ``task``, the name and options of the task whose scorer is asked. Knows nothing of rewards.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

from offbeat.data.extras import import_extra
from offbeat.data.rows import Row
from offbeat.errors import DataError, boundary

DEFAULT_SEED = 0
"""The package would draw another one each time, and a resumed run would go on with other rows."""

_COMPOSITE = "composite"
"""The task that mixes others."""


def read_task(
    name: str, options: Mapping[str, object], limit: int | None, *, key: str
) -> list[Row]:
    """The rows of one task: ``prompt`` (its question), ``answer``, ``metadata`` and ``task``.

    Args:
        name: of a task of reasoning-gym, for example ``chain_sum``. ``composite`` mixes others:
            its option ``datasets`` is a list of ``{name, weight, config}``.
        options: of the task, for example ``min_digits``; ``size`` is the number of rows (500 unless
            given), ``seed`` is 0 unless given.
        limit: make only the first so many rows; None: ``size``.
        key: configuration path of ``name``, for error messages.

    Raises:
        DataError: the package is not installed; an unknown task or option; a value that the task
            refuses.
    """
    gym = import_extra("reasoning_gym", "reasoning-gym", f"{key}: the task {name!r}")
    dataset, task_of = _open(gym, name, options, key)
    count = len(dataset) if limit is None else min(limit, len(dataset))
    with boundary(DataError, f"{key}: making the rows of reasoning-gym's task {name!r}"):
        return [_row(dataset[index], task_of) for index in range(count)]


_TaskOf = Callable[[Mapping[str, Any]], Mapping[str, object]]
"""From an entry of reasoning-gym to the name and options of the task that it belongs to."""


def _row(entry: Mapping[str, Any], task_of: _TaskOf) -> Row:
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
        "task": task_of(entry),
    }


def _open(
    gym: ModuleType, name: str, options: Mapping[str, object], key: str
) -> tuple[Any, _TaskOf]:
    """The data set of the package, and to which task an entry of it belongs."""
    _check(gym, name, options, key)
    given = {"seed": DEFAULT_SEED, **options}
    if name != _COMPOSITE:
        task = {"name": name, "options": dict(options)}
        return _create(gym, name, given, key), lambda entry: task
    parts = _parts(gym, options, key)
    specs = [gym.composite.DatasetSpec(**part) for part in parts]
    tasks = {
        part["name"]: {"name": part["name"], "options": dict(part["config"])} for part in parts
    }
    dataset = _create(gym, name, {**given, "datasets": specs}, key)
    return dataset, lambda entry: tasks[entry["metadata"]["source_dataset"]]


def _create(gym: ModuleType, name: str, options: Mapping[str, object], key: str) -> Any:
    given = ", ".join(f"{option}={value!r}" for option, value in options.items())
    with boundary(DataError, f"{key}: reasoning-gym's task {name!r} with {given}"):
        return gym.create_dataset(name, **options)


def _parts(gym: ModuleType, options: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    """The checked tasks that ``composite`` mixes."""
    given = options.get("datasets")
    if not isinstance(given, list | tuple) or not given:
        raise DataError(f"{key}: {_COMPOSITE!r} mixes the tasks of args.datasets, a list; {_PART}")
    for part in given:
        if not _is_part(part):
            raise DataError(f"{key}: {part!r} in args.datasets is no task to mix; {_PART}")
        _check(gym, part["name"], part.get("config", {}), key)
    return [{"weight": 1.0, "config": {}, **part} for part in given]


_PART = "each is {name: chain_sum, weight: 1, config: {max_digits: 2}}"


def _is_part(part: object) -> bool:
    """Whether this has the shape of one task of a mixture, which itself is none."""
    return (
        isinstance(part, Mapping)
        and set(part) - {"weight", "config"} == {"name"}
        and isinstance(part["name"], str)
        and part["name"] != _COMPOSITE
        and isinstance(part.get("config", {}), Mapping)
    )


def _check(gym: ModuleType, name: str, options: Mapping[str, object], key: str) -> None:
    tasks = gym.factory.DATASETS
    if name not in tasks:
        raise DataError(f"{key}: reasoning-gym has no task {name!r}{_near(name, tasks)}")
    known = [field.name for field in fields(tasks[name][1])]
    for option in options:
        if option not in known:
            raise DataError(
                f"{key}: reasoning-gym's task {name!r} has no option {option!r}"
                f"{_near(option, known)}; in args it takes {', '.join(known)}"
            )


def _near(name: str, known: Iterable[str]) -> str:
    """The known names most like ``name``, as the end of a sentence."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
