"""The console during a run: a panel that stays in place in a terminal, one line per step elsewhere.

Consumes the flat mapping of a `StepRecord`. In a terminal everything else that the process writes
there appears above the panel. Knows nothing of the pipeline.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live

from offbeat.observe.panel import StepPanel, compact, dropped_counts, finite, no_signal_text
from offbeat.protocols import JsonValue, Sink

PANEL_WIDTH = 100
"""Columns of the panel in a terminal that has more."""


def console_sink(
    *, total_steps: int | None = None, title: str = "", stream: TextIO | None = None
) -> Sink:
    """What suits ``stream``: a panel in a terminal that can move its cursor, lines elsewhere.

    A pipe, a file, a notebook and ``TERM=dumb`` get lines; ``NO_COLOR`` is a panel without color.

    Args:
        total_steps: shown beside the step number; None when the run has no fixed length.
        title: of the panel.
        stream: where to write; ``None`` is the standard output.
    """
    out = sys.stdout if stream is None else stream
    # Not what rich finds: FORCE_COLOR makes every pipe a terminal for it.
    console = Console(file=out, force_terminal=out.isatty(), force_jupyter=False, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveConsole(console, total_steps=total_steps, title=title)
    return ConsoleSink(total_steps=total_steps, stream=out)


class ConsoleSink:
    """One line per step, plain text, readable at 100 to 120 columns.

    Args:
        total_steps: shown beside the step number; None when the run has no fixed length.
        stream: where to write; ``None`` is the standard output.
    """

    def __init__(self, *, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = sys.stdout if stream is None else stream

    def __str__(self) -> str:
        return "the console"

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Write and flush the line. Raises OSError when the reader of a pipe is gone."""
        self._stream.write(step_line(step, metrics, self._total) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to do: the stream belongs to the caller."""


class LiveConsole:
    """A panel that is redrawn in place at each step, and stays as it was last when it is closed.

    From the first step until ``close`` the standard streams, as far as they are terminals, and the
    log handlers that write to them go through the panel's console, so that what they print appears
    above it. Calls may come from different threads.
    """

    def __init__(
        self, console: Console, *, total_steps: int | None = None, title: str = ""
    ) -> None:
        self._console = console
        self._panel = StepPanel(total_steps, title, console.encoding)
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def __str__(self) -> str:
        return "the console"

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Redraw. Raises OSError when the terminal is gone."""
        self._panel.add(step, metrics)
        if self._live is None:
            self._start()
        assert self._live is not None
        self._live.update(self._panel.draw(min(self._console.width, PANEL_WIDTH)), refresh=True)

    def _start(self) -> None:
        stderr = sys.stderr
        self._live = Live(
            console=self._console,
            # No thread of its own: a panel changes when a step ends, and only then.
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=stderr.isatty(),
            # What does not fit cannot be erased again.
            vertical_overflow="crop",
        )
        self._live.start()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stderr:
                self._handlers.append((handler, stderr))
                handler.setStream(sys.stderr)

    def close(self) -> None:
        """Leave the last state on the screen and give the streams back."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        finally:
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._handlers.clear()


def step_line(step: int, metrics: Mapping[str, JsonValue], total: int | None = None) -> str:
    """One step as one line; a value that the step did not measure is ``-``.

    Example (one line)::

        step 12/60  reward 0.512  eval -      lag 1.2/3    1.2k tok/s  wait 0.3s  ent 1.23
        clip 0.012  grad 0.81  drop 1 stale
    """
    width = len(str(total)) if total else 1
    of = f"/{total}" if total else ""
    lag = f"{_show(metrics, 'lag/group_mean', '.1f')}/{_show(metrics, 'lag/group_max', '.0f')}"
    parts = [
        f"step {step:>{width}}{of}",
        f"reward {_show(metrics, 'reward/mean', '.3f'):<5}",
        f"eval {_show(metrics, 'eval/reward_mean', '.3f'):<5}",
        f"lag {lag:<5}",
        f"{compact(metrics.get('throughput/tokens_per_second')):>5} tok/s",
        f"wait {_show(metrics, 'wait/data_seconds', '.1f')}s",
        f"ent {_show(metrics, 'actor/entropy', '.2f')}",
        f"clip {_show(metrics, 'actor/clip_fraction', '.3f')}",
        f"grad {_show(metrics, 'actor/grad_norm', '.2f')}",
        "drop " + (", ".join(f"{n} {reason}" for reason, n in dropped_counts(metrics)) or "0"),
    ]
    invalid = finite(metrics.get("reward/invalid_count"))
    if invalid:
        parts.append(f"invalid rewards {invalid:.0f}")
    no_signal = no_signal_text(metrics)
    if no_signal:
        parts.append(no_signal)
    return "  ".join(parts)


def _show(metrics: Mapping[str, JsonValue], name: str, spec: str) -> str:
    value = metrics.get(name)
    return format(float(value), spec) if isinstance(value, int | float) else "-"
