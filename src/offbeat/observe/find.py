"""Which runs there are below a folder, and which one a person means.

Looks at names and times only; opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import DataError
from offbeat.observe import ledger, summary

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"

_MARKS = (CONFIG_FILE, METRICS_FILE, ledger.FILE_NAME, summary.FILE_NAME)
_NEWEST = 5
"""How many runs an error message offers."""


def find_run(run: str, fileroot: Path = Path("runs")) -> Path:
    """The run directory that ``run`` means.

    Args:
        run: a run directory, one of its two parents (then the newest run below it), a path relative
            to ``fileroot``, a trial's name below ``fileroot``, or ``latest`` for the newest run
            under ``fileroot``.
        fileroot: where runs are kept.

    Raises:
        DataError: nothing there, or nothing that is a run; says what was looked for and which runs
            there are.
    """
    candidates = [fileroot] if run == "latest" else [Path(run), fileroot / run]
    folders = [c for c in candidates if c.is_dir()]
    runs = next((found for folder in folders if (found := runs_below(folder))), [])
    if not runs and run != "latest":
        runs = [p for p in runs_below(fileroot) if p.name == run]
    if not runs:
        raise DataError(f"{_missing(run, candidates, folders)}{_offer(fileroot)}")
    return max(runs, key=changed_at)


def _missing(run: str, candidates: Sequence[Path], folders: Sequence[Path]) -> str:
    if folders:
        return (
            f"{folders[0]}: not a run, nor does a run lie in it: looked for {', '.join(_MARKS)} "
            "there, in its folders and in theirs"
        )
    return f"run {run!r}: there is no folder {' nor '.join(map(str, candidates))}"


def _offer(fileroot: Path) -> str:
    newest = sorted(runs_below(fileroot), key=changed_at, reverse=True)[:_NEWEST]
    if not newest:
        return f"; no run lies below {fileroot} (--fileroot names another folder)"
    names = ", ".join(run_name(path, fileroot) for path in newest)
    return f"; the newest runs are {names}; offbeat runs lists all"


def runs_below(folder: Path) -> list[Path]:
    """``folder`` if it is a run, else the runs in it and in its folders."""
    if _is_run(folder):
        return [folder]
    return [p for pattern in ("*", "*/*") for p in folder.glob(pattern) if _is_run(p)]


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)


def changed_at(path: Path) -> float:
    """When one of the run's files was last written, seconds since the epoch."""
    return max((path / mark).stat().st_mtime for mark in _MARKS if (path / mark).is_file())


def run_name(path: Path, fileroot: Path) -> str:
    """What to call the run at ``path`` among those below ``fileroot``."""
    return str(path.relative_to(fileroot)) if path.is_relative_to(fileroot) else str(path)
