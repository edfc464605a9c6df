"""Curves drawn with characters, for a terminal or a pipe.

Consumes series; returns strings without any control character. Draws with plotext, whose figure is
one per process: only this module touches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import plotext

from offbeat.observe.series import Series
from offbeat.observe.terminal import means

HEIGHT = 10
"""Rows of one chart, title and axis included."""

TWO_COLUMNS = 100
"""From this width on, two charts stand side by side."""

_Curve = tuple[list[int], list[float]]
"""Steps and values, both finite and of equal length."""

_MARKERS = ("braille", "•")
_PLAIN_MARKERS = ("*", "o")


def charts(runs: Sequence[Mapping[str, Series]], *, width: int, utf8: bool = True) -> list[str]:
    """A chart for each title that has something to draw.

    Args:
        runs: the curves of one run, or of two to be drawn over each other, by title.
        width: columns to fill, at least 20.
        utf8: whether Braille and dots can be shown; stars and letters otherwise.

    Returns:
        The lines, none longer than ``width``.
    """
    columns = 2 if width >= TWO_COLUMNS else 1
    size = max(20, (width - (columns - 1)) // columns)
    markers = _MARKERS if utf8 else _PLAIN_MARKERS
    drawn = []
    for title in runs[0]:
        curves = [run[title].finite() for run in runs]
        if any(steps for steps, _ in curves):
            drawn.append(_chart(title, curves, size, markers))
    return [
        " ".join(line.ljust(size) for line in lines).rstrip()
        for first in range(0, len(drawn), columns)
        for lines in itertools.zip_longest(*drawn[first : first + columns], fillvalue="")
    ]


def marks(utf8: bool) -> tuple[str, str]:
    """How the first and the second of two runs are drawn, in words."""
    return ("line", "dots •") if utf8 else ("stars *", "letters o")


def _chart(title: str, curves: Sequence[_Curve], width: int, markers: Sequence[str]) -> list[str]:
    """One chart of ``width`` columns and `HEIGHT` rows."""
    figure = plotext.figure
    figure.clear()
    plotext.terminal.limit(False, False)  # the size asked for, whatever the terminal's is
    figure.plot_size(width, HEIGHT)
    figure.title(f"{title}  {', '.join(_ends(values) for _, values in curves)}")
    for (steps, values), marker in zip(curves, markers, strict=False):
        if steps:
            x, y = means(steps, 2 * width), means(values, 2 * width)
            figure.draw(figure.signal(x, y, marker=marker).lines(True))
    ticks = _ticks([step for steps, _ in curves for step in (steps[:1] + steps[-1:])])
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    figure.ruler("y").frequency(3)
    text: str = figure.build().string(colorless=True)
    return [line.rstrip() for line in text.rstrip("\n").split("\n")]


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.4g} to {values[-1]:.4g}" if values else "-"


def _ticks(steps: Sequence[int]) -> list[int]:
    """First, middle and last of ``steps``."""
    low, high = min(steps), max(steps)
    return sorted({low, (low + high) // 2, high})
