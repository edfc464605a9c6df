"""Weights & Biases, on its server or as files for ``wandb sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from offbeat.config import RunConfig, to_mapping
from offbeat.config.stats_logger import WandbConfig
from offbeat.observe.summary import RunStatus

INIT_SECONDS = 30.0
"""How long to try to reach the server."""


class WandbTracker:
    """A ``Tracker``. The end status is in the run's summary as ``status`` and ``error``."""

    def __init__(self, cfg: RunConfig, section: WandbConfig, run_dir: Path) -> None:
        folder = os.environ.get("WANDB_DIR", str(run_dir))
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(variable, str(run_dir / "wandb"))
        self._run = wandb.init(
            project=section.project or cfg.experiment_name,
            name=section.name or run_dir.name,
            entity=section.entity,
            group=section.group,
            tags=section.tags,
            config=to_mapping(cfg),
            dir=folder,
            mode=section.mode.value,
            # What the tracker's process prints is in its log already.
            settings=wandb.Settings(console="off", init_timeout=INIT_SECONDS),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str, error: str | None) -> None:
        """See ``Tracker``."""
        self._run.summary["status"] = status
        if error is not None:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if status == RunStatus.COMPLETED else 1)
