"""Reward functions by name: what ``rollout.reward_fn`` may be, alone or in a list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from offbeat.config.schema import Matching, Problem, Section, store

RewardSpec = Annotated[
    str,
    Matching(
        pattern=r"[\w.]+:[\w.]+|https?://\S*",
        meaning='a string of the form "module:attribute" or a URL (http://host:port/path)',
    ),
]
PartName = Annotated[
    str, Matching(pattern=r"[\w.-]+", meaning="a name of letters, digits, '_', '.' and '-'")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(Section):
    """One of several reward functions: the reward is the sum of their values by weight."""

    fn: RewardSpec
    """``module:function`` or URL, as ``rollout.reward_fn`` by itself."""

    weight: float = 1.0
    """Factor in the sum; 0: the value is logged only."""

    name: PartName | None = None
    """Its name among the metrics, ``reward_part/NAME``; null: the last word of ``fn``."""

    args: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of every call, or of the making of a class; of a URL: ``batch``."""

    def _settle(self) -> None:
        if self.name is None:
            store(self, "name", _last_word(self.fn))

    def _contradictions(self) -> Iterator[Problem]:
        yield from bad_url(self.fn, "fn")


def _last_word(spec: str) -> str:
    """``f`` of ``module:f``; the last part of a URL's path, else its host."""
    words = re.findall(r"[\w-]+", spec.partition("?")[0])
    return words[-1] if words else "reward"


def bad_url(spec: str, path: str) -> Iterator[Problem]:
    """What is wrong with ``spec`` where it is a URL."""
    if not spec.startswith(("http://", "https://")):
        return
    try:
        parts = urlsplit(spec)
        reason = "" if parts.hostname and parts.port != 0 else "it has no host, or port 0"
    except ValueError as exc:
        reason = str(exc)
    if reason:
        yield Problem(
            path=path, text=f"{spec!r} is not a URL such as http://host:8000/score: {reason}"
        )
