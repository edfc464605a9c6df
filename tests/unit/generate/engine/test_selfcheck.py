"""The start-up comparison sees a difference where there is one, and tries what is in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.data.tokens import TextCodec
from offbeat.generate.engine import selfcheck
from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.selfcheck import compare_paths, packed_logprobs
from offbeat.model.linear import linear_shapes, pack_for_inference, packing_works
from offbeat.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[..., Engine]
Finished = list[tuple[GenerateRequest, Completion]]
MAX_LEN = 512


class Watched(Engine):
    """The real engine; keeps what was asked of it, and may change what is recorded of a request."""

    def __init__(
        self,
        model: PreTrainedModel,
        codec: TextCodec,
        spoiled: str = "",
        max_len: int = MAX_LEN,
    ) -> None:
        super().__init__(model, slots=4, max_len=max_len, eos_token_ids=(), decode=codec.decode)
        self.asked: list[GenerateRequest] = []
        self.busy: list[int] = []
        self._spoiled = spoiled

    def submit(self, request: GenerateRequest) -> None:
        self.asked.append(request)
        self.busy.append(self.running)
        super().submit(request)

    def step(self) -> Finished:
        return [
            (r, off_by_a_bit(c) if r.request_id == self._spoiled else c) for r, c in super().step()
        ]


def off_by_a_bit(completion: Completion) -> Completion:
    """The last log-prob is the neighboring number."""
    logp = completion.logprobs.copy()
    logp[-1] = np.nextafter(logp[-1], np.float32(0))
    return dataclasses.replace(completion, logprobs=logp)


@pytest.mark.invariant("I07")
@pytest.mark.parametrize("max_len", [512, 193, 40, 12, 5, 3, 2])
def test_all_paths_agree_here_whatever_the_context(
    loaded: PreTrainedModel, make_engine: MakeEngine, max_len: int
) -> None:
    found = compare_paths(loaded, make_engine(max_len=max_len), max_len=max_len)
    assert (found.bitwise, found.max_error) == (True, 0.0)


def test_packed_linear_layers_are_compared_as_they_are(
    model: PreTrainedModel, codec: TextCodec
) -> None:
    if not packing_works(torch.float32, linear_shapes(model)):
        pytest.skip("torch has no usable oneDNN products here")
    pack_for_inference(model)
    assert compare_paths(model, Watched(model, codec), max_len=MAX_LEN).bitwise


def test_an_engine_over_other_weights_is_told_apart(
    loaded: PreTrainedModel, model: PreTrainedModel, make_engine: MakeEngine
) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight[7].mul_(1.01)
    found = compare_paths(loaded, make_engine(model=model), max_len=512)
    assert not found.bitwise
    assert found.max_error > 1e-5


def test_siblings_of_every_bucket_are_tried_while_slots_are_given_away(
    loaded: PreTrainedModel, codec: TextCodec
) -> None:
    engine = Watched(loaded, codec)
    assert compare_paths(loaded, engine, max_len=MAX_LEN).bitwise
    spans = [(len(r.prompt_ids), r.params.max_new_tokens) for r in engine.asked]
    for edge in (16, 192, 384):
        across = [n for n, new in spans if n < edge <= n + new - 1]
        assert len(across) == 2
    assert max(n + new for n, new in spans) == MAX_LEN
    assert len({r.prompt_ids.tobytes() for r in engine.asked}) == len(engine.asked) // 2
    # Some come while others decode, and all of them do not fit the slots.
    assert any(engine.busy)
    assert len(engine.asked) > engine.slots
    assert len({new for _, new in spans}) > 2


def test_one_bit_in_any_answer_is_found(loaded: PreTrainedModel, codec: TextCodec) -> None:
    engine = Watched(loaded, codec)
    compare_paths(loaded, engine, max_len=MAX_LEN)
    for request in engine.asked:
        found = compare_paths(
            loaded, Watched(loaded, codec, spoiled=request.request_id), max_len=MAX_LEN
        )
        assert not found.bitwise
        assert 0 < found.max_error < 1e-6


def test_a_shared_prefix_is_scored_as_a_prefix_and_each_row_by_itself_too(
    loaded: PreTrainedModel, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two passes alone finds what only it computes differently."""
    real: Callable[..., Any] = packed_logprobs
    for broken in (True, False):

        def scored(*args: Any, shared: bool, broken: bool = broken) -> Any:
            logp = real(*args, shared=shared)
            return logp + np.float32(1e-5) if shared == broken else logp

        monkeypatch.setattr(selfcheck, "packed_logprobs", scored)
        assert not compare_paths(loaded, Watched(loaded, codec), max_len=MAX_LEN).bitwise


def test_contexts_beyond_the_prompts_are_asked_of_attention_alone(
    loaded: PreTrainedModel, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = selfcheck.attend_core

    def blocked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        """A kernel that takes another path for few queries and many keys."""
        out = real(q, k, v, bias, scale)
        return out * (1 + 1e-6) if k.shape[2] > 2000 and q.shape[3] == 1 else out

    monkeypatch.setattr(selfcheck, "attend_core", blocked)
    assert compare_paths(loaded, Watched(loaded, codec), max_len=MAX_LEN).bitwise
    found = compare_paths(loaded, Watched(loaded, codec, max_len=4096), max_len=4096)
    assert not found.bitwise
    assert 0 < found.max_error < 1e-4


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("layers", "hidden", "sizes"),
    [(2, 256, [3, 12, 188, 380, 1024]), (16, 2048, [3, 12]), (48, 2048, [3])],
)
def test_a_large_model_is_asked_shorter_prompts(layers: int, hidden: int, sizes: list[int]) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert selfcheck._prompt_sizes(model, 4096, 8) == sizes


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
