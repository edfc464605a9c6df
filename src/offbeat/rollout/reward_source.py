"""Where a reward function comes from, and how its process gets it.

Owns the three kinds of source: a Python callable, "module:attr", and a URL. Knows neither processes
nor answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import cloudpickle

from offbeat.config import RewardConfig
from offbeat.errors import ConfigError, boundary
from offbeat.rollout.reward_wire import Load, LoadNamed, LoadPickled

KEY = "rollout.reward_fn"

HTTP_REWARD = "offbeat.rollout.reward_http:HttpReward"
HTTP_GROUP_REWARD = "offbeat.rollout.reward_http:HttpGroupReward"

RewardSource: TypeAlias = Callable[..., object] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One reward function among those of a run.

    ``name`` is its name among the logged parts; empty for the only function of a run, whose value
    is the reward itself. ``args`` are keyword arguments that every call gets, or with which a class
    is made. ``key`` is its place in the configuration, for errors.
    """

    source: RewardSource
    name: str = ""
    weight: float = 1.0
    args: Mapping[str, object] = field(default_factory=dict)
    key: str = KEY

    @property
    def label(self) -> str:
        """What messages call the function."""
        if self.name:
            return self.name
        return self.source if isinstance(self.source, str) else described(self.source)


def configured(reward_fn: str | Sequence[RewardConfig]) -> str | list[RewardPart]:
    """What ``rollout.reward_fn`` names: one function, or several by weight."""
    if isinstance(reward_fn, str):
        return reward_fn
    return [
        RewardPart(
            source=reward.fn,
            name=reward.name or "",
            weight=reward.weight,
            args=reward.args,
            key=f"{KEY}[{index}]",
        )
        for index, reward in enumerate(reward_fn)
    ]


def described(source: Callable[..., object]) -> str:
    """Name and place of a Python callable, for people."""
    code = getattr(source, "__code__", None)
    name = getattr(source, "__qualname__", type(source).__qualname__)
    return name if code is None else f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def is_url(source: RewardSource) -> bool:
    """Whether ``source`` is the address of an HTTP reward."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def load_order(
    source: RewardSource,
    search_dir: Path | None = None,
    args: Mapping[str, object] | None = None,
    key: str = KEY,
) -> Load:
    """How a child gets ``source``: by its "module:attr" name, or pickled by value.

    Raises:
        ConfigError: a function that cannot be pickled.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    if isinstance(source, str):
        spec, given = _named(source, dict(args or {}), key)
        return LoadNamed(
            spec=spec,
            search_dir=str(search_dir) if search_dir is not None else None,
            sys_path=path,
            args=cloudpickle.dumps(given),
            key=key,
        )
    hint = 'move it to a module and name it as "module:attr"'
    with boundary(ConfigError, f"{key}: {source!r} cannot be sent to its process ({hint})"):
        return LoadPickled(
            pickled=cloudpickle.dumps(source),
            sys_path=path,
            args=cloudpickle.dumps(dict(args or {})),
            key=key,
        )


def _named(source: str, args: dict[str, object], key: str) -> tuple[str, dict[str, object]]:
    """The "module:attr" of ``source`` and the arguments it is made with."""
    if not is_url(source):
        return source, args
    batch = args.pop("batch", False)
    if not isinstance(batch, bool) or args:
        raise ConfigError(
            f"{key}.args: {source} takes one argument, batch: true or false; got "
            f"{', '.join([*args, f'batch: {batch!r}'])}"
        )
    return HTTP_GROUP_REWARD if batch else HTTP_REWARD, {"url": source}
