"""How far the approximations of the proximal log-prob were off, over the steps that measured it.

Consumes step records; gives a table of numbers, and the same as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from offbeat.observe.metrics import (
    PROX_APPROXIMATIONS,
    PROX_PREFIX,
    Reduction,
    StepRecord,
    declared,
    prox_name,
)
from offbeat.observe.terminal import number

_TRUTH = f"{PROX_PREFIX}logp_mean"

_COLUMNS = (
    ("log-prob", "logp_mean"),
    ("error", "error_mean"),
    ("largest", "error_max"),
    ("relative", "relative_error_mean"),
    ("squared", "squared_error_mean"),
    ("behave w", "behave_weight_mean"),
    ("error", "behave_error_mean"),
    ("relative", "behave_relative_error_mean"),
    ("ratio", "ratio_mean"),
    ("error", "ratio_error_mean"),
    ("relative", "ratio_relative_error_mean"),
)


class ProxErrors:
    """Adds steps up: means weighted by trained tokens, and the largest of what is a largest."""

    def __init__(self) -> None:
        self.steps = 0
        self._sums: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}

    def add(self, record: StepRecord) -> None:
        """One finished step, whether it measured anything or not."""
        if _TRUTH not in record.metrics:
            return
        self.steps += 1
        found = {
            name: value
            for name, value in record.metrics.items()
            if name.startswith(PROX_PREFIX) and math.isfinite(value)
        }
        weight = max(1.0, record.metrics.get("actor/tokens_count", 1.0))
        for name, value in found.items():
            if declared(name).reduction is Reduction.MAX:
                self._largest[name] = max(value, self._largest.get(name, value))
            else:
                total, weights = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + value * weight, weights + weight)

    def table(self) -> Mapping[str, float]:
        """One number per metric; empty when no step measured any."""
        means = {name: total / weights for name, (total, weights) in self._sums.items()}
        return means | self._largest

    def lines(self) -> list[str]:
        """The table as text; none when no step measured any."""
        found = self.table()
        if not found:
            return []
        lines = [
            "prox      approximations of the recomputed log-prob "
            f"(mean {number(found.get(_TRUTH), '.4f')} nats), {self.steps} steps' "
            "mean: log-probs in nats, behave w = proximal/behavior, ratio = current/proximal",
            f"{'':<10}{'':<10}" + "".join(f"{title:>10}" for title, _ in _COLUMNS),
        ]
        for approximation in PROX_APPROXIMATIONS:
            values = [(m, found.get(prox_name(approximation, m))) for _, m in _COLUMNS]
            cells = (number(v, ".2%" if "relative" in m else ".3g") for m, v in values)
            lines.append(f"{'':<10}{approximation:<10}" + "".join(f"{c:>10}" for c in cells))
        return lines
