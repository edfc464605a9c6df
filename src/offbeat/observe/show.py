"""A run found on disk, and what ``offbeat show`` says of it first: as text or JSON.

Consumes a run directory that is finished, failed, killed or still being written; changes nothing in
it. Returns strings, prints nothing. Text that a model wrote is made harmless for a terminal first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from offbeat.observe import ledger, summary
from offbeat.observe.find import METRICS_FILE
from offbeat.observe.liveness import Life, life_of
from offbeat.observe.metrics import NO_SIGNAL, StepRecord, seconds_of
from offbeat.observe.proximal import ProxErrors
from offbeat.observe.resuming import resumption
from offbeat.observe.series import CURVES, CurveTable, Series
from offbeat.observe.sinks import MetricsTail
from offbeat.observe.summary import FailedSaves, RunStatus, RunTotals, Summary
from offbeat.observe.terminal import harmless, number, sparkline
from offbeat.types import NoSignal

_STATUS = {
    Life.ALIVE: RunStatus.RUNNING,
    Life.DEAD: RunStatus.KILLED,
    Life.UNKNOWN: RunStatus.UNFINISHED,
}
_LARGE = 100.0
"""From here on values are printed without decimals."""

_STATUS_TEXT = {
    RunStatus.KILLED: "killed (its process is gone and wrote no summary)",
    RunStatus.UNFINISHED: "unfinished (still running, or killed)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it lies on disk. ``curves`` by title; ``new`` are the steps since the view before
    this one, the last one only where there was none before.
    """

    path: Path
    summary: Summary
    curves: Mapping[str, Series]
    prox: ProxErrors = field(default_factory=ProxErrors)
    new: tuple[StepRecord, ...] = ()


class RunReader:
    """Reads a run again and again while it is written; each step once.

    Args:
        path: the run directory, from `offbeat.observe.find.find_run`.
        metrics: title and metric of the curves to keep.
    """

    def __init__(self, path: Path, metrics: Mapping[str, str] = CURVES) -> None:
        self._path = path
        self._tail = MetricsTail(path / METRICS_FILE)
        self._totals = RunTotals(0.0)
        self._seconds = 0.0
        self._curves = CurveTable(metrics)
        self._prox = ProxErrors()
        self._started = False

    def read(self) -> RunView:
        """The run as it stands. Raises DataError when a file of it cannot be read."""
        # In this order: a run that ends in between has a summary when its lock is free.
        life = life_of(self._path)
        ended = (self._path / summary.FILE_NAME).is_file()
        new = self._new_steps()
        return RunView(
            path=self._path,
            summary=summary.read_summary(self._path / summary.FILE_NAME)
            if ended
            else self._so_far(_STATUS[life]),
            curves=self._curves.series,
            prox=self._prox,
            new=new,
        )

    def require_curves(self) -> None:
        """Raise DataError when no step read so far has one of the metrics."""
        self._curves.require_all()

    def _new_steps(self) -> tuple[StepRecord, ...]:
        new: deque[StepRecord] = deque(maxlen=None if self._started else 1)
        self._started = True
        if not (self._path / METRICS_FILE).is_file():
            return ()
        for record in self._tail.read():
            self._totals.add_step(record)
            self._seconds += seconds_of([record])
            self._curves.add(record)
            self._prox.add(record)
            new.append(record)
        return tuple(new)

    def _so_far(self, status: RunStatus) -> Summary:
        """The summary of a run that has not written one, from what its steps and its ledger say."""
        db = self._path / ledger.FILE_NAME
        groups = ledger.LedgerTotals(admitted=0, trained=0, dropped={}, open=0)
        tokens = ledger.TokenTotals(generated=0, trained=0, wasted={})
        events = None
        if db.is_file():
            groups, tokens = ledger.read_totals(db), ledger.read_tokens(db)
            events = ledger.read_event_totals(db)
        return self._totals.summary(
            now=self._seconds, status=status, groups=groups, tokens=tokens, events=events
        )


def load_run(path: Path) -> RunView:
    """Read the run at ``path`` (from `offbeat.observe.find.find_run`). Raises DataError when a file
    in it cannot be read.
    """
    return RunReader(path).read()


def run_content(view: RunView) -> dict[str, object]:
    """The run as plain data for JSON: the keys of ``summary.json``, ``run`` and ``curves``; where a
    step measured it, also ``prox`` (`ProxErrors.table`).
    """
    content: dict[str, object] = msgspec.json.decode(view.summary.to_json())
    content["run"] = str(view.path)
    content["curves"] = {title: series.points() for title, series in view.curves.items()}
    prox = view.prox.table()
    return content | ({"prox": prox} if prox else {})


def as_json(content: object, *, indent: int = 2) -> str:
    """``content`` as JSON text; what is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(content), indent=indent).decode()


def run_text(view: RunView) -> str:
    """Summary and curves of one line each, for the end of a run."""
    lines = summary_lines(view)
    for title, series in view.curves.items():
        _, values = series.finite()
        if values:
            spec = ".3f" if max(map(abs, values)) < _LARGE else ".0f"
            ends = f"{values[0]:{spec}} to {values[-1]:{spec}}"
            lines.append(f"{title:<9} {sparkline(values)}  {ends}")
    return "\n".join([*lines, *conclusion_lines(view)])


def conclusion_lines(view: RunView) -> list[str]:
    """What comes after the curves: the proximal approximations, and what limited the run."""
    limit = view.summary.limit
    return [*view.prox.lines(), *([f"limit     {limit.sentence}"] if limit is not None else [])]


def summary_lines(view: RunView) -> list[str]:
    """The run in numbers, one subject a line."""
    s = view.summary
    dropped = {reason: n for reason, n in s.groups.dropped.items() if n}
    reasons = f" ({', '.join(f'{r} {n}' for r, n in dropped.items())})" if dropped else ""
    ended = resumption(view.path, s.status)
    wasted = f", {s.tokens.wasted / s.tokens.generated:.1%} wasted" if s.tokens.generated else ""
    lines = [
        f"run       {view.path}",
        f"status    {_STATUS_TEXT.get(s.status, s.status)} after {s.steps} steps",
        *([f"error     {harmless(s.error)}"] if s.error is not None else []),
        *([f"resume    {harmless(ended.sentence)}"] if ended is not None else []),
        *([_failed_line(s.failed_saves)] if s.failed_saves is not None else []),
        f"seconds   {s.seconds.total:.1f} total, {s.seconds.training:.1f} training, "
        f"{s.seconds.waiting:.1f} waiting",
        f"reward    first {number(s.reward.first)}, last {number(s.reward.last)}",
        f"eval      first {number(s.eval.first)}, last {number(s.eval.last)}, "
        f"best {number(s.eval.best)}"
        + "".join(f", last {harmless(name)} {v:.3f}" for name, v in s.eval.parts.items()),
        f"lag       group mean {number(s.lag.group_mean)}, "
        f"group max {number(s.lag.group_max, '.0f')}, token mean {number(s.lag.token_mean)}",
        f"groups    {s.groups.admitted} admitted = {s.groups.trained} trained + "
        f"{sum(dropped.values())} dropped{reasons} + {s.groups.open} open",
        f"tokens    {s.tokens.generated} generated = {s.tokens.trained} trained + "
        f"{s.tokens.wasted} wasted{wasted}; {s.tokens.prefill} prefill",
        *_lesson_lines(s),
        *_event_lines(s),
    ]
    return [*lines, *([] if s.status in _STATUS.values() else _measured_lines(s))]


def _failed_line(failed: FailedSaves) -> str:
    counts = {"model folder": failed.models, "snapshot": failed.snapshots}
    what = " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts.items() if n)
    last = f"; the last: {harmless(failed.last)}" if failed.last is not None else ""
    return f"saves     {what} could not be saved{last}"


def _lesson_lines(s: Summary) -> list[str]:
    """Why little could be learned; nothing of a run in which most groups taught something."""
    causes = {NoSignal(name): n for name, n in s.groups_without_signal.items() if n}
    none = sum(causes.values())
    lines = []
    if 2 * none >= max(1, s.groups.trained):
        why = ", ".join(f"{NO_SIGNAL[cause]} {n}" for cause, n in causes.items())
        lines.append(f"signal    {none} of {s.groups.trained} trained groups taught nothing: {why}")
    if s.invalid_rewards:
        lines.append(f"invalid   {s.invalid_rewards} answers had no reward and were left out")
    return lines


def _event_lines(s: Summary) -> list[str]:
    """What went wrong and was mended, and what that means; nothing in a calm run."""
    restarts = ", ".join(f"{name} {_times(n)}" for name, n in s.restarts.items())
    n, m = s.reward_workers_replaced, s.lost_replies
    mended = [
        *([f"restarted: {restarts}"] if restarts else []),
        *([f"{n} reward process{'' if n == 1 else 'es'} replaced"] if n else []),
        *([f"{m} lost repl{'y' if m == 1 else 'ies'} asked for again"] if m else []),
    ]
    broken = "; ".join(harmless(why) for why in s.determinism_broken_by)
    return [
        *([f"mended    {'; '.join(mended)}"] if mended else []),
        *([f"bits      not reproducible bit for bit: {broken}"] if broken else []),
    ]


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _measured_lines(s: Summary) -> list[str]:
    """What only a run itself can measure, and says at its end."""
    return [
        f"overlap   decode share of training {number(s.decode_share_of_training_time, '.1%')}, "
        f"engine busy {number(s.engine_busy_fraction, '.1%')}, "
        f"{s.completions_with_two_versions} answers with two versions",
        f"memory    {number(s.peak_rss_bytes / 2**20 or None, '.0f')} MiB peak, all processes",
    ]
