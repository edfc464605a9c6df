"""A run's configuration as trackers take it: dotted keys and plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from offbeat.config import RunConfig, to_mapping

Value: TypeAlias = bool | int | float | str


def flat(cfg: RunConfig) -> dict[str, Value]:
    """Every key of ``cfg`` with its resolved value; lists as JSON, null as ``"null"``.

    Example:
        >>> flat(cfg)["actor.optimizer.lr"]
        0.003
    """
    return dict(_leaves(to_mapping(cfg), ""))


def _leaves(mapping: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Value]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value)
