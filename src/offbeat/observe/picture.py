"""Curves as a PNG file, drawn with matplotlib (extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offbeat.errors import DataError
from offbeat.observe.drawing import figure_class
from offbeat.observe.series import Series

_COLUMNS = 2
_INCHES = (6.0, 2.6)
"""Width and height of one chart."""


def save_png(path: Path, runs: Mapping[str, Mapping[str, Series]]) -> None:
    """Draw the curves of one run, or of several over each other.

    Args:
        path: file to write; replaced.
        runs: curves by title, by the name of their run.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: there is nothing to draw, or the file cannot be written.
    """
    new_figure = figure_class("--png")
    titles = list(dict.fromkeys(t for run in runs.values() for t in run if run[t].finite()[0]))
    if not titles:
        raise DataError(f"{', '.join(runs)}: no step has anything to draw")
    rows = -(-len(titles) // _COLUMNS)
    figure = new_figure(figsize=(_COLUMNS * _INCHES[0], rows * _INCHES[1]), layout="constrained")
    grid = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes, title in zip(grid, titles, strict=False):
        for name, curves in runs.items():
            axes.plot(*curves[title].finite(), label=name, linewidth=1.2)
        axes.set_title(title, loc="left", parse_math=False)
        axes.grid(alpha=0.3)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    grid[0].legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as exc:
        raise DataError(f"{path}: cannot be written: {exc.strerror}") from exc
