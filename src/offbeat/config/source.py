"""YAML in and out: reading with overrides and interpolation, finding a key's line, writing.

The only module of the configuration that imports OmegaConf and PyYAML; ``loading`` imports it on
first use, because both take longer to import than the rest of the package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from offbeat.config.schema import join
from offbeat.errors import ConfigError

_KEY = re.compile(r"[^\s.=\[\]]+(\.[^\s.=\[\]]+)*")
_WAYS_OUT = (
    ("\\t", "indent with spaces, not with tabs"),
    ("could not determine a constructor", "a configuration holds plain data only, without tags"),
    ("found another document", "keep what stands before the line ---, or give each its own file"),
    ("expected <block end>", "keys of one section start in one column"),
    ("mapping values are not allowed", "quote a text that has a colon followed by a space"),
    ("undefined alias", "quote a text that starts with *"),
)
"""Part of what PyYAML says, and what to do then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What was read: plain data, and where each key stands."""

    mapping: Mapping[object, object]
    file: str
    lines: Mapping[str, int]
    overrides: Mapping[str, str]

    def locate(self, path: str) -> str:
        """The override or the line that wrote ``path``; empty when neither did."""
        for key, text in self.overrides.items():
            if path == key or path.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{path}."):
                return f"override {text!r}"
        line = self.lines.get(path)
        return f"{self.file}:{line}" if line is not None else ""


def read(path: Path, overrides: Sequence[str]) -> Source:
    """Read ``path``, merge ``overrides`` over it and resolve interpolations.

    Raises:
        ConfigError: file missing or not YAML, malformed override, interpolation that fails.
    """
    text = _text(path)
    try:
        base = _parse(text, path)
        lines = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), ""))
    except RecursionError as exc:
        raise ConfigError(
            f"{path}: nested without end or by the hundred; an alias (*name) must not stand within "
            "what it names (&name), and brackets must be closed"
        ) from exc
    return _merged(base, str(path), lines, overrides)


def overridden(mapping: Mapping[str, object], origin: str, overrides: Sequence[str]) -> Source:
    """Merge ``overrides`` over plain data that messages call ``origin``. Raises as ``read``."""
    return _merged(OmegaConf.create(_escape(mapping)), origin, {}, overrides)


def _merged(
    base: DictConfig, origin: str, lines: Mapping[str, int], overrides: Sequence[str]
) -> Source:
    parsed = _parse_overrides(overrides)
    written = {text.partition("=")[0]: text for text in parsed}
    source = Source(mapping={}, file=origin, lines=lines, overrides=written)
    merged = base
    for override, value in parsed.items():
        try:
            merged = OmegaConf.merge(merged, value)
        except (OmegaConfBaseException, TypeError, ValueError) as exc:
            reason = "does not fit what the file has there"
            raise ConfigError(f"override {override!r} {reason}: {_first_line(exc)}") from exc
    try:
        data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        raise ConfigError(_unresolved(exc, source)) from exc
    assert isinstance(data, dict)
    return replace(source, mapping=data)


def _unresolved(exc: OmegaConfBaseException, source: Source) -> str:
    """What to say of a value with ``${...}`` or ``???`` in it that cannot be resolved."""
    key = str(exc.full_key or "")
    place = source.locate(key) or source.file
    if isinstance(exc, MissingMandatoryValue):
        return f"{place}: {key}: ??? stands for a value that must be given: {key}=VALUE"
    return (
        f"{place}: {key}: cannot interpolate: {_first_line(exc)}; write ${{section.key}} or "
        "${oc.env:NAME,DEFAULT}, and \\${ for the text itself"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = f"{exc.strerror}{_others(path)}" if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}") from exc


def _others(path: Path) -> str:
    """The YAML files that could have been meant, those with a near name if there are any."""
    folder = path if path.is_dir() else path.parent
    files = sorted(file for kind in ("*.yaml", "*.yml") for file in folder.glob(kind))
    near = difflib.get_close_matches(path.name, [file.name for file in files], n=5)
    found = [str(folder / name) for name in near] or [str(file) for file in files[:5]]
    return f"; there is {', '.join(found)}" if found else f"; {folder.absolute()} has no YAML file"


def _parse(text: str, path: Path) -> DictConfig:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{path}: the configuration file is empty")
        if not isinstance(root, yaml.MappingNode):
            kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
            raise ConfigError(f"{path}: a {kind} at top level; expected a mapping of sections")
        _refuse_duplicates(root, path)
    except yaml.YAMLError as exc:
        raise ConfigError(_not_yaml(exc, path)) from exc
    try:
        return OmegaConf.create(text)
    except yaml.YAMLError as exc:
        raise ConfigError(_not_yaml(exc, path)) from exc
    except (OmegaConfBaseException, ValueError) as exc:
        raise ConfigError(f"{path}: not a configuration: {_first_line(exc)}") from exc


def _not_yaml(exc: yaml.YAMLError, path: Path) -> str:
    mark = getattr(exc, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    reason = getattr(exc, "problem", None) or _first_line(exc)
    way_out = next((f"; {hint}" for said, hint in _WAYS_OUT if said in reason), "")
    return f"{where}: not valid YAML: {reason}{way_out}"


def _refuse_duplicates(root: yaml.Node, path: Path) -> None:
    """Of two equal keys the later one would win, without a word."""
    seen: dict[str, int] = {}
    for key, line in _lines(root, ""):
        if key in seen:
            raise ConfigError(f"{path}:{line}: {key} is already set in line {seen[key]}; keep one")
        seen[key] = line


def _parse_overrides(overrides: Sequence[str]) -> dict[str, DictConfig]:
    """Each override as a one-key configuration, by its text."""
    parsed: dict[str, DictConfig] = {}
    seen: dict[str, str] = {}
    for text in overrides:
        key, sep, _ = text.partition("=")
        if not sep or not _KEY.fullmatch(key):
            raise ConfigError(
                f"override {text!r} is not of the form key.path=value{_form_hint(text)}"
            )
        if key in seen:
            raise ConfigError(f"override {text!r}: {key} is already set by override {seen[key]!r}")
        seen[key] = text
        try:
            parsed[text] = OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as exc:
            raise ConfigError(
                f"override {text!r}: the value is not valid YAML; close brackets and quotes, and "
                f"quote a text that YAML would read otherwise: '{key}=\"TEXT\"'"
            ) from exc
    return parsed


def _form_hint(text: str) -> str:
    key, sep, value = (part.strip() for part in text.partition("="))
    if re.search(r"\[\d*\]$", key):
        return f"; a list is set as a whole: '{key.partition('[')[0]}=[{value}]'"
    return f"; write '{key}={value}', without spaces" if sep and _KEY.fullmatch(key) else ""


def _lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Dotted key and line (from 1) of everything below ``node``."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = join(path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{path}[{i}]", item.start_mark.line + 1
            yield from _lines(item, f"{path}[{i}]")


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


def write(data: Mapping[str, object]) -> str:
    """``data`` as YAML that ``read`` gives back unchanged; interpolation marks are escaped."""
    escaped = _escape(data)
    text: str = yaml.safe_dump(escaped, sort_keys=False, allow_unicode=True, width=100)
    return text


def _escape(value: object) -> object:
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m.group(1) * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value
