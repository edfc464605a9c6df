"""What each run below a folder came to, in a line: the contents of ``offbeat runs``.

Consumes run directories; changes nothing in them. A run that cannot be read is listed with the
reason: it hides no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from offbeat.errors import DataError
from offbeat.observe import ledger
from offbeat.observe.find import CONFIG_FILE, changed_at, run_name, runs_below
from offbeat.observe.show import RunReader
from offbeat.observe.summary import RunStatus, Summary
from offbeat.observe.terminal import harmless, number, table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run. ``started`` is in seconds since the epoch, ``seconds`` how long it went on or goes
    on. ``summary`` is None and ``problem`` says why when it cannot be read.
    """

    name: str
    path: Path
    started: float
    seconds: float
    summary: Summary | None
    problem: str | None = None

    @property
    def status(self) -> str:
        """How the run stands, in a word."""
        return "unreadable" if self.summary is None else self.summary.status.value


def list_runs(fileroot: Path, *, now: float | None = None) -> tuple[RunLine, ...]:
    """The runs below ``fileroot``, the newest first; ``now`` is in seconds since the epoch.

    Raises:
        DataError: there is no such folder.
    """
    if not fileroot.is_dir():
        raise DataError(f"there is no folder {fileroot}; --fileroot names the one that holds runs")
    at = time.time() if now is None else now
    lines = [_line(path, fileroot, at) for path in runs_below(fileroot)]
    return tuple(sorted(lines, key=lambda line: (line.started, line.name), reverse=True))


def _line(path: Path, fileroot: Path, now: float) -> RunLine:
    found, problem = None, None
    started = changed_at(path)
    try:
        found = RunReader(path, {}).read().summary
        started = _started(path)
    except (DataError, OSError) as exc:
        problem = str(exc)
    ended = now if found is not None and found.status is RunStatus.RUNNING else changed_at(path)
    return RunLine(
        name=run_name(path, fileroot),
        path=path,
        started=started,
        seconds=max(0.0, ended - started),
        summary=found,
        problem=problem,
    )


def _started(path: Path) -> float:
    """When the ledger was made; without one when the configuration was written, which is once."""
    if (path / ledger.FILE_NAME).is_file():
        attempts = ledger.read_attempts(path / ledger.FILE_NAME)
        if attempts:
            return attempts[0]
    config = path / CONFIG_FILE
    return config.stat().st_mtime if config.is_file() else changed_at(path)


def runs_text(lines: Sequence[RunLine]) -> str:
    """The runs as a table; below it why some could not be read."""
    title = ("run", "status", "steps", "reward", "eval", "started", "took")
    problems = [f"{line.name}: {harmless(line.problem)}" for line in lines if line.problem]
    return "\n".join([*table(title, [_cells(line) for line in lines], left=2), *problems])


def _cells(line: RunLine) -> tuple[str, ...]:
    s = line.summary
    reward = f"{number(s.reward.first)} to {number(s.reward.last)}" if s is not None else "-"
    return (
        harmless(line.name),
        line.status,
        "-" if s is None else str(s.steps),
        reward,
        number(None if s is None else s.eval.last),
        datetime.fromtimestamp(line.started).strftime("%Y-%m-%d %H:%M"),
        str(timedelta(seconds=round(line.seconds))),
    )


def runs_content(lines: Sequence[RunLine]) -> list[dict[str, object]]:
    """The runs as plain data for JSON."""
    return [
        {
            "run": line.name,
            "path": str(line.path),
            "status": line.status,
            "started": line.started,
            "seconds": line.seconds,
            "problem": line.problem,
            "steps": s.steps if (s := line.summary) is not None else None,
            "reward_first": s.reward.first if s is not None else None,
            "reward_last": s.reward.last if s is not None else None,
            "eval_last": s.eval.last if s is not None else None,
        }
        for line in lines
    ]
