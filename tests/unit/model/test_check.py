"""What is refused of a model folder before it is loaded, and what is not."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from offbeat.errors import ModelError
from offbeat.model.check import check_folder, check_vocabulary

TENSOR = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}


def weights(path: Path, header: object = TENSOR, nbytes: int = 16) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder in two parts, with metadata as transformers writes it."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"vocab_size": 50}')
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        weights(made / name, {"__metadata__": {"format": "pt"}, **TENSOR})
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)


def test_weights_without_tensors_pass(folder: Path) -> None:
    weights(folder / "model-00001-of-00002.safetensors", {}, 0)
    check_folder(folder)


def test_pickled_weights_are_left_to_whoever_loads_them(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        check_folder(folder)
    (folder / "pytorch_model.bin").touch()
    check_folder(folder)


def test_every_missing_part_is_named_once(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError) as caught:
        check_folder(folder)
    for number in (1, 2):
        assert str(caught.value).count(f"model-0000{number}-of-00002.safetensors") == 1


@pytest.mark.parametrize("kept", [0, 5, 30, -1])
def test_weights_that_are_cut_anywhere_are_refused(folder: Path, kept: int) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"model\.path: {file} is cut short.* bytes; copy or"):
        check_folder(folder)


@pytest.mark.parametrize("header", [[], {"w": {}}, {"w": 3}])
def test_a_header_that_is_none_is_refused_with_the_file(folder: Path, header: object) -> None:
    weights(folder / "model-00002-of-00002.safetensors", header)
    with pytest.raises(ModelError, match=r"model\.path: reading .*model-00002-of"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "there is no folder .*absent; make a tiny model"),
        ("model/config.json", "is a file; a GGUF file becomes a folder with `offbeat model import"),
        (".", "has no config.json"),
    ],
)
def test_what_is_no_model_folder_is_refused(folder: Path, name: str, says: str) -> None:
    with pytest.raises(ModelError, match=rf"^model\.path: .*{says}"):
        check_folder(folder.parent / name)


def test_a_name_of_the_hub_is_refused_with_the_way_to_fetch_it() -> None:
    with pytest.raises(ModelError, match="`hf download some/model --local-dir some/model`"):
        check_folder(Path("some/model"))


def test_a_tokenizer_may_have_fewer_tokens_than_the_model_but_not_more(folder: Path) -> None:
    for tokens in (1, 49, 50):
        check_vocabulary(folder, tokens)
    with pytest.raises(ModelError, match=r"has 51 tokens, its model 50 \(vocab_size in config"):
        check_vocabulary(folder, 51)


def test_a_model_that_does_not_tell_its_vocabulary_is_not_judged(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    check_vocabulary(folder, 10**6)
