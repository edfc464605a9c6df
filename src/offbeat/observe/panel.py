"""The panel that shows a run in a terminal: progress, newest values and their history.

Consumes the flat mapping of a `StepRecord`; gives something that rich can draw. Owns no stream.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.observe.metrics import NO_SIGNAL, dropped_name, no_signal_name
from offbeat.observe.terminal import encodable, harmless, sparkline
from offbeat.protocols import JsonValue
from offbeat.types import DropReason

HISTORY = 240
"""Values of a metric that the panel remembers."""

BARS_WIDTH = 40
"""Bars in which it shows them, as far as the terminal is wide enough."""

LARGE_SHARE = 0.5
"""Of a step's groups: from here on it is said why they teach nothing."""

_ROWS = {
    "reward": ("reward/mean", ".3f"),
    "eval": ("eval/reward_mean", ".3f"),
    "lag": ("lag/group_mean", ".1f"),
    "length": ("generate/length_tokens", ".0f"),
    "entropy": ("actor/entropy", ".2f"),
    "grad norm": ("actor/grad_norm", ".2f"),
    "tokens/s": ("throughput/tokens_per_second", ""),
    "wait, s": ("wait/data_seconds", ".1f"),
}
"""Rows of the panel: metric, and how its value is written (empty: in at most five characters)."""


class StepPanel:
    """What the panel says: progress, the newest values and their history, what went wrong.

    Remembers `HISTORY` values of each row.
    """

    def __init__(self, total_steps: int | None, title: str, encoding: str) -> None:
        self._total = total_steps
        self._title = title
        self._encoding = encoding
        self._step = 0
        self._elapsed = 0.0
        self._seconds: deque[float] = deque(maxlen=HISTORY)
        self._values: dict[str, deque[float]] = {n: deque(maxlen=HISTORY) for n in _ROWS}
        self._dropped: dict[str, int] = {}
        self._invalid = 0
        self._no_signal = ""

    def add(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """One finished step, or what was measured before the first."""
        self._step = step
        seconds = finite(metrics.get("seconds")) or 0.0
        self._elapsed += seconds
        if step:
            self._seconds.append(seconds)
        for name, (metric, _) in _ROWS.items():
            value = finite(metrics.get(metric))
            if value is not None:
                self._values[name].append(value)
        for reason, n in dropped_counts(metrics):
            self._dropped[reason] = self._dropped.get(reason, 0) + n
        self._invalid += int(finite(metrics.get("reward/invalid_count")) or 0)
        self._no_signal = no_signal_text(metrics)

    def draw(self, width: int) -> RenderableType:
        """The panel, ``width`` columns wide."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column(style="cyan", no_wrap=True)
        bars = max(8, min(BARS_WIDTH, width - 30))
        for name, values in self._values.items():
            if values:
                line = encodable(sparkline(list(values), bars), self._encoding)
                table.add_row(name, _as_shown(name, values[-1]), line)
        parts = [*self._progress(width - 4), table]
        troubles = self._troubles()
        if troubles:
            parts.append(Text(troubles, style="yellow"))
        return Panel(
            Group(*parts), title=Text(harmless(self._title)), title_align="left", width=width
        )

    def _progress(self, width: int) -> list[RenderableType]:
        of = f"/{self._total}" if self._total else ""
        times = [f"{_clock(self._elapsed)} so far"]
        if self._seconds:
            each = math.fsum(self._seconds) / len(self._seconds)
            times.append(f"{each:.2f} s a step")
            if self._total:
                times.append(f"{_clock(each * max(0, self._total - self._step))} to go")
        line = Text(f"step {self._step}{of}  {', '.join(times)}", no_wrap=True)
        if not self._total:
            return [line]
        # Alone, a bar does not end its line.
        bar = Padding(ProgressBar(total=self._total, completed=self._step, width=width), 0)
        return [line, bar]

    def _troubles(self) -> str:
        found = [f"{n} {reason}" for reason, n in self._dropped.items()]
        parts = (
            f"groups dropped: {', '.join(found)}" if found else "",
            f"invalid rewards: {self._invalid}" if self._invalid else "",
            self._no_signal,
        )
        return "  ".join(part for part in parts if part)


def _as_shown(name: str, value: float) -> str:
    spec = _ROWS[name][1]
    return format(value, spec) if spec else compact(value)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def finite(value: JsonValue) -> float | None:
    """``value`` if it is a finite number."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]  # a number by the line above


def compact(value: JsonValue) -> str:
    """``value`` in at most five characters."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit * 0.9995:
            scaled = value / divisor
            digits = 1 if suffix and scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def dropped_counts(metrics: Mapping[str, JsonValue]) -> list[tuple[str, int]]:
    """Reasons for which a step dropped groups, and how many."""
    counts = ((r.value, finite(metrics.get(dropped_name(r)))) for r in DropReason)
    return [(name, int(n)) for name, n in counts if n]


def no_signal_text(metrics: Mapping[str, JsonValue]) -> str:
    """Why groups of a step teach nothing, where at least half of them do not; else nothing."""
    counts = {text: finite(metrics.get(no_signal_name(c))) or 0 for c, text in NO_SIGNAL.items()}
    found = {text: int(n) for text, n in counts.items() if n}
    of, none = finite(metrics.get("groups/trained_count")) or 0, sum(found.values())
    if not none or none < of * LARGE_SHARE:
        return ""
    causes = [text if len(found) == 1 else f"{text} ({n})" for text, n in found.items()]
    return f"{none} of {of:.0f} groups teach nothing: {', '.join(causes)}"
