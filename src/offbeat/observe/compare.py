"""Two runs beside each other: configuration, results, speed and curves.

Consumes views of runs; returns text and plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from offbeat.errors import DataError
from offbeat.observe.curves import charts, marks
from offbeat.observe.recorded import differences, recorded_config
from offbeat.observe.show import RunView
from offbeat.observe.terminal import harmless, number, table

_FOLDERS = ("trial_name", "experiment_name", "fileroot")
"""Keys that name the folder of a run: they say nothing of how it differs."""

_LONGEST = 48
"""Characters of a value that are printed; JSON has all of them."""


def comparison_content(views: Sequence[RunView]) -> dict[str, object]:
    """The comparison as plain data for JSON: lists have a value for each run, in their order."""
    values = [_values(view) for view in views]
    return {
        "runs": [str(view.path) for view in views],
        "config": {key: list(values) for key, values in _config(views).items()},
        "values": {name: [found[name] for found in values] for name in values[0]},
        "curves": {
            title: [view.curves[title].points() for view in views] for title in views[0].curves
        },
    }


def comparison_text(views: Sequence[RunView], *, width: int, utf8: bool = True) -> str:
    """The comparison for a terminal of ``width`` columns; see `charts` for ``utf8``."""
    names = [f"{letter}: {view.path}" for letter, view in zip("AB", views, strict=True)]
    drawn = [f"{letter} {mark}" for letter, mark in zip("AB", marks(utf8), strict=True)]
    config = [(key, *map(_shown, values)) for key, values in _config(views).items()]
    found = [_values(view) for view in views]
    results = [(name, *(number(f[name], ".5g") for f in found)) for name in found[0]]
    status = ("status", *(view.summary.status.value for view in views))
    parts = [
        names,
        table(("configuration", "A", "B"), config, left=3) if config else ["same configuration"],
        table(("result", "A", "B"), [status, *results]),
        [f"curves    {', '.join(drawn)}"],
        charts([view.curves for view in views], width=width, utf8=utf8),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _config(views: Sequence[RunView]) -> Mapping[str, tuple[object, ...]]:
    try:
        configs = [recorded_config(view.path) for view in views]
    except DataError as exc:
        raise DataError(f"the two runs cannot be compared: {exc}") from exc
    found = differences(configs)
    return {key: values for key, values in found.items() if key not in _FOLDERS}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = harmless(text).replace("\n", "\\n")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _values(view: RunView) -> Mapping[str, float | None]:
    """What two runs are compared by; None where a run does not know it."""
    s = view.summary
    seconds = s.seconds.total or None
    return {
        "steps": s.steps,
        "reward first": s.reward.first,
        "reward last": s.reward.last,
        "eval first": s.eval.first,
        "eval last": s.eval.last,
        "eval best": s.eval.best,
        "seconds": seconds,
        "seconds per step": seconds / s.steps if seconds and s.steps else None,
        "tokens per second": s.tokens.generated / seconds if seconds else None,
        "trained tokens per second": s.tokens.trained / seconds if seconds else None,
        "wasted tokens": s.tokens.wasted / s.tokens.generated if s.tokens.generated else None,
        "lag of groups": s.lag.group_mean,
        "largest lag": s.lag.group_max,
        "waiting, seconds": s.seconds.waiting,
        "training, seconds": s.seconds.training,
    }
