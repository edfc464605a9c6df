"""Configuration: one frozen dataclass per component; ``load`` gives their tree, ``RunConfig``."""

from __future__ import annotations

from offbeat.config.actor import (
    ActorConfig,
    BehaveImpWeightMode,
    LossAggregation,
    LRSchedule,
    NormConfig,
    NormLevel,
    OptimizerConfig,
    PPOActorConfig,
    ProxLogpMethod,
)
from offbeat.config.dataset import ChatTemplate, DatasetConfig, OverlongPrompt
from offbeat.config.evaluator import EvaluatorConfig
from offbeat.config.gateway import GatewayConfig
from offbeat.config.generation import GenerationConfig
from offbeat.config.generator import GeneratorBackend, GeneratorConfig, KVOnUpdate
from offbeat.config.loading import from_mapping, load, to_mapping, to_yaml
from offbeat.config.model import DType, ModelConfig
from offbeat.config.overview import Entry, describe
from offbeat.config.presets import Algorithm, RunMode
from offbeat.config.recover import RecoverConfig, RecoverMode
from offbeat.config.reward import RewardConfig
from offbeat.config.rollout import Lookahead, RolloutConfig, RolloutPolicy
from offbeat.config.run import RunConfig
from offbeat.config.saver import AsyncMode, MegatronEngineConfig, OnError, SaverConfig
from offbeat.config.scheduler import SchedulerConfig, SchedulerType
from offbeat.config.stats_logger import StatsLoggerConfig

__all__ = [
    "ActorConfig",
    "Algorithm",
    "AsyncMode",
    "BehaveImpWeightMode",
    "ChatTemplate",
    "DType",
    "DatasetConfig",
    "Entry",
    "EvaluatorConfig",
    "GatewayConfig",
    "GenerationConfig",
    "GeneratorBackend",
    "GeneratorConfig",
    "KVOnUpdate",
    "LRSchedule",
    "Lookahead",
    "LossAggregation",
    "MegatronEngineConfig",
    "ModelConfig",
    "NormConfig",
    "NormLevel",
    "OnError",
    "OptimizerConfig",
    "OverlongPrompt",
    "PPOActorConfig",
    "ProxLogpMethod",
    "RecoverConfig",
    "RecoverMode",
    "RewardConfig",
    "RolloutConfig",
    "RolloutPolicy",
    "RunConfig",
    "RunMode",
    "SaverConfig",
    "SchedulerConfig",
    "SchedulerType",
    "StatsLoggerConfig",
    "describe",
    "from_mapping",
    "load",
    "to_mapping",
    "to_yaml",
]
