"""Where metrics are shown, beside the files of the run folder.

A tracker that is null is not used. What a tracker writes on this machine lies below the run's
folder unless a key or the tracker's own environment variable says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.schema import Section, Text


class WandbMode(StrEnum):
    """online: to the server; offline: to files that ``wandb sync`` uploads; disabled: not used."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardConfig(Section):
    """Event files for TensorBoard; needs ``offbeat[tensorboard]``."""

    enabled: bool = True
    """Whether to write them."""

    path: Text | None = None
    """Folder that gets one folder per run; null: ``tensorboard`` in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig(Section):
    """Weights & Biases; needs ``offbeat[wandb]``."""

    mode: WandbMode = WandbMode.OFFLINE
    """Where the run goes; online needs an API key (``wandb login``)."""

    project: Text | None = None
    """Project; null: ``experiment_name``."""

    name: Text | None = None
    """Name of the run; null: ``trial_name``."""

    entity: Text | None = None
    """User or team; null: the default one of the API key."""

    group: Text | None = None
    """Group of runs; null: none."""

    tags: tuple[Text, ...] = ()
    """Tags of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig(Section):
    """MLflow; needs ``offbeat[mlflow]``."""

    enabled: bool = True
    """Whether to log to it."""

    tracking_uri: Text | None = None
    """Server or store; null: ``MLFLOW_TRACKING_URI``, else a file store in the run's folder."""

    experiment: Text | None = None
    """Experiment, made if missing; null: ``experiment_name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioConfig(Section):
    """Trackio; needs ``offbeat[trackio]``."""

    enabled: bool = True
    """Whether to log to it."""

    project: Text | None = None
    """Project; null: ``experiment_name``."""

    name: Text | None = None
    """Name of the run; null: ``trial_name``."""

    path: Text | None = None
    """Folder of the database; null: ``TRACKIO_DIR``, else ``trackio`` in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsLoggerConfig(Section):
    """Sinks of the run's metrics."""

    console: bool = True
    """One line per step on the console."""

    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    trackio: TrackioConfig | None = None

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that are used."""
        switched = (("tensorboard", self.tensorboard), ("mlflow", self.mlflow))
        used = [name for name, section in switched if section is not None and section.enabled]
        if self.wandb is not None and self.wandb.mode is not WandbMode.DISABLED:
            used.append("wandb")
        if self.trackio is not None and self.trackio.enabled:
            used.append("trackio")
        return tuple(used)
