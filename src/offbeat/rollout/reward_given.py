"""What a run's configuration records for a reward function that was a Python object.

Owns the placeholder: it can be written to YAML and read again, but not trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from offbeat.config import RolloutConfig, RunConfig
from offbeat.errors import ConfigError
from offbeat.rollout.reward_source import described

SPEC = "offbeat.rollout.reward_given:GivenInPython"


class GivenInPython:
    """Stands for a function that only the program which gave it has.

    Args:
        function: what it was, for people.
    """

    def __init__(self, function: str) -> None:
        raise ConfigError(
            f"rollout.reward_fn: this run was given its reward function in Python, {function}, "
            "which a configuration file cannot hold; pass it again with "
            "PPOTrainer.from_config(cfg, reward_fn=...), or move it to a module and set "
            "rollout.reward_fn=module:function"
        )


def record(
    cfg: RunConfig | Mapping[str, object], function: Callable[..., object]
) -> RunConfig | Mapping[str, object]:
    """``cfg`` with the placeholder of ``function`` as its ``rollout.reward_fn``."""
    placeholder = [{"fn": SPEC, "name": "given", "args": {"function": described(function)}}]
    if isinstance(cfg, RunConfig):
        return replace(cfg, rollout=_placed(cfg.rollout, placeholder))
    rollout = cfg.get("rollout")
    if isinstance(rollout, RolloutConfig):
        return {**cfg, "rollout": _placed(rollout, placeholder)}
    if rollout is None or isinstance(rollout, Mapping):
        return {**cfg, "rollout": {**(rollout or {}), "reward_fn": placeholder}}
    return cfg  # what is wrong with it is the configuration's to say


def _placed(rollout: RolloutConfig, placeholder: object) -> RolloutConfig:
    return replace(rollout, reward_fn=placeholder)  # type: ignore[arg-type]  # a section converts
