"""Load a Hugging Face decoder and call it on packed rows.

Owns: choosing the attention function, refusing what we would compute wrongly (naming it), and the
hidden states that engine and trainer share; the output head is ``linear.output_head``.
Knows no cache, no loss.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.errors import ConfigError, ModelError, boundary
from offbeat.model.attention import (
    ATTENTION,
    AttentionContext,
    PackedContext,
    PackedLayout,
    attention_forward,
)
from offbeat.model.linear import output_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# While it loads, transformers replaces methods of its classes for the whole process; two at once
# (inline workers) put back each other's replacement, and later models come out untied.
_LOADING = threading.Lock()

# Options of a model configuration that change logits in a way the shared head does not compute.
_UNSUPPORTED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)

# Rotary frequencies that depend on the longest sequence of the pass: a neighbor would change them.
_SHARED_ROPE = frozenset({"dynamic", "longrope"})


def resolve_device(name: str) -> torch.device:
    """``auto`` is the accelerator where there is one, else the CPU.

    Raises:
        ConfigError: ``name`` is a device that this machine does not have.
    """
    if name != "auto":
        device = torch.device(name)
        if device.type == "cuda":
            _require_cuda(device, torch.cuda.device_count())
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def _require_cuda(device: torch.device, count: int) -> None:
    if count == 0:
        raise ConfigError(
            f"model.device: {device} is asked for, but torch {torch.__version__} finds no CUDA "
            "device; set it to auto or cpu, or install a CUDA build of torch and its driver"
        )
    if (device.index or 0) >= count:
        raise ConfigError(
            f"model.device: {device} is asked for, but there are {count} CUDA devices, from cuda:0 "
            f"to cuda:{count - 1}"
        )


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """float32 on CPU and bfloat16 elsewhere unless named."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, max_len: int = 0
) -> PreTrainedModel:
    """A causal language model in ``dtype`` on ``device``, with offbeat's attention.

    Args:
        max_len: longest sequence it will be used on; a sliding window below it is refused here
            rather than at the first sequence that is longer.

    Raises:
        ModelError: no model at ``path``, not a decoder-only causal model, or a layer that is not
            standard softmax attention.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    AttentionInterface.register(ATTENTION, attention_forward)
    # A worker's log is read for errors, not for bars.
    disable_progress_bar()
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"model.path: {path} is a folder without a config.json; is it a Hugging Face model?"
        )
    if not Path(path).exists() and path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: {path} does not exist")
    with boundary(ModelError, f"loading the model at {path}"), _LOADING:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
        )
    _require_all_weights(path, info["missing_keys"])
    model = model.to(device).eval()
    _refuse_unsupported(model.config)
    _probe(model, max_len)
    return model


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, ctx: AttentionContext
) -> Tensor:
    """Last hidden states ``[N, hidden]`` of a packed row; both arguments are ``[N]`` int64."""
    out = model.base_model(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, ctx=ctx
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _require_all_weights(path: str, missing: Collection[str]) -> None:
    """transformers fills what a folder lacks with random numbers, and goes on."""
    if missing:
        raise ModelError(
            f"model.path: {path} has no weights for {len(missing)} tensors of the model, "
            f"{', '.join(sorted(missing)[:3])} among them: weights and config.json do not belong "
            "together, or the copy is not complete"
        )


def _refuse_unsupported(config: Any) -> None:
    for name in _UNSUPPORTED:
        value = getattr(config, name, None)
        if value not in (None, 0, 1, 1.0):
            raise ModelError(f"{config.model_type}: {name}={value} is not supported")
    for rope_type in sorted(_rope_types(config) & _SHARED_ROPE):
        raise ModelError(f"{config.model_type}: rope_type={rope_type} is not supported")


def _rope_types(config: Any) -> set[str]:
    """Of the whole model, or of each of its kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    return {str(t["rope_type"]) for t in tables if "rope_type" in t}


@torch.no_grad()
def _probe(model: PreTrainedModel, max_len: int) -> None:
    """Two short forward passes: every layer must come to our attention function exactly once, and
    the model's own logits must be what ``output_head`` makes of its hidden states.
    """
    seen: list[int] = []
    device = model.device
    layout = PackedLayout.build([5], device=device)
    longest = max(max_len, *layout.lengths)
    ctx = PackedContext(layout, lambda layer, _k, _v: seen.append(layer), longest=longest)
    tokens = torch.zeros(layout.tokens, dtype=torch.long, device=device)
    with boundary(ModelError, f"a first forward pass through {type(model).__name__}"):
        hidden = hidden_states(model, tokens, layout.positions, ctx)
        _require_plain_head(model, tokens, hidden, layout)
    layers = list(range(model.config.num_hidden_layers))
    if sorted(seen) != layers:
        missing = sorted(set(layers) - set(seen))
        raise ModelError(
            f"{type(model).__name__}: layers {missing} are not standard softmax attention; "
            "only decoder-only models whose every layer is are supported"
        )


def _require_plain_head(
    model: PreTrainedModel, tokens: Tensor, hidden: Tensor, layout: PackedLayout
) -> None:
    out = model(
        input_ids=tokens[None],
        position_ids=layout.positions[None],
        use_cache=False,
        ctx=PackedContext(layout),
    )
    logits = output_head(model).logits(hidden).float()
    if not torch.allclose(out.logits[0].float(), logits, rtol=1e-2, atol=1e-3, equal_nan=True):
        raise ModelError(
            f"{type(model).__name__} does more to its logits than its output layer: "
            "such a model is not supported"
        )
