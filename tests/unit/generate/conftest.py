"""A tiny model with peaked distributions, engines over it, and requests."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from offbeat.data.tokens import TextCodec
from offbeat.generate.engine.engine import Engine
from offbeat.model.init import init_model
from offbeat.model.load import load_model
from offbeat.types import Completion, GenerateRequest, GroupId, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tests import the services of their processes by name, as the processes do through PYTHONPATH.
sys.path.append(str(Path(__file__).parent))

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]

MAX_LEN = 512


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large initial weights: distributions are far from uniform, so that a wrong key shows."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    return init_model(path, max_len=MAX_LEN, initializer_range=0.2, kv_heads=2).path


@pytest.fixture(scope="session")
def loaded(folder: Path) -> PreTrainedModel:
    """The model of ``folder``; never written to."""
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def model(loaded: PreTrainedModel) -> PreTrainedModel:
    """A copy that a test may change."""
    return copy.deepcopy(loaded)


@pytest.fixture(scope="session")
def codec(folder: Path) -> TextCodec:
    return TextCodec.open(folder)


@pytest.fixture(scope="session")
def make_engine(loaded: PreTrainedModel, codec: TextCodec) -> MakeEngine:
    def make(
        slots: int = 4,
        model: PreTrainedModel = loaded,
        max_len: int = MAX_LEN,
        *,
        recompute_kv: bool = False,
    ) -> Engine:
        return Engine(
            model,
            slots=slots,
            max_len=max_len,
            eos_token_ids=codec.eos_token_ids,
            decode=codec.decode,
            recompute_kv=recompute_kv,
        )

    return make


@pytest.fixture
def ask() -> Ask:
    """A request for ``n`` tokens after a prompt of ids or of a length; end of sequence ignored."""
    numbers = count()

    def make(
        prompt: Sequence[int] | int = 5,
        n: int = 8,
        *,
        seed: int | None = None,
        group: int = 0,
        sibling: int = 0,
        name: str | None = None,
        **options: object,
    ) -> GenerateRequest:
        number = next(numbers)
        if isinstance(prompt, int):
            prompt = np.random.default_rng(prompt).integers(7, 50, prompt)
        return GenerateRequest(
            request_id=name or f"r{number}",
            group_id=GroupId(group),
            sibling=sibling,
            turn=0,
            prompt_ids=np.asarray(prompt, dtype=np.int64),
            params=SamplingParams(**{"max_new_tokens": n, "ignore_eos": True, **options}),
            seed=number if seed is None else seed,
        )

    return make


@pytest.fixture(scope="session")
def run() -> Run:
    """Submit requests and step until all of them ended; completions by id, in order of ending."""

    def go(engine: Engine, *requests: GenerateRequest) -> dict[str, Completion]:
        for request in requests:
            engine.submit(request)
        ended: dict[str, Completion] = {}
        while engine.running or engine.waiting:
            ended |= {r.request_id: c for r, c in engine.step()}
        return ended

    return go
