"""How a plain mapping becomes a frozen section, and what is said when it cannot.

Owns type conversion, ranges, unknown keys, and the difference between a value somebody gave and one
that was filled in. Knows no section by name, no file and no YAML.

A section is a frozen dataclass that derives from ``Section``. Its fields may be given as plain
values (a string for an enum, a list for a tuple, a mapping for a nested section);
``Section.__post_init__`` converts them and raises one ``FieldErrors`` with every problem found.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from offbeat.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong: the dotted key where it was found, and what value is not allowed there.

    ``stray`` is the key itself when it is unknown and nothing near it exists in its section.
    """

    path: str
    text: str
    stray: str = ""

    def under(self, prefix: str) -> Problem:
        """The same problem seen from the section that contains this one."""
        return replace(self, path=join(prefix, self.path))

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


class FieldErrors(ConfigError):
    """A section cannot be built; one problem per mistake, paths relative to the section."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> FieldErrors:
        """The error that reports ``problems``, one per line."""
        return cls("\n".join(map(str, problems)), tuple(problems))


def join(prefix: str, key: str) -> str:
    """``prefix.key``, without the dot where one side is empty or ``key`` is a list index."""
    glue = "." if prefix and key and not key.startswith("[") else ""
    return f"{prefix}{glue}{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number; None is unbounded."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def admits(self, value: float) -> bool:
        """Whether ``value`` lies within the bounds."""
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        return " and ".join(f"{op} {bound:g}" for op, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """A string that matches ``pattern`` as a whole; ``meaning`` says in words what that is."""

    pattern: str
    meaning: str
    max_bytes: int | None = None

    def admits(self, value: str) -> bool:
        """Whether ``value`` is such a string, and not longer than ``max_bytes`` in UTF-8."""
        size = len(value.encode(errors="surrogateescape"))
        fits = self.max_bytes is None or size <= self.max_bytes
        return fits and re.fullmatch(self.pattern, value) is not None


MAX_INT = 2**31 - 1
"""Largest integer of any key: what counts beyond it is a slip, and breaks in libraries later."""

PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]
Text = Annotated[str, Matching(pattern=r"(?s).*\S.*", meaning="a string that is not empty")]
FolderName = Annotated[
    str,
    Matching(
        pattern=r"(?!\.{1,2}$)[^/\0]+",
        meaning="a folder name (a string without /, of at most 200 bytes)",
        max_bytes=200,
    ),
]
PluginSpec = Annotated[
    str, Matching(pattern=r"[\w.]+:[\w.]+", meaning='a string of the form "module:attribute"')
]


@dataclass(frozen=True, slots=True)
class Unset:
    """Default of a field that a preset fills; ``standalone`` holds in a section built by itself."""

    standalone: object


def preset(standalone: object) -> Callable[[], Any]:
    """Default factory of a field that another key decides unless it is given (null: not given)."""
    return lambda: Unset(standalone)


class _Missing:
    """Marks a required key that the mapping does not have."""


_MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One configuration key of a section class."""

    name: str
    hint: Any
    default: object

    @property
    def fills(self) -> bool:
        """Whether a preset decides this field when it is not given."""
        return isinstance(self.default, Unset)

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is MISSING


def _specs(cls: type[Section]) -> tuple[FieldSpec, ...]:
    """The keys of a section class in order; fields with metadata ``key: False`` are not keys."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        FieldSpec(name=f.name, hint=hints[f.name], default=_default(f))
        for f in fields(cls)
        if f.metadata.get("key", True)
    )


def _default(f: Field[Any]) -> object:
    return f.default if f.default_factory is MISSING else f.default_factory()


specs: Final[Callable[[Any], tuple[FieldSpec, ...]]] = cache(_specs)
"""The keys of a section class; type hints are evaluated once per class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Base of every configuration dataclass: conversion on construction, nothing else is inherited.

    ``given`` names the fields that somebody chose: preset fields that were passed, other fields
    that differ from their default. It takes no part in equality; presets leave given fields alone.
    """

    given: frozenset[str] = field(
        default=frozenset(), init=False, repr=False, compare=False, metadata={"key": False}
    )

    def __post_init__(self) -> None:
        problems = self._convert()
        if not problems:
            self._settle()
            problems = list(self._contradictions())
        if problems:
            raise FieldErrors.of(problems)

    def _convert(self) -> list[Problem]:
        problems: list[Problem] = []
        given: set[str] = set()
        for spec in specs(type(self)):
            raw: object = getattr(self, spec.name)
            if isinstance(spec.default, Unset) and (raw is None or isinstance(raw, Unset)):
                store(self, spec.name, spec.default.standalone)
                continue
            value = convert(spec.hint, raw, spec.name, problems)
            store(self, spec.name, value)
            if spec.fills or value != spec.default or (isinstance(value, Section) and value.given):
                given.add(spec.name)
        store(self, "given", frozenset(given))
        return problems

    def _settle(self) -> None:
        """Fill what follows from this section's own fields."""

    def _contradictions(self) -> Iterator[Problem]:
        """Problems between the fields of this section; runs when each field by itself is fine."""
        yield from ()


S = TypeVar("S", bound=Section)


def store(section: Section, name: str, value: object) -> None:
    """Set a field while the frozen section is still being built."""
    object.__setattr__(section, name, value)


def filled(section: S, values: Mapping[str, object]) -> S:
    """``section`` with ``values`` in those fields that were not given; ``given`` stays as it is.

    A mapping for a field that holds a section fills that section in the same way.

    Raises:
        FieldErrors: the values contradict what was given.
    """
    problems: list[Problem] = []
    kept: dict[str, object] = {name: getattr(section, name) for name in section.given}
    for name, value in values.items():
        nested = getattr(section, name)
        if isinstance(nested, Section) and isinstance(value, Mapping):
            try:
                kept[name] = filled(nested, value)
            except FieldErrors as exc:
                problems.extend(problem.under(name) for problem in exc.problems)
    if problems:
        raise FieldErrors.of(problems)
    new = type(section)(**{**values, **kept})
    store(new, "given", section.given)
    return new


def build(cls: type[S], mapping: Mapping[Any, object]) -> S:
    """Build ``cls`` from plain data.

    Args:
        cls: section class.
        mapping: key to plain value; unknown keys are errors, at every depth.

    Raises:
        FieldErrors: with every problem found, paths relative to ``cls``.
    """
    known = {spec.name: spec for spec in specs(cls)}
    problems = [_unknown(str(key), cls) for key in mapping if key not in known]
    values: dict[str, Any] = {str(k): v for k, v in mapping.items() if k in known}
    for name, spec in known.items():
        if spec.required and values.get(name) is None:
            values[name] = {} if section_of(spec.hint) else _MISSING
    try:
        section = cls(**values)
    except FieldErrors as exc:
        raise FieldErrors.of([*problems, *exc.problems]) from None
    if problems:
        raise FieldErrors.of(problems)
    return section


def paths(cls: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted keys of ``cls``, nested sections included."""
    for spec in specs(cls):
        path = join(prefix, spec.name)
        nested = section_of(spec.hint)
        yield path
        if nested is not None:
            yield from paths(nested, path)


def _unknown(key: str, cls: type[Section]) -> Problem:
    own = [spec.name for spec in specs(cls)]
    near = difflib.get_close_matches(key, own, n=3)
    if near:
        # Swapped letters are likelier than others: "modle" is model rather than mode.
        best = min(near, key=lambda name: sorted(name) != sorted(key))
        return Problem(path=key, text=f"unknown key; did you mean {best!r}?")
    return Problem(path=key, text=f"unknown key; the keys here are {', '.join(own)}", stray=key)


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the hint alone."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return get_args(hint) if is_union else (hint,)


def _optional(hint: Any) -> bool:
    return type(None) in _members(hint)


def section_of(hint: Any) -> type[Section] | None:
    """The section class that ``hint`` asks for, if it does."""
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, Section):
            return member
    return None


class _Bad(TypeError):
    """A value that is not what the hint asks for; the caller knows the path."""


def convert(hint: Any, value: object, path: str, problems: list[Problem]) -> Any:
    """``value`` as ``hint`` wants it; if it cannot be, unchanged, with an entry in ``problems``."""
    if isinstance(value, _Missing):
        problems.append(
            Problem(path=path, text=f"required, and not set; expected {expected(hint)}")
        )
        return value
    if value is None and _optional(hint):
        return None
    inner = _alternative(hint, value)
    try:
        if section_of(inner) is not None:
            return _to_section(inner, value, path, problems)
        if get_origin(inner) is tuple:
            return _to_tuple(inner, value, path, problems)
        if get_origin(inner) is Mapping:
            return _to_mapping(inner, value, path, problems)
        return _to_scalar(inner, value)
    except _Bad:
        problems.append(Problem(path=path, text=_complaint(hint, value)))
        return value


def _alternative(hint: Any, value: object) -> Any:
    """The member of a union that ``value`` is meant for: lists go to the one that is a list."""
    members = [member for member in _members(hint) if member is not type(None)]
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    lists = [member for member in members if is_list and get_origin(member) is tuple]
    return (lists or members)[0]


def _to_section(cls: type[S], value: object, path: str, problems: list[Problem]) -> S | object:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise _Bad
    try:
        return build(cls, value)
    except FieldErrors as exc:
        problems.extend(problem.under(path) for problem in exc.problems)
        return value


def _to_tuple(hint: Any, value: object, path: str, problems: list[Problem]) -> object:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _Bad
    item = get_args(hint)[0]
    return tuple(convert(item, v, f"{path}[{i}]", problems) for i, v in enumerate(value))


def _to_mapping(hint: Any, value: object, path: str, problems: list[Problem]) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _Bad
    item = get_args(hint)[1]
    return {key: convert(item, v, join(path, key), problems) for key, v in value.items()}


def _to_scalar(hint: Any, value: object) -> object:
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if base is object:
        return plain(value)
    if issubclass(base, StrEnum):
        return _to_enum(base, value)
    converted = _to_base(base, value)
    for mark in marks:
        if isinstance(mark, Range | Matching) and not mark.admits(converted):
            raise _Bad
    return converted


def _to_enum(cls: type[StrEnum], value: object) -> StrEnum:
    # YAML 1.1 reads the bare words on and off as booleans.
    text = ("on" if value else "off") if isinstance(value, bool) else value
    if not isinstance(text, str) or text not in {member.value for member in cls}:
        raise _Bad
    return cls(text)


def _to_base(base: type, value: object) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if _is_huge(value):
            raise _Bad
        if base is float:
            return float(value)
    if type(value) is not base and not (base is str and isinstance(value, str)):
        raise _Bad
    if isinstance(value, float) and not math.isfinite(value):
        raise _Bad
    return value


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > MAX_INT


def plain(value: object) -> object:
    """``value`` as YAML can hold it: sections and mappings to dict, tuples to list, enums to str.

    Raises:
        TypeError: something else is inside.
    """
    if isinstance(value, Section):
        return {spec.name: plain(getattr(value, spec.name)) for spec in specs(type(value))}
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    raise _Bad


_NOUNS: Final[dict[object, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    object: "plain data (numbers, strings, lists, mappings)",
}


def expected(hint: Any) -> str:
    """What a value of a field with this hint must be, in words."""
    members = _members(hint)
    if len(members) > 1:
        parts = [expected(m) for m in members if m is not type(None)]
        return " or ".join([*parts, "null"] if type(None) in members else parts)
    if get_origin(hint) is Annotated:
        base, mark = get_args(hint)
        return mark.meaning if isinstance(mark, Matching) else f"{_NOUNS[base]} {mark}".strip()
    if get_origin(hint) is tuple:
        return f"a list, each item {expected(get_args(hint)[0])}"
    if get_origin(hint) is Mapping or section_of(hint) is not None:
        return "a mapping"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"one of {', '.join(member.value for member in hint)}"
    return _NOUNS[hint]


def _complaint(hint: Any, value: object) -> str:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    kind = "null" if value is None else f"{shown} ({type(value).__name__})"
    largest = f"; the largest integer here is {MAX_INT}" if _is_huge(value) else ""
    return f"{kind} is not {expected(hint)}{_nearest(hint, value)}{largest}"


def _nearest(hint: Any, value: object) -> str:
    words = [
        member.value
        for cls in _members(hint)
        if isinstance(cls, type) and issubclass(cls, StrEnum)
        for member in cls
    ]
    near = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
