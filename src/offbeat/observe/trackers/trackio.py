"""Trackio, in a database of its own folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from offbeat.config import RunConfig, to_mapping
from offbeat.config.stats_logger import TrackioConfig
from offbeat.observe.summary import RunStatus


class TrackioTracker:
    """A ``Tracker``. An end other than completion is an alert of the run."""

    def __init__(self, cfg: RunConfig, section: TrackioConfig, run_dir: Path) -> None:
        if section.path is not None:
            os.environ["TRACKIO_DIR"] = section.path
        os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
        import trackio

        self._run = trackio.init(
            project=section.project or cfg.experiment_name,
            name=section.name or run_dir.name,
            config=to_mapping(cfg),
            embed=False,
        )
        self._levels = trackio.AlertLevel

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str, error: str | None) -> None:
        """See ``Tracker``."""
        if status != RunStatus.COMPLETED:
            self._run.alert(title=f"run {status}", text=error, level=self._levels.ERROR)
        self._run.finish()
