"""offbeat: reinforcement learning for language models, on the beat or off it.

The public names are resolved on first use (PEP 562), so ``import offbeat`` loads neither torch nor aiohttp.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AsyncRewardWrapper": "offbeat.rollout.reward",
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

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
