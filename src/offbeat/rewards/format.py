"""Rewards of an answer's form: a regular expression, or JSON with certain keys.

Knows no reference answer, no model and no process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from offbeat.errors import ConfigError

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""JSON Schema's names of types."""


def regex_format(completion: str, *, pattern: str) -> float:
    """1.0 when the whole answer, without white space at its ends, matches; otherwise 0.0.

    Args:
        completion: the answer.
        pattern: a regular expression of Python; ``.`` matches line breaks too.

    Raises:
        ConfigError: ``pattern`` is not one.
    """
    return float(_compiled(pattern).fullmatch(completion.strip()) is not None)


def json_format(
    completion: str, *, keys: Sequence[str] | Mapping[str, str] = (), fenced: bool = True
) -> float:
    """1.0 when the answer is JSON and has the keys, otherwise 0.0.

    Args:
        completion: the answer.
        keys: keys that the JSON object must have; as a mapping, each with the name of its type as
            in JSON Schema: string, integer, number, boolean, array, object, null. Without keys any
            JSON value will do.
        fenced: the JSON may stand in one Markdown code fence.

    Raises:
        ConfigError: a type that does not exist.
    """
    wanted = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys, "")
    for name, kind in wanted.items():
        if kind and kind not in _TYPES:
            raise ConfigError(f"keys.{name}: {kind!r} is not one of {', '.join(_TYPES)}")
    try:
        value = json.loads(_unfenced(completion) if fenced else completion, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    if not wanted:
        return 1.0
    return float(isinstance(value, dict) and all(_has(value, *item) for item in wanted.items()))


def _has(value: Mapping[str, object], name: str, kind: str) -> bool:
    if name not in value or not kind:
        return name in value
    found = value[name]
    if isinstance(found, bool):  # for Python also an int
        return kind == "boolean"
    return isinstance(found, _TYPES[kind])


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _unfenced(text: str) -> str:
    match = re.fullmatch(r"\s*```[\w-]*\n(.*?)\n?```\s*", text, re.DOTALL)
    return match[1] if match else text


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as exc:
        raise ConfigError(f"pattern: {pattern!r} is not a regular expression: {exc}") from exc
