"""Tiny random models: complete folders, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.errors import ModelError
from offbeat.model.init import CHARACTERS, init_model


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_folder_loads_with_the_auto_classes(tmp_path: Path) -> None:
    made = init_model(tmp_path / "m", chat=True, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(made.path)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert sum(p.numel() for p in model.parameters()) == made.parameters
    assert made.vocab_size == len(tokenizer) == model.config.vocab_size
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.bos_token_id == 1
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.1)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("12+3=")["input_ids"]])).logits
    assert logits.shape == (1, 5, made.vocab_size)
    assert torch.isfinite(logits).all()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
    assert text == "<|user|>1"


def test_default_model_is_small_and_its_heads_are_wide_enough(tmp_path: Path) -> None:
    made = init_model(tmp_path / "m")
    config = AutoModelForCausalLM.from_pretrained(made.path).config
    assert 100_000 <= made.parameters <= 200_000
    assert config.head_dim % 16 == 0


def test_characters_are_tokens_and_join_without_spaces(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(init_model(tmp_path / "m").path)
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert ids == list(range(4, 4 + len(CHARACTERS)))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("1Ä\n2")["input_ids"] == [5, 3, 3, 6]
    assert tokenizer.decode([1, 5, 3, 6, 2], skip_special_tokens=True) == "12"


@pytest.mark.parametrize("tie", [True, False])
def test_same_arguments_give_the_same_bytes(tmp_path: Path, tie: bool) -> None:
    state = torch.get_rng_state()
    first = contents(init_model(tmp_path / "a", seed=3, tie=tie).path)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert contents(init_model(tmp_path / "b", seed=3, tie=tie).path) == first
    other = contents(init_model(tmp_path / "c", seed=4, tie=tie).path)
    assert {name for name in other if other[name] != first[name]} == {"model.safetensors"}


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    made = init_model(tmp_path / "m", tie=True)
    with safe_open(made.path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (not a mapping)
    model = AutoModelForCausalLM.from_pretrained(made.path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 65}, "hidden 65 is not divisible by heads 4"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"hidden": 12}, "hidden 12 / heads 4 = 3 must be even"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"characters": "aba"}, "characters has 'a' more than once"),
        ({"characters": ""}, "characters is empty"),
    ],
)
def test_impossible_shape_is_named_and_nothing_is_written(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        init_model(tmp_path / "m", **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_replaced_only_on_request(tmp_path: Path) -> None:
    made = init_model(tmp_path / "m", seed=1)
    (made.path / "mine.txt").write_text("x")
    before = contents(made.path)
    with pytest.raises(ModelError, match="exists and is not empty"):
        init_model(made.path, seed=2)
    assert contents(made.path) == before
    init_model(made.path, seed=2, overwrite=True)
    assert set(contents(made.path)) == set(before) - {"mine.txt"}
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
