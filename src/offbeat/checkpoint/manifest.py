"""What a folder must hold: sizes and hashes of all its files, and which weights they are.

Owns ``manifest.json`` and the check of a folder against it; knows no weights and no processes. A
reader refuses what it cannot verify.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from offbeat.errors import CorruptCheckpoint
from offbeat.types import PolicyVersion
from offbeat.weights.layout import digest_of

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_CHUNK = 1 << 22

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveManifest:
    """What a folder was saved from. ``config_digest`` identifies the resolved configuration."""

    step: int
    version: PolicyVersion
    config_digest: str = ""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and xxh3-128 (hex) of one file."""

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderManifest:
    """The content of ``manifest.json``: ``files`` by relative path; ``digest`` of all the rest."""

    save: SaveManifest
    files: dict[str, FileEntry]
    digest: str = ""


def _self_digest(manifest: FolderManifest) -> str:
    return digest_of(msgspec.json.encode(dataclasses.replace(manifest, digest=""), order="sorted"))


def file_entry(path: Path) -> FileEntry:
    """Size and hash of the file at ``path``, read once."""
    digest, nbytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileEntry(nbytes=nbytes, digest=str(digest.hexdigest()))


def files_of(folder: Path) -> Iterator[Path]:
    """All regular files below ``folder``, sorted; the manifest is not one of them."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST_NAME:
            yield path


def seal(folder: Path, save: SaveManifest, known: dict[str, FileEntry]) -> FolderManifest:
    """Write the manifest of everything in ``folder``; entries in ``known`` are not read again."""
    files = {}
    for path in files_of(folder):
        name = path.relative_to(folder).as_posix()
        files[name] = known[name] if name in known else file_entry(path)
    manifest = FolderManifest(save=save, files=files)
    manifest = dataclasses.replace(manifest, digest=_self_digest(manifest))
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def read_json(path: Path, kind: type[_T]) -> _T:
    """The JSON file at ``path``, one that is saved with a folder, as a value of ``kind``.

    Raises:
        CorruptCheckpoint: missing, unreadable, or not such a value.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as exc:
        raise CorruptCheckpoint(f"{path} is missing") from exc
    except OSError as exc:
        raise CorruptCheckpoint(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CorruptCheckpoint(
            f"{path} cannot be read: it is torn, was altered, or is of another version of offbeat"
        ) from exc


def load_manifest(folder: Path) -> FolderManifest:
    """Read the manifest of ``folder``; the files it names are not looked at.

    Raises:
        CorruptCheckpoint: missing, torn, altered, or of a format this version cannot read.
    """
    path = folder / MANIFEST_NAME
    manifest = read_json(path, FolderManifest)
    if manifest.save.format_version != FORMAT_VERSION:
        raise CorruptCheckpoint(
            f"{path} has format {manifest.save.format_version}, this version reads {FORMAT_VERSION}"
        )
    if manifest.digest != _self_digest(manifest):
        raise CorruptCheckpoint(f"{path} was altered after it was written")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not the one that was saved: its name in the folder, and what it is."""

    name: str
    what: str


def find_damage(folder: Path, manifest: FolderManifest) -> Iterator[Damage]:
    """Every file of ``manifest`` that is missing or of another content; reads all of ``folder``."""
    return _compare(folder, manifest, _other_content)


def find_other_sizes(folder: Path, manifest: FolderManifest) -> Iterator[Damage]:
    """Every file of ``manifest`` that is missing or of another size; reads none of them."""
    return _compare(folder, manifest, _other_size)


def _compare(
    folder: Path, manifest: FolderManifest, difference: Callable[[Path, FileEntry], str | None]
) -> Iterator[Damage]:
    for name, expected in manifest.files.items():
        try:
            what = difference(folder / name, expected)
        except FileNotFoundError:
            what = "is missing"
        except OSError as exc:
            what = f"cannot be read: {exc.strerror or exc}"
        if what is not None:
            yield Damage(name=name, what=what)


def _other_size(path: Path, expected: FileEntry) -> str | None:
    nbytes = path.stat().st_size
    if nbytes != expected.nbytes:
        return f"has {nbytes} bytes, the manifest says {expected.nbytes}"
    return None


def _other_content(path: Path, expected: FileEntry) -> str | None:
    size = _other_size(path, expected)
    if size is not None:
        return size
    digest = file_entry(path).digest
    if digest != expected.digest:
        return f"has xxh3 {digest}, the manifest says {expected.digest}"
    return None


def unknown_files(folder: Path, manifest: FolderManifest) -> tuple[str, ...]:
    """Names of the files in ``folder`` that ``manifest`` does not know."""
    names = (path.relative_to(folder).as_posix() for path in files_of(folder))
    return tuple(name for name in names if name not in manifest.files)


def verify(folder: Path) -> FolderManifest:
    """Prove that every file of ``folder`` is the one that was saved.

    Raises:
        CorruptCheckpoint: names the first file that is missing, of another size or of another hash.
    """
    manifest = load_manifest(folder)
    for damage in find_damage(folder, manifest):
        raise CorruptCheckpoint(f"{folder / damage.name} {damage.what}")
    return manifest


def is_good(folder: Path) -> bool:
    """Whether ``verify`` accepts ``folder``."""
    try:
        verify(folder)
    except CorruptCheckpoint:
        return False
    return True
