"""Where metrics are shown, beside the files of the run folder."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.config.schema import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsLoggerConfig(Section):
    """Sinks of the run's metrics."""

    console: bool = True
    """One line per step on the console."""
