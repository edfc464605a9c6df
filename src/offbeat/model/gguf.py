"""Import a GGUF file as a complete Hugging Face folder, tokenizer and chat template included.

Owns the conversion only: quantized blocks are unpacked to floats once, afterwards the folder is a
    model like any
other. Needs the optional ``gguf`` package (``offbeat[gguf]``) and no ``accelerate``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.errors import ModelError, boundary
from offbeat.model.folder import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
_MAGIC = b"GGUF"


def import_gguf(
    file: str | Path, out_dir: str | Path, *, dtype: str = "float32", overwrite: bool = False
) -> Path:
    """Unpack ``file`` into the model folder ``out_dir`` and return its path.

    Tied weights are saved once. The folder's weights are what the quantized file holds, not the
    model that was quantized.

    Args:
        file: a GGUF file with weights and tokenizer.
        out_dir: folder to create; an existing non-empty one is refused unless ``overwrite``.
        dtype: of the saved weights; one of ``DTYPES``.
        overwrite: replace an existing model folder.

    Raises:
        ModelError: ``gguf`` not installed, ``file`` missing or not a GGUF file, an architecture
            that transformers cannot read, or a folder that may not be replaced.
    """
    source = Path(file).expanduser()
    _check_source(source, dtype)
    with (
        new_folder(Path(out_dir), overwrite=overwrite) as folder,
        boundary(ModelError, f"importing {source}"),
    ):
        from transformers import AutoTokenizer

        _load_model(source, dtype).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        tokenizer.save_pretrained(folder)
    return Path(out_dir)


def _check_source(source: Path, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not source.is_file():
        raise ModelError(f"{source} is not a file")
    with source.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ModelError(f"{source} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "reading GGUF needs the gguf package, which is not installed: "
            "pip install gguf (offbeat's extra gguf)"
        )


def _load_model(source: Path, dtype: str) -> PreTrainedModel:
    """The model with its unpacked weights.

    ``from_pretrained(gguf_file=...)`` insists on accelerate and may keep the blocks packed; reading
    the tensors and assigning them to a model built without storage needs neither.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=getattr(torch, dtype)
    )
    model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise ModelError(f"{source} has no weights for {', '.join(absent[:5])}")
    return model
