"""Which trackers there are: the literal dictionary of them, what each needs, and how it is opened.

Opening happens in the tracker's own process; asking what is needed imports nothing of a tracker.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.config import RunConfig
from offbeat.config.stats_logger import StatsLoggerConfig
from offbeat.errors import ConfigError
from offbeat.protocols import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """One tracker.

    ``package`` is what it imports, installed by the extra of its name. ``open`` begins its record
    of a run; it gets the run's configuration, in which the tracker's section is not null, and the
    run's folder. ``environment`` is set for its process where the user has not.
    """

    package: str
    open: Callable[[RunConfig, Path], Tracker]
    environment: Mapping[str, str] = field(default_factory=dict)


def _tensorboard(cfg: RunConfig, run_dir: Path) -> Tracker:
    from offbeat.observe.trackers.tensorboard import TensorBoardTracker

    assert cfg.stats_logger.tensorboard is not None
    return TensorBoardTracker(cfg, cfg.stats_logger.tensorboard, run_dir)


def _wandb(cfg: RunConfig, run_dir: Path) -> Tracker:
    from offbeat.observe.trackers.wandb import WandbTracker

    assert cfg.stats_logger.wandb is not None
    return WandbTracker(cfg, cfg.stats_logger.wandb, run_dir)


def _mlflow(cfg: RunConfig, run_dir: Path) -> Tracker:
    from offbeat.observe.trackers.mlflow import MlflowTracker

    assert cfg.stats_logger.mlflow is not None
    return MlflowTracker(cfg, cfg.stats_logger.mlflow, run_dir)


def _trackio(cfg: RunConfig, run_dir: Path) -> Tracker:
    from offbeat.observe.trackers.trackio import TrackioTracker

    assert cfg.stats_logger.trackio is not None
    return TrackioTracker(cfg, cfg.stats_logger.trackio, run_dir)


_MLFLOW_ENVIRONMENT = {
    # It asks for consent to folders of files; without a database driver there is nothing else.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(package="tensorboard", open=_tensorboard),
    "wandb": TrackerKind(package="wandb", open=_wandb),
    "mlflow": TrackerKind(package="mlflow", open=_mlflow, environment=_MLFLOW_ENVIRONMENT),
    "trackio": TrackerKind(package="trackio", open=_trackio),
}
"""Key below ``stats_logger`` to the tracker that it configures."""


def check_installed(section: StatsLoggerConfig) -> None:
    """Raise ConfigError for the first tracker of ``section`` whose package is not installed."""
    for name in section.trackers:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"stats_logger.{name}: needs the {package} package, which is not installed: "
                f"pip install {package} (offbeat's extra {name})"
            )
