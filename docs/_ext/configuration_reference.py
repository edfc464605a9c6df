"""The configuration reference, from the dataclasses of `offbeat.config` and their docstrings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache, reduce
from typing import Any, get_args, get_origin

from sphinx.pycode import ModuleAnalyzer

from offbeat.config import RunConfig, RunMode
from offbeat.config.presets import Algorithm, provenance
from offbeat.config.schema import (
    FieldSpec,
    Section,
    build,
    expected,
    join,
    plain,
    section_of,
    specs,
)

Default = Callable[[FieldSpec, str], str]
"""What is used for a key, given with its dotted path, when it is left out."""


def markdown() -> str:
    """One part per section: what it is for, then each key with type, default and meaning."""
    return "\n".join(_section(RunConfig, "", _resolved_default))


def _section(
    cls: type[Section], path: str, default: Default, optional: bool = False
) -> Iterator[str]:
    title = f"`{path}`" if path else "The top level"
    yield f"{'#' * (2 + path.count('.'))} {title}\n\n{inspect.getdoc(cls)}\n"
    if optional:
        yield "Null, which is the default, leaves the section out.\n"
    for spec in specs(cls):
        if section_of(spec.hint) is None:
            yield _key(cls, spec, join(path, spec.name), default)
    for spec in specs(cls):
        below, item = section_of(spec.hint), _item_of(spec.hint)
        if below is not None:
            optional = type(None) in get_args(spec.hint)
            yield from _section(below, join(path, spec.name), default, optional)
        elif item is not None:
            yield from _section(item, f"{join(path, spec.name)}[…]", _own_default)


def _item_of(hint: Any) -> type[Section] | None:
    """The section class of the items where ``hint`` allows a list of sections."""
    for member in (hint, *get_args(hint)):
        if get_origin(member) is tuple and section_of(get_args(member)[0]) is not None:
            return section_of(get_args(member)[0])
    return None


def _key(cls: type[Section], spec: FieldSpec, path: str, default: Default) -> str:
    kind = expected(spec.hint).replace("<", "\\<")  # Markdown would see a tag
    meaning = "\n\n".join([_attribute_doc(cls, spec.name), *_choices(spec.hint)])
    used = "none, it is required" if spec.required else default(spec, path)
    return f":::{{confval}} {path}\n:type: {kind}\n:default: {used}\n\n{meaning}\n:::\n"


def _own_default(spec: FieldSpec, path: str) -> str:
    return f"`{_shown(spec.default)}`"


def _resolved_default(spec: FieldSpec, path: str) -> str:
    """Where ``mode`` or ``algorithm`` decides, the value that each of them gives."""
    by_mode = {m: _value(path, m, Algorithm.GRPO) for m in RunMode}
    by_algorithm = {a: _value(path, RunMode.SYNC, a) for a in Algorithm}
    for key, values in (("mode", by_mode), ("algorithm", by_algorithm)):
        if len(set(values.values())) > 1 and path != key:
            return ", ".join(f"`{value}` with `{key}: {name}`" for name, value in values.items())
    if path == "mode":
        return f"`{RunMode.SYNC}`"
    note = provenance(path, RunMode.SYNC, Algorithm.GRPO)
    return f"`{by_mode[RunMode.SYNC]}`" + (f" ({note})" if note else "")


def _value(path: str, mode: RunMode, algorithm: Algorithm) -> str:
    return _shown(reduce(getattr, path.split("."), _config(mode, algorithm)))


def _shown(value: object) -> str:
    """``value`` on one line of YAML."""
    content = plain(value)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@cache
def _config(mode: RunMode, algorithm: Algorithm) -> RunConfig:
    return build(RunConfig, {**_least(RunConfig), "mode": mode, "algorithm": algorithm})


def _least(cls: type[Section]) -> dict[str, object]:
    """Every section, also those that may be left out, and a value for what must be given."""
    below = {spec.name: section_of(spec.hint) for spec in specs(cls)}
    sections = {name: _least(section) for name, section in below.items() if section is not None}
    required = {s.name: "module:name" for s in specs(cls) if s.required and s.name not in sections}
    return {**required, **sections}


def _attribute_doc(cls: type[Section], name: str) -> str:
    """The docstring below a field; the class may have inherited the field."""
    for owner in cls.__mro__:
        docs = ModuleAnalyzer.for_module(owner.__module__).find_attr_docs()
        if (owner.__name__, name) in docs:
            return "\n".join(docs[owner.__name__, name]).strip()
    raise LookupError(f"{cls.__name__}.{name} has no docstring")


def _choices(hint: Any) -> Iterator[str]:
    """What the values of an enumeration mean."""
    for member in get_args(hint) or (hint,):
        if isinstance(member, type) and issubclass(member, StrEnum):
            yield inspect.getdoc(member) or ""
