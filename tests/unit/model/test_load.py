"""Families of models either give the logits of their eager selves or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.errors import ConfigError, ModelError
from offbeat.generate.engine.engine import Engine
from offbeat.model.attention import PackedContext, PackedLayout
from offbeat.model.linear import output_head
from offbeat.model.load import (
    hidden_states,
    load_model,
    resolve_device,
    resolve_dtype,
)
from offbeat.types import GenerateRequest, GroupId, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Save = Callable[..., Path]
CPU = torch.device("cpu")
VOCAB = 64


@pytest.fixture
def save(tmp_path: Path, save_family: Callable[..., Path]) -> Save:
    """``save(case, **options)``: a tiny random model for contexts of 64 tokens."""

    def write(case: str, **options: object) -> Path:
        return save_family(case, tmp_path / "m", vocab=VOCAB, max_len=64, **options)

    return write


def load(folder: Path, max_len: int = 0) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, device=CPU, max_len=max_len)


def eager_logprobs(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return torch.log_softmax(model(ids[None]).logits[0].double(), -1)


@torch.no_grad()
def packed_logprobs(model: PreTrainedModel, rows: list[Tensor]) -> list[Tensor]:
    layout = PackedLayout.build([len(r) for r in rows], device=CPU)
    hidden = hidden_states(
        model, layout.pack([r.numpy() for r in rows]), layout.positions, PackedContext(layout)
    )
    logits = output_head(model).logits(hidden).double()
    full = torch.log_softmax(logits, -1)
    return [full[s : s + len(r)] for s, r in zip(layout.starts, rows, strict=True)]


def generate(model: PreTrainedModel, prompts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Answers of 12 tokens and their log-probs by the engine."""
    engine = Engine(model, slots=2, max_len=64, eos_token_ids=(), decode=str)
    for i, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=str(i),
            group_id=GroupId(i),
            sibling=0,
            turn=0,
            prompt_ids=prompt.numpy(),
            params=SamplingParams(max_new_tokens=12),
            seed=i,
        )
        engine.submit(request)
    ended = {}
    while len(ended) < len(prompts):
        ended |= {r.request_id: c for r, c in engine.step()}
    answers = [ended[str(i)] for i in range(len(prompts))]
    return [(torch.from_numpy(a.token_ids), torch.from_numpy(a.logprobs)) for a in answers]


def test_families_that_load_give_the_logprobs_of_their_eager_selves(
    family: str, save: Save
) -> None:
    folder = save(family)
    model = load(folder, max_len=64)
    rows = [torch.arange(3, 3 + n) % VOCAB for n in (5, 40, 13)]
    for row, ours in zip(rows, packed_logprobs(model, rows), strict=True):
        assert float((ours - eager_logprobs(folder, row)).abs().max()) < 1e-4
    for prompt, (answer, recorded) in zip(rows, generate(model, rows), strict=True):
        eager = eager_logprobs(folder, torch.cat([prompt, answer]))[len(prompt) - 1 : -1]
        expected = eager.gather(1, answer[:, None])[:, 0]
        assert float((recorded - expected).abs().max()) < 1e-4


REFUSED = {
    "gemma2": ({"head_dim": 16}, "gemma2: final_logit_softcapping=30.0 is not supported"),
    "gemma2-attention": (
        {"head_dim": 16, "final_logit_softcapping": None},
        "gemma2: attn_logit_softcapping=50.0 is not supported",
    ),
    "cohere": ({}, "cohere: logit_scale=0.0625 is not supported"),
    "gemma3_text": (
        {"head_dim": 16, "sliding_window": 63},
        r"layer 0 \(Gemma3Attention\) needs sliding_window=63 \(less than the 64 tokens in use",
    ),
    "mistral": (
        {"sliding_window": 16, "head_dim": 8},
        r"layer 0 \(MistralAttention\) needs sliding_window=16",
    ),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        r"layer 1 \(Qwen2Attention\) needs sliding_window=16",
    ),
    "qwen3": (
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        r"layer 0 \(Qwen3Attention\) needs sliding_window=16",
    ),
    "gpt_oss": (
        {"head_dim": 8, "num_local_experts": 2, "rope_parameters": None},
        r"layer 0 \(GptOssAttention\) needs s_aux=a tensor",
    ),
    "llama": (
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 2.0,
            }
        },
        "llama: rope_type=dynamic is not supported",
    ),
    "bloom": ({}, r"BloomForCausalLM: layers \[0, 1\] are not standard softmax attention"),
    "mamba": ({}, r"MambaForCausalLM: layers \[0, 1\] are not standard softmax attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(case: str, save: Save) -> None:
    options, message = REFUSED[case]
    folder = save(case.partition("-")[0], **options)
    with pytest.raises(ModelError, match=message):
        load(folder, max_len=64)


def test_a_window_below_a_sequence_is_refused_at_that_sequence_when_no_length_was_given(
    save: Save,
) -> None:
    model = load(save("mistral", sliding_window=16, head_dim=8))
    packed_logprobs(model, [torch.arange(16)])
    with pytest.raises(ModelError, match=r"sliding_window=16 \(less than the 17 tokens in use\)"):
        packed_logprobs(model, [torch.arange(17)])


def test_a_model_that_scales_its_logits_itself_is_refused(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught by comparing logits, under whatever name the option goes."""
    monkeypatch.setattr("offbeat.model.load._UNSUPPORTED", ())
    for family, options in (("cohere", {"logit_scale": 0.5}), ("granite", {"logits_scaling": 4.0})):
        folder = save(family, **options)
        with pytest.raises(ModelError, match="does more to its logits than its output layer"):
            load(folder)


def test_missing_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty is a folder without a config\.json"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"loading the model at .*empty"):
        load(tmp_path / "empty")


def test_a_loaded_model_is_in_evaluation_mode_and_in_the_dtype_asked_for(save: Save) -> None:
    model = load_model(str(save("llama")), dtype=torch.bfloat16, device=CPU)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_devices_and_dtypes_resolve() -> None:
    assert resolve_device("cpu") == CPU
    found = resolve_device("auto")
    assert (found.type == "cpu") == (not torch.accelerator.is_available())
    assert resolve_dtype(None, CPU) is torch.float32
    assert resolve_dtype(None, torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("bfloat16", CPU) is torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.device: cuda:1 .* finds no CUDA device; set it"):
        resolve_device("cuda:1")


def test_weights_that_lack_a_tensor_are_refused_instead_of_made_up(save: Save) -> None:
    folder = save("llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for 1 tensors .*layers\.1\.mlp\.up_proj"):
        load(folder)
