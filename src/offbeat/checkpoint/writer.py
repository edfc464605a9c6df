"""Writes one Hugging Face folder or one snapshot, and the background process that does so.

Owns the files of a saved folder and the child's side of the conversation; knows no torch, no
schedule and no event loop. Run as ``python -m offbeat.checkpoint.writer <parent pid> <nice>``: one
job per line of stdin (JSON), and per job ``Copied`` (if the job is detached: the source may be
overwritten from then on), then ``Done`` or ``Failed`` on stdout. It ends when stdin closes, and
dies with its parent.

JSON lines because a line is read whole or not at all: a caller canceled while it waits leaves the
stream in order.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec
import xxhash

from offbeat.checkpoint.folders import flush, point_latest, prune, replacing, sweep
from offbeat.checkpoint.manifest import FileEntry, FolderManifest, SaveManifest, seal
from offbeat.errors import CheckpointError, OffbeatError, boundary
from offbeat.types import WeightUpdate
from offbeat.weights.layout import read_layout

WEIGHTS_NAME = "model.safetensors"
TENSORS_NAME = "trainer.safetensors"
STATE_NAME = "state.json"
CONFIG_NAME = "config.json"
TEMPLATE_PATTERNS = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""What a saved folder takes from the model it started from: never weights, never their index."""

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK = 1 << 20
_PR_SET_PDEATHSIG = 1


class SaveJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One model folder to write. ``detach``: copy the weights first and say so."""

    weights: WeightUpdate
    save: SaveManifest
    template_dir: str
    checkpoints_dir: str
    out_dir: str
    keep_last: int | None
    keep_every: int | None
    detach: bool


class SnapshotJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One snapshot to write: ``tensors``, which stay as they are until it is done, and ``state`` as
    text. ``needs`` are files that a run resumed from it reads too: they are flushed before.
    """

    tensors: WeightUpdate
    state: str
    save: SaveManifest
    snapshots_dir: str
    out_dir: str
    needs: tuple[str, ...]
    keep: int


Job: TypeAlias = SaveJob | SnapshotJob


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The writer holds its own verified copy of the weights."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The folder is in place and flushed; ``latest`` names it if it is a model's."""

    nbytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The folder was not written; ``error`` is a class name of ``offbeat.errors``."""

    error: str
    text: str


Reply: TypeAlias = Copied | Done | Failed


def write_hf_folder(
    weights: WeightUpdate, template_dir: Path, out_dir: Path, save: SaveManifest
) -> FolderManifest:
    """Write a complete Hugging Face folder to ``out_dir``, or nothing.

    Args:
        weights: a safetensors file; must stay as it is until this returns.
        template_dir: the model folder to take configuration, tokenizer and chat template from.
        out_dir: appears by a rename; a folder that is already there is replaced.
        save: what the manifest says about the origin.

    Raises:
        CheckpointError: the disk refused, the template is incomplete, or the bytes written are not
            the announced ones; nothing appears at ``out_dir`` then.
    """
    return _write(_mapped(weights), weights, template_dir, out_dir, save)


def _write(
    content: memoryview,
    weights: WeightUpdate,
    template_dir: Path,
    out_dir: Path,
    save: SaveManifest,
) -> FolderManifest:
    with boundary(CheckpointError, f"write {out_dir}"), replacing(out_dir) as aside:
        _copy_template(template_dir, aside, dtype=_torch_dtype(content))
        entry = _write_weights(content, aside / WEIGHTS_NAME)
        _require_digest(entry.digest, weights, f"written to {out_dir}")
        return seal(aside, save, known={WEIGHTS_NAME: entry})


def _require_digest(found: str, weights: WeightUpdate, what: str) -> None:
    if found != weights.digest:
        raise CheckpointError(
            f"the weights {what} have digest {found}, version {weights.version} was announced "
            f"with {weights.digest}: the source was torn, or overwritten while it was read"
        )


def _write_weights(content: memoryview, path: Path) -> FileEntry:
    digest = xxhash.xxh3_128()
    with path.open("xb") as file:
        for start in range(0, len(content), _CHUNK):
            chunk = content[start : start + _CHUNK]
            digest.update(chunk)
            file.write(chunk)
    return FileEntry(nbytes=len(content), digest=str(digest.hexdigest()))


def _torch_dtype(content: memoryview) -> str | None:
    codes = {placed.spec.dtype for placed in read_layout(content).tensors} & _TORCH_NAMES.keys()
    return _TORCH_NAMES[codes.pop()] if len(codes) == 1 else None


def _copy_template(template_dir: Path, folder: Path, *, dtype: str | None) -> None:
    found = {p for pattern in TEMPLATE_PATTERNS for p in template_dir.glob(pattern)}
    if template_dir / CONFIG_NAME not in found:
        raise CheckpointError(f"the model folder {template_dir} has no {CONFIG_NAME}")
    for source in sorted(found):
        target = folder / source.relative_to(template_dir)
        target.parent.mkdir(exist_ok=True)
        raw = source.read_bytes()
        target.write_bytes(_with_dtype(raw, dtype) if source.name == CONFIG_NAME else raw)


def _with_dtype(config: bytes, dtype: str | None) -> bytes:
    """``config`` with its dtype entry set to what the weights are.

    Readers load in the dtype that the configuration names: float32 weights under a bfloat16 entry
    would lose bits.
    """
    entries = json.loads(config)
    stale = [key for key in ("dtype", "torch_dtype") if entries.get(key) not in (None, dtype)]
    if dtype is None or not stale:
        return config
    return json.dumps({**entries, **dict.fromkeys(stale, dtype)}, indent=2).encode() + b"\n"


@contextmanager
def _opened(weights: WeightUpdate) -> Iterator[int]:
    fd = os.open(weights.uri, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size != weights.nbytes:
            raise CheckpointError(
                f"{weights.uri} has {size} bytes, version {weights.version} was announced "
                f"with {weights.nbytes}"
            )
        yield fd
    finally:
        os.close(fd)


def _mapped(weights: WeightUpdate) -> memoryview:
    with boundary(CheckpointError, f"open the weights at {weights.uri}"), _opened(weights) as fd:
        # Never closed by hand: a traceback may still hold a slice, and closing would then fail.
        return memoryview(mmap.mmap(fd, weights.nbytes, prot=mmap.PROT_READ))


class _PrivateCopy:
    """Anonymous memory for the weights, kept between jobs so that its pages fault only once."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def take(self, weights: WeightUpdate) -> memoryview:
        """Copy and verify ``weights``. The view is the caller's until the next call."""
        with boundary(CheckpointError, f"copy the weights from {weights.uri}"):
            if len(self._memory) < weights.nbytes:
                self._memory = mmap.mmap(-1, weights.nbytes)
            view = memoryview(self._memory)[: weights.nbytes]
            with _opened(weights) as fd:
                _require_digest(_read_into(view, fd), weights, f"copied from {weights.uri}")
        return view


def _read_into(view: memoryview, fd: int) -> str:
    digest, start = xxhash.xxh3_128(), 0
    while start < len(view):
        count = os.preadv(fd, [view[start : start + _CHUNK]], start)
        if count == 0:
            raise CheckpointError(f"the weights end at byte {start} of {len(view)}")
        digest.update(view[start : start + count])
        start += count
    return str(digest.hexdigest())


def write_snapshot(
    tensors: WeightUpdate, state: str, out_dir: Path, save: SaveManifest
) -> FolderManifest:
    """Write a complete snapshot to ``out_dir``, or nothing.

    Args:
        tensors: a safetensors file; must stay as it is until this returns.
        state: the text of ``state.json``.
        out_dir: appears by a rename; a folder that is already there is replaced.
        save: what the manifest says about the origin.

    Raises:
        CheckpointError: as ``write_hf_folder``.
    """
    content = _mapped(tensors)
    with boundary(CheckpointError, f"write {out_dir}"), replacing(out_dir) as aside:
        entry = _write_weights(content, aside / TENSORS_NAME)
        _require_digest(entry.digest, tensors, f"written to {out_dir}")
        (aside / STATE_NAME).write_text(state, encoding="utf-8")
        return seal(aside, save, known={TENSORS_NAME: entry})


def _snapshot(job: SnapshotJob) -> FolderManifest:
    there = Path(job.snapshots_dir)
    with boundary(CheckpointError, f"tidy {there}"):
        sweep(there)
        for needed in map(Path, job.needs):
            if needed.exists():
                flush(needed)
    manifest = write_snapshot(job.tensors, job.state, Path(job.out_dir), job.save)
    with boundary(CheckpointError, f"tidy {there}"):
        prune(there, job.keep)
    return manifest


def _save(job: SaveJob, private: _PrivateCopy, replies: BinaryIO) -> FolderManifest:
    out_dir, template_dir = Path(job.out_dir), Path(job.template_dir)
    checkpoints_dir = Path(job.checkpoints_dir)
    if job.detach:
        content = private.take(job.weights)
        _send(replies, Copied())
    else:
        content = _mapped(job.weights)
    with boundary(CheckpointError, f"tidy {checkpoints_dir}"):
        sweep(checkpoints_dir)
    manifest = _write(content, job.weights, template_dir, out_dir, job.save)
    with boundary(CheckpointError, f"tidy {checkpoints_dir}"):
        point_latest(out_dir)
        prune(checkpoints_dir, job.keep_last, job.keep_every)
    return manifest


def _run(job: Job, private: _PrivateCopy, replies: BinaryIO) -> Done:
    started = time.monotonic()
    manifest = _snapshot(job) if isinstance(job, SnapshotJob) else _save(job, private, replies)
    nbytes = sum(entry.nbytes for entry in manifest.files.values())
    return Done(nbytes=nbytes, seconds=time.monotonic() - started)


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")
    replies.flush()


def serve(jobs: BinaryIO, replies: BinaryIO) -> None:
    """Write the folders that ``jobs`` asks for, one after the other, until it ends."""
    private = _PrivateCopy()
    for line in jobs:
        job = msgspec.json.decode(line, type=Job)
        try:
            with boundary(CheckpointError, "save"):
                reply: Reply = _run(job, private, replies)
        except OffbeatError as exc:
            reply = Failed(error=type(exc).__name__, text=str(exc)[:4000])
        _send(replies, reply)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above took effect
        sys.exit(1)


def main() -> None:
    """Entry point of the background process."""
    parent, nice = (int(arg) for arg in sys.argv[1:])
    _die_with(parent)
    os.nice(nice)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
