"""offbeat: reinforcement learning for language models, on the beat or off it.

The public names are resolved on first use (PEP 562), so ``import offbeat`` loads neither torch nor
aiohttp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.config import PPOActorConfig, RunConfig, load
    from offbeat.errors import ConfigError, OffbeatError
    from offbeat.observe.summary import Summary
    from offbeat.pipeline.run import PPOTrainer
    from offbeat.pipeline.task_runner import AsyncTaskRunner
    from offbeat.protocols import Workflow
    from offbeat.rollout.reward import AsyncRewardWrapper
    from offbeat.rollout.rlvr import RLVRWorkflow
    from offbeat.types import Completion, Invalid, Prompt, Rollout, SamplingParams, Scored, Turn

__version__ = "0.1.0"

_HOME = {
    "AsyncRewardWrapper": "offbeat.rollout.reward",
    "AsyncTaskRunner": "offbeat.pipeline.task_runner",
    "Completion": "offbeat.types",
    "ConfigError": "offbeat.errors",
    "Invalid": "offbeat.types",
    "OffbeatError": "offbeat.errors",
    "PPOActorConfig": "offbeat.config",
    "PPOTrainer": "offbeat.pipeline.run",
    "Prompt": "offbeat.types",
    "RLVRWorkflow": "offbeat.rollout.rlvr",
    "Rollout": "offbeat.types",
    "RunConfig": "offbeat.config",
    "SamplingParams": "offbeat.types",
    "Scored": "offbeat.types",
    "Summary": "offbeat.observe.summary",
    "Turn": "offbeat.types",
    "Workflow": "offbeat.protocols",
    "load": "offbeat.config",
}
"""Public name to the module that has it."""

__all__ = [
    "AsyncRewardWrapper",
    "AsyncTaskRunner",
    "Completion",
    "ConfigError",
    "Invalid",
    "OffbeatError",
    "PPOActorConfig",
    "PPOTrainer",
    "Prompt",
    "RLVRWorkflow",
    "Rollout",
    "RunConfig",
    "SamplingParams",
    "Scored",
    "Summary",
    "Turn",
    "Workflow",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
