"""Step folders in one directory: how one appears, which is the latest, which may go.

Owns the names (``step-000010``, ``latest``, and the hidden ones of work in progress); knows nothing
of what is inside beyond the manifest. A visible step folder is complete: it appears by a rename,
after everything in it was flushed. A directory has one writer at a time.

    .step-000010.tmp-<pid>   being written, or being removed
    .step-000010.old-<pid>   a superseded attempt, for the instant between two renames
    step-000010.attempt-1    set aside: a resumed run began before it
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint.manifest import is_good

CHECKPOINTS = "checkpoints"
"""The directory of a run that has its model folders."""

LATEST = "latest"
_STEP = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"step-(?P<step>\d+)\.attempt-(?P<attempt>\d+)")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-\d+")


def step_folder(directory: Path, step: int) -> Path:
    """Where step ``step`` is saved."""
    return directory / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step of which ``folder``, one of ``step_folders``, is."""
    return int(folder.name.removeprefix("step-"))


def step_folders(directory: Path) -> list[Path]:
    """The visible step folders, newest step first."""
    found = [(int(name[1]), path) for name, path in _entries(directory, _STEP)]
    return [path for _, path in sorted(found, reverse=True)]


def _entries(directory: Path, names: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    """What is in ``directory`` under one of ``names``, in any order; nothing where it is not."""
    if not directory.is_dir():
        return []
    return [(m, path) for path in directory.iterdir() if (m := names.fullmatch(path.name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A step folder of an attempt that a resumed run has superseded."""

    path: Path
    step: int
    attempt: int


def superseded_folders(directory: Path) -> list[SetAside]:
    """The folders that ``set_aside`` has renamed, newest step and attempt first."""
    found = [
        SetAside(path=path, step=int(name["step"]), attempt=int(name["attempt"]))
        for name, path in _entries(directory, _ASIDE)
    ]
    return sorted(found, key=lambda each: (each.step, each.attempt), reverse=True)


def hidden_entries(directory: Path) -> list[Path]:
    """What is being written, or was left by a writer that was killed: what ``sweep`` looks at."""
    return sorted(path for _, path in _entries(directory, _HIDDEN))


def _hidden(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}-{os.getpid()}"


def flush(path: Path) -> None:
    """Wait until what was written to a file, or a folder's list of names, is on the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A hidden sibling folder to fill; becomes ``final`` at the end of the block, or vanishes.

    ``final`` may exist (a superseded attempt): it stays whole until the new one is flushed. A kill
    between the two renames leaves it under its ``.old`` name, from which ``sweep`` brings it back.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = _hidden(final, "tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _sync_tree(aside)
        _rename(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _rename(aside: Path, final: Path) -> None:
    if not final.exists():
        aside.rename(final)
        flush(final.parent)
        return
    old = _hidden(final, "old")
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    try:
        aside.rename(final)
    except OSError:
        old.rename(final)
        raise
    flush(final.parent)
    _remove(old)


def _remove(path: Path) -> None:
    """A folder, or what somebody put in its place: a link to where it was moved, for example."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def point_latest(folder: Path) -> None:
    """Let the link ``latest`` beside ``folder`` name it, in one atomic step."""
    link = folder.parent / LATEST
    aside = _hidden(link, "tmp")
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    aside.replace(link)
    flush(folder.parent)


def latest(directory: Path) -> Path | None:
    """The folder that ``latest`` names or, if that is gone, the newest one that verifies, or None.

    What ``latest`` names is not verified here: its reader does that, and says what is wrong.
    """
    linked = linked_folder(directory)
    return _newest_good(directory) if linked is None else linked


def linked_folder(directory: Path) -> Path | None:
    """The folder that the link ``latest`` names; None without the link, or without the folder."""
    link = directory / LATEST
    if link.is_symlink() and link.is_dir():
        return directory / link.readlink().name
    return None


def _newest_good(directory: Path) -> Path | None:
    return next((folder for folder in step_folders(directory) if is_good(folder)), None)


def prune(directory: Path, keep_last: int | None, keep_every: int | None = None) -> list[Path]:
    """Remove all but the ``keep_last`` newest step folders (None: keep all) and return what went.

    Those whose step is a multiple of ``keep_every`` stay as well, as do the newest one that
    verifies and the one that ``latest`` names.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None, got {value}")
    if keep_last is None:
        return []
    surplus = step_folders(directory)[keep_last:]
    if keep_every is not None:
        surplus = [folder for folder in surplus if step_of(folder) % keep_every]
    if not surplus:
        return []
    kept = {linked_folder(directory), _newest_good(directory)}
    removed = [folder for folder in surplus if folder not in kept]
    for folder in removed:
        aside = _hidden(folder, "tmp")
        folder.rename(aside)  # so that a kill in the middle leaves no visible half folder
        _remove(aside)
    return removed


def set_aside(directory: Path, *, after_step: int, attempt: int) -> list[Path]:
    """Rename the folders of later steps, which belong to ``attempt``, the one that ends.

    ``latest`` names the newest good folder that is left, or is gone. For whoever is the directory's
    writer now. Running it again after a crash in the middle finishes the work.

    Returns:
        The new names.
    """
    moved = []
    for folder in step_folders(directory):
        if step_of(folder) <= after_step:
            continue
        aside = folder.with_name(f"{folder.name}.attempt-{attempt}")
        shutil.rmtree(aside, ignore_errors=True)
        moved.append(folder.rename(aside))
    link = directory / LATEST
    if link.is_symlink() and not link.exists():
        link.unlink()
        left = _newest_good(directory)
        if left is not None:
            point_latest(left)
    return moved


def sweep(directory: Path) -> None:
    """Clean up after a writer that was killed; only for whoever is the directory's writer now.

    An ``.old`` folder whose place is empty goes back there; everything else that is hidden goes.
    """
    for name, path in _entries(directory, _HIDDEN):
        final = directory / name["name"]
        if name["kind"] == "old" and not final.exists():
            path.rename(final)
        else:
            _remove(path)
