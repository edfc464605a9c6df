"""What a run has saved, and whether it still is what was saved: ``offbeat checkpoint``.

Owns the list of a run's model folders and snapshots, the check of a folder against its manifest,
and both as text and as plain data. Reads only, also while the run writes: a folder that goes
meanwhile is left out. Prints nothing, and knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from offbeat.checkpoint import snapshot
from offbeat.checkpoint.folders import (
    CHECKPOINTS,
    LATEST,
    hidden_entries,
    linked_folder,
    step_folders,
    step_of,
    superseded_folders,
)
from offbeat.checkpoint.manifest import (
    MANIFEST_NAME,
    Damage,
    find_damage,
    find_other_sizes,
    load_manifest,
    unknown_files,
)
from offbeat.checkpoint.snapshot import SnapshotState, read_state
from offbeat.errors import CorruptCheckpoint, DataError
from offbeat.observe.liveness import Life, life_of
from offbeat.observe.terminal import harmless, size, table
from offbeat.types import PolicyVersion

_MODEL_CONFIG = "config.json"
_TITLE = ("kind", "folder", "note", "step", "version", "size", "saved")
_LONG_TITLE = ("optimizer step", "open groups", "threads", "torch")
_NAMED_FILES = 3
"""How many files that a manifest does not know are named."""


class Kind(StrEnum):
    """model: a Hugging Face folder; snapshot: what the run continues from."""

    MODEL = "model"
    SNAPSHOT = "snapshot"


_DIRECTORIES = {Kind.MODEL: CHECKPOINTS, Kind.SNAPSHOT: snapshot.FOLDER}
_WAYS_OUT = {
    Kind.MODEL: "damaged model folder: remove it, or go back to a snapshot before it with "
    "--resume-from, which saves it again",
    Kind.SNAPSHOT: "damaged snapshot: --resume skips it and takes the newest undamaged one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFolder:
    """One folder as it lies there; its files were counted, not read.

    ``attempt`` is the one that wrote it, where a resumed run has superseded that; None otherwise.
    ``saved`` is in seconds since the epoch. ``version``, and of a snapshot ``state``, are None
    where they cannot be read. ``problem`` is what damage shows without reading all of it.
    """

    path: Path
    kind: Kind
    step: int
    attempt: int | None
    is_latest: bool
    nbytes: int
    saved: float
    version: PolicyVersion | None
    state: SnapshotState | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a run has saved: models first, each kind by step. ``hidden`` is what is being written,
    and what a killed writer left.
    """

    run: Path
    life: Life
    folders: tuple[SavedFolder, ...]
    hidden: tuple[Path, ...]
    hidden_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all folders; what is hidden is not one of them."""
        return sum(folder.nbytes for folder in self.folders)


class State(StrEnum):
    """How a folder compares with its manifest."""

    OK = "ok"
    DAMAGED = "damaged"
    NO_MANIFEST = "no manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the check of one folder found. ``files`` and ``nbytes`` are those of its manifest;
    ``damage`` has each file that is not what was saved, or why there is nothing to compare with;
    ``unknown`` each file that is not in the manifest, which is no damage.
    """

    path: Path
    state: State
    files: int = 0
    nbytes: int = 0
    damage: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# The list


def list_saved(run: Path) -> Inventory:
    """What the run at ``run`` has saved."""
    hidden = [entry for name in _DIRECTORIES.values() for entry in hidden_entries(run / name)]
    named = [each for kind, name in _DIRECTORIES.items() for each in _named(run / name, kind)]
    found = [_look(*each) for each in named]
    return Inventory(
        run=run,
        life=life_of(run),
        folders=tuple(folder for folder in found if folder is not None),
        hidden=tuple(hidden),
        hidden_nbytes=sum(_bytes_of(entry) or 0 for entry in hidden),
    )


def _named(directory: Path, kind: Kind) -> list[tuple[Kind, int, int, Path]]:
    """Kind, step, attempt (0: not superseded) and place of each folder of one kind."""
    found = [(kind, step_of(path), 0, path) for path in step_folders(directory)]
    found += [(kind, each.step, each.attempt, each.path) for each in superseded_folders(directory)]
    return sorted(found)


def _look(kind: Kind, step: int, attempt: int, path: Path) -> SavedFolder | None:
    """The folder; None when it goes meanwhile."""
    version, state = None, None
    try:
        manifest = load_manifest(path)
        version = manifest.save.version
        state = read_state(path) if kind is Kind.SNAPSHOT else None
        problems = _told(find_other_sizes(path, manifest))
    except CorruptCheckpoint as exc:
        problems = (_within(path, exc),)
    nbytes, saved = _bytes_of(path), _saved_at(path)
    if nbytes is None or saved is None:
        return None
    return SavedFolder(
        path=path,
        kind=kind,
        step=step,
        attempt=attempt or None,
        is_latest=path == linked_folder(path.parent),
        nbytes=nbytes,
        saved=saved,
        version=version,
        state=state,
        problem="; ".join(problems) or None,
    )


def _told(damage: Iterable[Damage]) -> tuple[str, ...]:
    return tuple(f"{each.name} {each.what}" for each in damage)


def _within(folder: Path, exc: CorruptCheckpoint) -> str:
    """What is wrong with a file of ``folder``, for where the folder is named already."""
    return str(exc).removeprefix(f"{folder}/")


def _bytes_of(folder: Path) -> int | None:
    """Bytes of all files below ``folder``; None when one of them goes meanwhile."""
    if folder.is_symlink():
        return 0
    try:
        return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    except FileNotFoundError:
        return None


def _saved_at(folder: Path) -> float | None:
    """When the manifest was written, which is last; without one, when the folder was changed."""
    for path in (folder / MANIFEST_NAME, folder):
        if path.exists():
            return path.stat().st_mtime
    return None


def inventory_text(found: Inventory, *, long: bool = False) -> str:
    """A table with a row for each folder, and what there is to say below it.

    Args:
        long: with what a snapshot knows of the run and of the machine.
    """
    lines = [f"run {found.run}", ""]
    if found.folders:
        title = (*_TITLE, *(_LONG_TITLE if long else ()))
        lines += table(title, [_cells(folder, long=long) for folder in found.folders], left=3)
        count = len(found.folders)
        lines += ["", f"{count} folder{'s' if count > 1 else ''}, {size(found.nbytes)}"]
    else:
        lines.append("nothing is saved")
    lines += _problem_lines(found)
    if found.hidden:
        lines.append(_hidden_line(found))
    return "\n".join(lines)


def _problem_lines(found: Inventory) -> list[str]:
    lines = [harmless(f"{f.path}: {f.problem}") for f in found.folders if f.problem]
    if lines:
        lines.append(
            f"`offbeat checkpoint verify {found.run}` reads every file and says what to do"
        )
    return lines


def _cells(folder: SavedFolder, *, long: bool) -> tuple[str, ...]:
    note = "latest" if folder.is_latest else ""
    if folder.attempt is not None:
        note = "superseded"
    if folder.problem is not None:
        note = "damaged"
    cells = (
        folder.kind.value,
        folder.path.name,
        note,
        str(folder.step),
        "-" if folder.version is None else str(folder.version),
        size(folder.nbytes),
        datetime.fromtimestamp(folder.saved).strftime("%Y-%m-%d %H:%M:%S"),
    )
    return (*cells, *_long_cells(folder.state)) if long else cells


def _long_cells(state: SnapshotState | None) -> tuple[str, ...]:
    if state is None:
        return ("-",) * len(_LONG_TITLE)
    machine = state.environment
    open_groups = str(len(state.run.open_groups))
    return str(state.optimizer_steps), open_groups, str(machine.threads), harmless(machine.torch)


def _hidden_line(found: Inventory) -> str:
    count = len(found.hidden)
    what = f"{count} hidden entr{'ies' if count > 1 else 'y'}, {size(found.hidden_nbytes)}"
    if found.life is Life.ALIVE:
        return f"{what}: being written, or left by a killed writer and removed by the next save"
    return f"{what}: left by a killed writer; --resume of the run removes that, and so may you"


def inventory_content(found: Inventory) -> dict[str, object]:
    """The list as plain data for JSON."""
    return {
        "run": str(found.run),
        "folders": [_folder_content(folder) for folder in found.folders],
        "nbytes": found.nbytes,
        "hidden": [str(path) for path in found.hidden],
        "hidden_nbytes": found.hidden_nbytes,
    }


def _folder_content(folder: SavedFolder) -> dict[str, object]:
    state = folder.state
    return {
        "path": str(folder.path),
        "kind": folder.kind.value,
        "step": folder.step,
        "attempt": folder.attempt,
        "latest": folder.is_latest,
        "version": folder.version,
        "nbytes": folder.nbytes,
        "saved": folder.saved,
        "problem": folder.problem,
        "optimizer_steps": None if state is None else state.optimizer_steps,
        "open_groups": None if state is None else len(state.run.open_groups),
        "threads": None if state is None else state.environment.threads,
        "torch": None if state is None else state.environment.torch,
    }


# The check


def is_saved_folder(path: Path) -> bool:
    """Whether ``path`` is a model folder or a snapshot, also a model of another program."""
    holds = any((path / name).is_file() for name in (MANIFEST_NAME, _MODEL_CONFIG))
    return holds or _kind_of(path) is not None


def _kind_of(folder: Path) -> Kind | None:
    """What a run has saved there, by place and name: its files may be gone. None elsewhere."""
    place = folder.absolute()
    parent = place.parent
    if place.name == LATEST:
        place = linked_folder(parent) or place
    for kind, name in _DIRECTORIES.items():
        if parent.name == name and place in (path for *_, path in _named(parent, kind)):
            return kind
    return None


def saved_folders(run: Path) -> list[Path]:
    """All that the run at ``run`` has saved, superseded attempts too.

    Raises:
        DataError: that is nothing.
    """
    found = [folder.path for folder in list_saved(run).folders]
    if not found:
        raise DataError(f"{run} has neither model folders nor snapshots; nothing can be verified")
    return found


def check_all(folders: Iterable[Path]) -> Iterator[Verdict]:
    """The verdict on each folder, as soon as it was read; one that goes meanwhile has none."""
    for folder in folders:
        verdict = _check(folder)
        if verdict.state is State.OK or folder.is_dir():
            yield verdict


def _check(folder: Path) -> Verdict:
    try:
        manifest = load_manifest(folder)
    except CorruptCheckpoint as exc:
        if not (folder / MANIFEST_NAME).exists() and _kind_of(folder) is None:
            why = f"there is no {MANIFEST_NAME} to compare with; offbeat has not saved it"
            return Verdict(path=folder, state=State.NO_MANIFEST, damage=(why,))
        return Verdict(path=folder, state=State.DAMAGED, damage=(_within(folder, exc),))
    damage = _told(find_damage(folder, manifest))
    return Verdict(
        path=folder,
        state=State.DAMAGED if damage else State.OK,
        files=len(manifest.files),
        nbytes=sum(entry.nbytes for entry in manifest.files.values()),
        damage=damage,
        unknown=unknown_files(folder, manifest),
    )


def verdict_line(verdict: Verdict) -> str:
    """The verdict on one folder."""
    rest = f": {'; '.join(verdict.damage)}"
    if verdict.state is State.OK:
        rest = f"  {verdict.files} files, {size(verdict.nbytes)}"
    line = f"{verdict.state:<11}  {verdict.path}{rest}{_unknown_text(verdict.unknown)}"
    return harmless(line)


def _unknown_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > _NAMED_FILES else ""
    return f"; {len(names)} not in the manifest: {', '.join(names[:_NAMED_FILES])}{more}"


def closing_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The sum over several folders, and what can be done about those of a run that are damaged."""
    bad = [verdict for verdict in verdicts if verdict.state is State.DAMAGED]
    kinds = {_kind_of(verdict.path) for verdict in bad}
    lines = [_sum_line(len(bad), len(verdicts))] if len(verdicts) > 1 else []
    return lines + [way for kind, way in _WAYS_OUT.items() if kind in kinds]


def _sum_line(bad: int, count: int) -> str:
    if not bad:
        return f"all {count} folders are as they were saved"
    return f"{bad} of {count} folders {'is' if bad == 1 else 'are'} damaged"


def verdict_content(verdict: Verdict) -> dict[str, object]:
    """The verdict as plain data for JSON."""
    return {
        "path": str(verdict.path),
        "state": verdict.state.value,
        "files": verdict.files,
        "nbytes": verdict.nbytes,
        "damage": list(verdict.damage),
        "unknown": list(verdict.unknown),
    }
