"""What a model folder says of itself, checked before seconds are spent on loading it.

Owns the refusals that need no torch: not a folder, no configuration, weights that are missing or
cut short, a tokenizer with more tokens than the model knows. Whether the layers are supported shows
when the model is loaded (``load``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from offbeat.errors import ModelError, boundary
from offbeat.model.hub import is_hub_name

KEY = "model.path"
CONFIG = "config.json"
_INDEX = "*.safetensors.index.json"
_HEADER = struct.Struct("<Q")
"""Start of a safetensors file: bytes of the JSON header that follows."""


def check_folder(folder: Path) -> None:
    """Refuse what is no complete model folder.

    Raises:
        ModelError: names the folder or file, and the way out.
    """
    if not folder.is_dir():
        raise ModelError(f"{KEY}: {_not_there(folder)}")
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{KEY}: {folder} has no {CONFIG}: not a model folder; name the folder that has it"
        )
    found = sorted(folder.glob("*.safetensors"))
    missing = [name for name in _shards(folder) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{KEY}: {folder} lacks {', '.join(missing[:5])}, which its weights' index names: the "
            "download or copy is not complete"
        )
    if not found and not any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{KEY}: {folder} has no weights (model.safetensors): the download or copy is not "
            "complete"
        )
    for file in found:
        _check_whole(file)


def check_vocabulary(folder: Path, tokens: int) -> None:
    """Refuse a tokenizer that has more ``tokens`` than the model has embeddings.

    Raises:
        ModelError: names both numbers.
    """
    known = _object(folder / CONFIG).get("vocab_size")
    if isinstance(known, int) and tokens > known:
        raise ModelError(
            f"{KEY}: the tokenizer of {folder} has {tokens} tokens, its model {known} (vocab_size "
            f"in {CONFIG}): they do not belong together, or tokens were added without resizing the "
            "embedding"
        )


def _not_there(folder: Path) -> str:
    if folder.is_file():
        return (
            f"{folder} is a file; a GGUF file becomes a folder with `offbeat model import {folder} "
            "FOLDER`"
        )
    text = f"there is no folder {folder}; "
    if is_hub_name(str(folder)):
        text += f"a model of the hub becomes one with `hf download {folder} --local-dir {folder}`; "
    return (
        f"{text}make a tiny model with `offbeat model init {folder}`, import one with `offbeat "
        f"model import FILE.gguf {folder}`, or name another"
    )


def _shards(folder: Path) -> Iterator[str]:
    """Names of the files that hold the weights, as far as an index names them; each once."""
    for index in folder.glob(_INDEX):
        names = _object(index).get("weight_map")
        if isinstance(names, dict):
            yield from sorted(set(map(str, names.values())))


def _check_whole(file: Path) -> None:
    """A safetensors file is as long as its header says; reads the header only."""
    with boundary(ModelError, f"{KEY}: reading {file}"), file.open("rb") as stream:
        size = file.stat().st_size
        start = stream.read(_HEADER.size)
        length = _HEADER.unpack(start)[0] if len(start) == _HEADER.size else size
        if _HEADER.size + length > size:
            raise ModelError(_torn(file, size))
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
    wanted = _HEADER.size + length + max(ends, default=0)
    if size < wanted:
        raise ModelError(_torn(file, size, f" of {wanted}"))


def _torn(file: Path, size: int, of: str = "") -> str:
    return (
        f"{KEY}: {file} is cut short or no safetensors file: it has {size}{of} bytes; copy or "
        "download it again"
    )


def _object(file: Path) -> Mapping[str, object]:
    with boundary(ModelError, f"{KEY}: reading {file}"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{KEY}: {file} must hold a JSON object, got {type(content).__name__}")
    return content
