"""Curves as numbers: the values of some metrics over the steps of a run.

Owns which metrics are shown when nobody chooses. Knows no files and draws nothing.
"""

from __future__ import annotations

import difflib
import math
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from offbeat.errors import DataError
from offbeat.observe.metrics import StepRecord

CURVES: Mapping[str, str] = MappingProxyType(
    {
        "reward": "reward/mean",
        "eval": "eval/reward_mean",
        "lag": "lag/group_mean",
        "length": "generate/length_tokens",
        "entropy": "actor/entropy",
        "tokens/s": "throughput/tokens_per_second",
    }
)
"""What is drawn by default: title and metric."""


class Series:
    """One metric over the steps that measured it, 16 bytes a step."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """The value of one step, NaN included."""
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> tuple[list[int], list[float]]:
        """Steps and values that can be drawn."""
        steps, values = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        drawable = np.isfinite(values)
        return steps[drawable].tolist(), values[drawable].tolist()

    def points(self) -> list[tuple[int, float | None]]:
        """All steps with their values; what is not finite is None."""
        return [
            (step, value if math.isfinite(value) else None)
            for step, value in zip(self.steps, self.values, strict=True)
        ]


class CurveTable:
    """The series of some metrics by title, filled step by step.

    Args:
        metrics: title and metric of each.
    """

    def __init__(self, metrics: Mapping[str, str] = CURVES) -> None:
        self._metrics = metrics
        self._seen: set[str] = set()
        self.series: Mapping[str, Series] = {title: Series() for title in metrics}

    def add(self, record: StepRecord) -> None:
        """One finished step."""
        self._seen |= record.metrics.keys()
        for title, metric in self._metrics.items():
            value = record.metrics.get(metric)
            if value is not None:
                self.series[title].add(record.step, value)

    def require_all(self) -> None:
        """Raise DataError for a metric that no step has; names the nearest that some step has."""
        for title, series in self.series.items():
            if not series.steps:
                name = self._metrics[title]
                near = difflib.get_close_matches(name, self._seen, n=3, cutoff=0.0)
                hint = f"; the nearest: {', '.join(near)}" if near else ""
                raise DataError(f"no step of this run has the metric {name!r}{hint}")


def named(metrics: Sequence[str]) -> Mapping[str, str]:
    """``metrics`` as titles of themselves; `CURVES` when there are none."""
    return {name: name for name in metrics} or CURVES
