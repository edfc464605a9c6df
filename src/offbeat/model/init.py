"""Make a tiny random Llama-style model with a character tokenizer, as a Hugging Face folder.

Owns the shape and the tokenizer of the models that train from nothing on a CPU in minutes. Does not
know how a model is loaded, served or trained. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import ModelError
from offbeat.model.folder import new_folder

if TYPE_CHECKING:
    from transformers import LlamaConfig

CHARACTERS = "0123456789+-*/=? .,:abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant, got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A model folder that was just written, and how large its parts are."""

    path: Path
    parameters: int
    vocab_size: int


def init_model(
    out_dir: str | Path,
    *,
    characters: str = CHARACTERS,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 176,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int | None = None,
    max_len: int = 256,
    rope_theta: float = 100.0,
    initializer_range: float = 0.02,
    tie: bool = False,
    seed: int = 1,
    chat: bool = False,
    overwrite: bool = False,
) -> NewModel:
    """Write a random model and its tokenizer to ``out_dir``.

    Each character of ``characters`` is one token, any other becomes ``<unk>``; decoding joins them
    without spaces. ``encode_prompt`` adds no ``<bos>``.

    Args:
        out_dir: folder to create; an existing non-empty one is refused unless ``overwrite``.
        characters: the alphabet, each character once; a small one is explored faster.
        layers, hidden, intermediate, heads, kv_heads, head_dim: shape of the Llama model; a
            ``head_dim`` of None is hidden / heads.
        max_len: longest sequence, in tokens.
        rope_theta: base of the rotary frequencies; 100 keeps all of them in use over short
            sequences.
        initializer_range: standard deviation of the initial weights.
        tie: share the embedding with the output layer.
        seed: of the weights.
        chat: add role tokens and a chat template for system, user and assistant.
        overwrite: replace an existing model folder.

    Raises:
        ModelError: a shape that is not possible, a repeated character, or a folder that may not be
            replaced.
    """
    shape = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads}
    _check_shape({**shape, "kv_heads": kv_heads, "max_len": max_len}, head_dim)
    vocab = _vocabulary(characters, chat)
    with new_folder(Path(out_dir), overwrite=overwrite) as folder:
        # Inside: a folder that is refused answers before seconds of importing.
        from transformers import LlamaConfig

        config = LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_len,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            initializer_range=initializer_range,
            tie_word_embeddings=tie,
            pad_token_id=vocab["<pad>"],
            bos_token_id=vocab["<bos>"],
            eos_token_id=vocab["<eos>"],
            architectures=["LlamaForCausalLM"],
            dtype="float32",
        )

        parameters = _write_model(config, seed, folder)
        write_tokenizer(folder, characters=characters, max_len=max_len, chat=chat)
    return NewModel(path=Path(out_dir), parameters=parameters, vocab_size=len(vocab))


def _check_shape(shape: dict[str, int], head_dim: int | None) -> None:
    for name, value in shape.items():
        if value < 1:
            raise ModelError(f"{name} must be at least 1, got {value}")
    hidden, heads, kv_heads = shape["hidden"], shape["heads"], shape["kv_heads"]
    if heads % kv_heads:
        raise ModelError(f"heads {heads} is not divisible by kv_heads {kv_heads}")
    if head_dim is not None:
        if head_dim < 2 or head_dim % 2:
            raise ModelError(f"head_dim {head_dim} must be even for rotary positions")
    elif hidden % heads:
        raise ModelError(f"hidden {hidden} is not divisible by heads {heads}; or give head_dim")
    elif (hidden // heads) % 2:
        raise ModelError(
            f"hidden {hidden} / heads {heads} = {hidden // heads} must be even for rotary positions"
        )


def _vocabulary(characters: str, chat: bool) -> dict[str, int]:
    repeated = sorted({c for c in characters if characters.count(c) > 1})
    if repeated:
        raise ModelError(f"characters has {', '.join(map(repr, repeated))} more than once")
    if not characters:
        raise ModelError("characters is empty; give at least one")
    tokens = [*SPECIAL_TOKENS, *(CHAT_TOKENS if chat else ()), *characters]
    return {token: index for index, token in enumerate(tokens)}


def _write_model(config: LlamaConfig, seed: int, folder: Path) -> int:
    """Save seeded random weights; the caller's random state is left as it was."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    # named_parameters lists a tied weight once, which is how a Hugging Face folder holds it.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return sum(weight.numel() for weight in weights.values())


def write_tokenizer(
    folder: Path, *, characters: str = CHARACTERS, max_len: int = 256, chat: bool = False
) -> dict[str, int]:
    """Write the tokenizer files of ``init_model``, without torch; returns the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocab = _vocabulary(characters, chat)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    special = [*SPECIAL_TOKENS, *(CHAT_TOKENS if chat else ())]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return vocab
