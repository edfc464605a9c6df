"""Models of the Hugging Face hub: a name to a local folder.

Owns what is fetched and what is said when it cannot be; knows nothing of what is in the files. The
cache and the switches (``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``) are those of huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.errors import ModelError, boundary

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Weights in the one format that is loaded, tokenizer and configurations."""

_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether ``name`` has the form ORGANIZATION/MODEL."""
    return _NAME.fullmatch(name) is not None


def fetch_model(name: str) -> Path:
    """The folder of the model called ``name``, from the cache or through the network.

    Raises:
        ModelError: it is neither in the cache nor can it be fetched.
    """
    from huggingface_hub import snapshot_download

    way_out = (
        f"{name} is no folder and no run here, and could not be fetched from the Hugging Face hub; "
        f"without a network, fetch it elsewhere (`hf download {name} --local-dir FOLDER`) and name "
        "the folder"
    )
    with boundary(ModelError, way_out):
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
