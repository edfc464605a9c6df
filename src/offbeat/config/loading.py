"""The way in and out: file, overrides or mapping to ``RunConfig``, and back. No side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.config.run import RunConfig
from offbeat.config.schema import (
    FieldErrors,
    Problem,
    Section,
    build,
    paths,
    plain,
    section_of,
    specs,
    store,
)
from offbeat.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, merge ``key.path=value`` overrides over it and build the configuration.

    Args:
        path: the file; its folder becomes ``config_dir`` unless it names another.
        overrides: values are YAML; a mapping is merged into what is there, a list replaces it.

    Raises:
        ConfigError: one line for each problem: dotted key, value, allowed set, where it stands.
    """
    from offbeat.config import source

    path = Path(path)
    read = source.read(path, overrides)
    return _build(read.mapping, str(path), path.resolve().parent, read.locate)


def from_mapping(
    mapping: Mapping[str, object],
    origin: str = "the given mapping",
    config_dir: Path | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Build the configuration from plain data; sections may also be configuration objects.

    Args:
        mapping: the tree of keys; no interpolation.
        origin: what error messages call it.
        config_dir: folder where ``module:attribute`` is looked up first.
        overrides: as ``load``; then ``mapping`` holds no configuration objects.

    Raises:
        ConfigError: as ``load``.
    """
    if not overrides:
        return _build(mapping, origin, config_dir, lambda path: "")
    from offbeat.config import source

    read = source.overridden(mapping, origin, overrides)
    return _build(read.mapping, origin, config_dir, read.locate)


def to_mapping(section: Section) -> dict[str, object]:
    """Every key of a section as plain data; ``from_mapping`` of it gives an equal object."""
    data = plain(section)
    assert isinstance(data, dict)
    return data


def to_yaml(cfg: RunConfig) -> str:
    """Every key with its resolved value; loading it gives an equal object."""
    from offbeat.config import source

    return source.write(to_mapping(cfg))


def _build(
    mapping: Mapping[Any, object],
    origin: str,
    config_dir: Path | None,
    locate: Callable[[str], str],
) -> RunConfig:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{origin}: a {type(mapping).__name__}; expected a mapping of sections")
    # "saver:" with nothing below it is a section left out.
    empty = {spec.name for spec in specs(RunConfig) if section_of(spec.hint)}
    try:
        cfg = build(
            RunConfig, {k: v for k, v in mapping.items() if v is not None or k not in empty}
        )
    except FieldErrors as exc:
        raise ConfigError(_report(exc.problems, origin, locate)) from None
    if cfg.config_dir is None and config_dir is not None:
        store(cfg, "config_dir", str(config_dir))
    return cfg


def _report(problems: Sequence[Problem], origin: str, locate: Callable[[str], str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{origin}: {count} in the configuration"]
    for problem in problems:
        where = locate(problem.path)
        lines.append(f"  {_with_hint(problem)}{f' ({where})' if where else ''}")
    return "\n".join(lines)


def _with_hint(problem: Problem) -> Problem:
    """A key that is unknown where it stands may exist elsewhere in the tree."""
    homes = [path for path in paths(RunConfig) if path.rpartition(".")[2] == problem.stray]
    if not problem.stray or not homes:
        return problem
    return replace(problem, text=f"unknown key here; did you mean {' or '.join(homes)}?")
