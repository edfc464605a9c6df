"""What ``mode``, ``algorithm`` and ``gconfig`` decide for keys that were not given.

Owns the two preset tables and the words for where a value came from. A preset never touches a key
that was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from offbeat.config.actor import LossAggregation, NormConfig, NormLevel
from offbeat.config.generation import GenerationConfig
from offbeat.config.saver import AsyncMode


class RunMode(StrEnum):
    """sync: generate, then train; async: both at once, a bounded number of versions apart."""

    SYNC = "sync"
    ASYNC = "async"


class Algorithm(StrEnum):
    """How rewards become advantages, and over what the loss is averaged."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    LITE_PPO = "lite_ppo"


ASYNC_MAX_STALENESS: Final = 4

MODE_PRESETS: Final[Mapping[RunMode, Mapping[str, Mapping[str, object]]]] = {
    RunMode.SYNC: {
        "rollout": {"max_staleness": 0},
        "actor": {"use_decoupled_loss": False},
        "saver": {"mode": AsyncMode.SYNC},
        "megatron": {"async_save": False},
    },
    RunMode.ASYNC: {
        "rollout": {"max_staleness": ASYNC_MAX_STALENESS},
        "actor": {"use_decoupled_loss": True},
        "saver": {"mode": AsyncMode.ASYNC},
        "megatron": {"async_save": True},
    },
}
"""Section to key to value, by ``mode``."""

ALGORITHM_PRESETS: Final[Mapping[Algorithm, Mapping[str, object]]] = {
    Algorithm.GRPO: {
        "loss_aggregation": LossAggregation.SEQUENCE_MEAN,
        "reward_norm": {"mean_level": NormLevel.GROUP, "std_level": NormLevel.GROUP},
    },
    Algorithm.DR_GRPO: {
        "loss_aggregation": LossAggregation.CONSTANT,
        "reward_norm": {"mean_level": NormLevel.GROUP, "std_level": NormLevel.NONE},
    },
    Algorithm.RLOO: {
        "loss_aggregation": LossAggregation.TOKEN_MEAN,
        "reward_norm": {
            "mean_level": NormLevel.GROUP,
            "mean_leave_one_out": True,
            "std_level": NormLevel.NONE,
        },
    },
    Algorithm.LITE_PPO: {
        "loss_aggregation": LossAggregation.TOKEN_MEAN,
        "reward_norm": {"mean_level": NormLevel.GROUP, "std_level": NormLevel.BATCH},
    },
}
"""Key of ``actor`` to value, by ``algorithm``.

Sources: arXiv 2402.03300 (grpo), 2503.20783 (dr_grpo), 2402.14740 (rloo), 2508.08221 (lite_ppo).
"""

EVAL_SAMPLING: Final[Mapping[str, object]] = {"n_samples": 1, "temperature": 0.0}
EVAL_INHERITED: Final = ("max_new_tokens", "stop", "stop_token_ids", "ignore_eos")

_BY_MODE: Final = frozenset(
    f"{section}.{key}" for section, keys in MODE_PRESETS[RunMode.SYNC].items() for key in keys
)
_BY_DECOUPLING: Final = frozenset(
    {
        "actor.prox_logp_method",
        "actor.behave_imp_weight_mode",
        "actor.behave_imp_weight_cap",
    }
)


def actor_preset(mode: RunMode, algorithm: Algorithm, reward_norm: NormConfig) -> dict[str, object]:
    """What ``actor`` gets; a mean that was switched off takes its leave-one-out along."""
    values: dict[str, object] = {**MODE_PRESETS[mode]["actor"], **ALGORITHM_PRESETS[algorithm]}
    norm = values["reward_norm"]
    mean_off = "mean_level" in reward_norm.given and reward_norm.mean_level is NormLevel.NONE
    if mean_off and isinstance(norm, Mapping):
        values["reward_norm"] = {k: v for k, v in norm.items() if k != "mean_leave_one_out"}
    return values


def evaluation_preset(gconfig: GenerationConfig) -> dict[str, object]:
    """What ``eval_gconfig`` gets: greedy, one sample, lengths and stops of training."""
    return {**EVAL_SAMPLING, **{name: getattr(gconfig, name) for name in EVAL_INHERITED}}


def provenance(path: str, mode: RunMode, algorithm: Algorithm) -> str:
    """Where the value of a key that was not given came from; empty for a plain default."""
    section, _, key = path.rpartition(".")
    norm = ALGORITHM_PRESETS[algorithm]["reward_norm"]
    if path in _BY_MODE:
        return f"preset of mode {mode}"
    of_norm = section == "actor.reward_norm" and isinstance(norm, Mapping) and key in norm
    if path == "actor.loss_aggregation" or of_norm:
        return f"preset of algorithm {algorithm}"
    if path in _BY_DECOUPLING or path == "mode":
        return "follows actor.use_decoupled_loss"
    if section == "eval_gconfig":
        return "as gconfig" if key in EVAL_INHERITED else "default of evaluation"
    if path == "valid_dataset.shuffle":
        return "evaluation reads rows in order"
    return ""
