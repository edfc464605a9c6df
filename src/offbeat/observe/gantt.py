"""A picture of a run: which part of it worked when, lane by lane, from its spans.

Owns the lanes, their colors and the choice of the steps that are shown; knows no run folder and no
command line. Draws with matplotlib, an optional package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError, DataError, boundary
from offbeat.observe.drawing import figure_class
from offbeat.observe.spans import Interval, Span, SpanName, merge

LANES: Mapping[str, tuple[SpanName, ...]] = {
    "generator": (SpanName.PREFILL, SpanName.DECODE),
    "rewards": (SpanName.REWARD,),
    "evaluation": (SpanName.EVAL,),
    "trainer": (SpanName.TRAIN,),
    "trainer waits": (SpanName.WAIT,),
    "new weights": (SpanName.PUBLISH, SpanName.STAGE, SpanName.COMMIT),
    "save": (SpanName.SAVE,),
}
"""Lane to the spans in it, from top to bottom; a lane without spans is left out."""

COLORS: Mapping[str, str] = {
    "generator": "#4477aa",
    "rewards": "#66ccee",
    "evaluation": "#aa3377",
    "trainer": "#228833",
    "trainer waits": "#bbbbbb",
    "new weights": "#ee6677",
    "save": "#ccbb44",
}
"""A palette that stays apart for color-blind readers (Paul Tol's bright scheme)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """What is drawn: intervals by lane and the times at which new weights went live, in seconds
    from the start of the first step shown.
    """

    lanes: Mapping[str, Sequence[Interval]]
    versions: Sequence[tuple[int, float]]
    seconds: float


def some_steps(spans: Sequence[Span], first: int | None, last: int | None) -> tuple[int, int]:
    """``first`` and ``last``, or what shows a run well: five steps from the second on, for the
    first is a start; fewer of a short run. Of a resumed run its last attempt is recorded.

    Raises:
        DataError: no step has ended.
    """
    commits = sorted({s.step for s in spans if s.name is SpanName.COMMIT and s.step is not None})
    if not commits:
        raise DataError("no step of this run has ended yet: there is nothing to draw")
    begin = first or commits[min(1, len(commits) - 1)]
    return begin, last or min(begin + 4, commits[-1])


def gantt(spans: Sequence[Span], first_step: int, last_step: int) -> Gantt:
    """The part of a run from the start of ``first_step`` to the commit of ``last_step``.

    Raises:
        DataError: the run has no such steps.
    """
    waits = {s.step: s.start for s in spans if s.name is SpanName.WAIT and s.step is not None}
    commits = {s.step: s.end for s in spans if s.name is SpanName.COMMIT and s.step is not None}
    for step in (first_step, last_step):
        if step not in waits or step not in commits:
            raise DataError(
                f"there is no step {step}; the run has {min(commits)} to {max(commits)}"
            )
    start, end = waits[first_step], commits[last_step]
    if start >= end:
        raise DataError(f"step {first_step} comes after step {last_step}")

    def inside(names: Sequence[SpanName]) -> list[Interval]:
        clipped = [
            (max(s.start, start) - start, min(s.end, end) - start)
            for s in spans
            if s.name in names and s.start < end and s.end > start
        ]
        return merge(clipped)

    lanes = {lane: found for lane, names in LANES.items() if (found := inside(names))}
    versions = [(k, commits[k] - start) for k in sorted(commits) if first_step <= k <= last_step]
    return Gantt(lanes=lanes, versions=versions, seconds=end - start)


def draw(picture: Gantt, file: Path, title: str) -> None:
    """Write the picture; the ending of ``file`` chooses the format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or it does not know the format.
    """
    figure = figure_class("drawing a timeline")(
        figsize=(9, 0.6 + 0.4 * len(picture.lanes)), layout="constrained"
    )
    axes = figure.subplots()
    for height, (lane, intervals) in enumerate(picture.lanes.items()):
        bars = [(a, b - a) for a, b in intervals]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=COLORS[lane])
    for version, live in picture.versions:
        axes.axvline(live, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(
            str(version), (live, -0.6), ha="center", va="bottom", fontsize=7, annotation_clip=False
        )
    axes.set_yticks(range(len(picture.lanes)), list(picture.lanes))
    axes.invert_yaxis()
    axes.set_xlim(0.0, picture.seconds)
    axes.set_xlabel("seconds; dotted: new weights are live, with their version")
    axes.set_title(title, fontsize=10, pad=14)
    with boundary(ConfigError, f"writing {file}"):
        figure.savefig(file, dpi=150)
