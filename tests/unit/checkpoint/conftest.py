"""A model folder to take the template from, and weights as the trainer announces them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from offbeat.types import PolicyVersion, WeightUpdate
from offbeat.weights.layout import TensorSpec, digest_of, lay_out


def weights_file(path: Path, seed: int, *, elements: int = 50_000) -> WeightUpdate:
    """A safetensors file of one float32 tensor filled from ``seed``; overwrites in place."""
    layout = lay_out([TensorSpec(name="w", dtype="F32", shape=(elements,))])
    values = np.random.default_rng(seed).random(elements, dtype=np.float32)
    content = layout.header + values.tobytes()
    with path.open("r+b" if path.exists() else "xb") as file:
        file.write(content)
    return WeightUpdate(
        version=PolicyVersion(seed), uri=str(path), nbytes=layout.nbytes, digest=digest_of(content)
    )


@pytest.fixture
def make_weights(tmp_path: Path) -> Callable[..., WeightUpdate]:
    """Like a publisher: every call overwrites the one buffer with the weights of that version."""
    return partial(weights_file, tmp_path / "weights.safetensors")


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    (folder / "model-00001-of-00002.safetensors").write_text("old weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder
