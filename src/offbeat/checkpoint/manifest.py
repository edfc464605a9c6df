"""What a folder must hold: sizes and hashes of all its files, and which weights they are.

Owns ``manifest.json`` and the check of a folder against it; knows no weights and no processes. A
reader refuses what it cannot verify.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from offbeat.errors import CorruptCheckpoint
from offbeat.types import PolicyVersion
from offbeat.weights.layout import digest_of

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_CHUNK = 1 << 22


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


def load_manifest(folder: Path) -> FolderManifest:
    """Read the manifest of ``folder``; the files it names are not looked at.

    Raises:
        CorruptCheckpoint: missing, torn, altered, or of a format this version cannot read.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=FolderManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CorruptCheckpoint(f"{path} cannot be read: {type(exc).__name__}: {exc}") from exc
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
    for name, expected in manifest.files.items():
        what = _difference(folder / name, expected)
        if what is not None:
            yield Damage(name=name, what=what)


def _difference(path: Path, expected: FileEntry) -> str | None:
    try:
        nbytes = path.stat().st_size
        if nbytes != expected.nbytes:
            return f"has {nbytes} bytes, the manifest says {expected.nbytes}"
        digest = file_entry(path).digest
    except FileNotFoundError:
        return "is missing"
    except OSError as exc:
        return f"cannot be read: {exc}"
    if digest != expected.digest:
        return f"has xxh3 {digest}, the manifest says {expected.digest}"
    return None


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
