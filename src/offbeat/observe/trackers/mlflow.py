"""MLflow, on a server or in a folder of files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from offbeat.config import RunConfig
from offbeat.config.stats_logger import MlflowConfig
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.hyperparameters import flat

PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_CHARACTERS = 6000
"""Limits of MLflow's own."""

T = TypeVar("T")

_STATUS = {
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.KILLED: "KILLED",
}


class MlflowTracker:
    """A ``Tracker``. The configuration is the run's parameters, an error its tag ``error``."""

    def __init__(self, cfg: RunConfig, section: MlflowConfig, run_dir: Path) -> None:
        uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or (run_dir / "mlflow").absolute().as_uri())
        run = self._client.create_run(
            self._experiment(section.experiment or cfg.experiment_name), run_name=run_dir.name
        )
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in flat(cfg).items()]
        for some in _chunks(params, PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=some)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        now = int(time.time() * 1000)
        values = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        for some in _chunks(values, METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=some)

    def finish(self, status: str, error: str | None) -> None:
        """See ``Tracker``."""
        if error is not None:
            self._client.set_tag(self._run_id, "error", error)
        self._client.set_terminated(self._run_id, _STATUS[RunStatus(status)])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        experiment: str = (
            self._client.create_experiment(name) if found is None else found.experiment_id
        )
        return experiment


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _name(metric: str) -> str:
    """A user names the parts of a reward; MLflow refuses most punctuation."""
    return re.sub(r"[^\w\-./: ]", "_", metric)
