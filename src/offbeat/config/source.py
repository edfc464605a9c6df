"""YAML in and out: reading with overrides and interpolation, finding a key's line, writing.

The only module of the configuration that imports OmegaConf and PyYAML; ``loading`` imports it on
first use, because both take longer to import than the rest of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offbeat.config.schema import join
from offbeat.errors import ConfigError

_KEY = re.compile(r"[^\s.=\[\]]+(\.[^\s.=\[\]]+)*")


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
    base = _parse(text, path)
    parsed = _parse_overrides(overrides)
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
        raise ConfigError(f"{path}: cannot interpolate: {_first_line(exc)}") from exc
    assert isinstance(data, dict)
    return Source(
        mapping=data,
        file=str(path),
        lines=dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), "")),
        overrides={text.partition("=")[0]: text for text in parsed},
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}") from exc


def _parse(text: str, path: Path) -> DictConfig:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{path}: the configuration file is empty")
        if not isinstance(root, yaml.MappingNode):
            kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
            raise ConfigError(f"{path}: a {kind} at top level; expected a mapping of sections")
        return OmegaConf.create(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        reason = getattr(exc, "problem", None) or _first_line(exc)
        raise ConfigError(f"{where}: not valid YAML: {reason}") from exc
    except OmegaConfBaseException as exc:
        raise ConfigError(f"{path}: not a configuration: {_first_line(exc)}") from exc


def _parse_overrides(overrides: Sequence[str]) -> dict[str, DictConfig]:
    """Each override as a one-key configuration, by its text."""
    parsed: dict[str, DictConfig] = {}
    seen: dict[str, str] = {}
    for text in overrides:
        key, sep, _ = text.partition("=")
        if not sep or not _KEY.fullmatch(key):
            raise ConfigError(f"override {text!r} is not of the form key.path=value")
        if key in seen:
            raise ConfigError(f"override {text!r}: {key} is already set by override {seen[key]!r}")
        seen[key] = text
        try:
            parsed[text] = OmegaConf.from_dotlist([text])
        except (yaml.YAMLError, OmegaConfBaseException) as exc:
            raise ConfigError(f"override {text!r}: the value is not valid YAML") from exc
    return parsed


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
