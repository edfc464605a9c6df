"""Does cached decode give the bits of the training pass, on this machine with these threads?

The padding rules of ``model/attention.py`` are facts of one build on one CPU. This asks at start-up
instead of believing: it generates answers whose contexts cross the edges of key buckets, scores
them as the trainer does, row by row and with the prompts of siblings computed once, and compares
the log-probs. Contexts too long for the whole model at a start-up are asked of attention alone.

Shapes: K key heads, G query heads to one of them, T keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from offbeat.algo.logprobs import chunked_logprobs
from offbeat.generate.engine.cache import HeadShape
from offbeat.generate.engine.engine import Engine
from offbeat.model.attention import (
    KEY_BLOCK,
    QUERY_ROWS,
    TOKEN_ROWS,
    PackedContext,
    PackedLayout,
    attend_core,
    key_bucket,
    round_up,
)
from offbeat.model.linear import PackedLinear, output_head
from offbeat.model.load import hidden_states
from offbeat.types import (
    Completion,
    FloatArray,
    GenerateRequest,
    GroupId,
    IntArray,
    SamplingParams,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pairs = Sequence[tuple[GenerateRequest, Completion]]

_ANSWER = 8
_TEMPERATURE = 0.7
_LONGEST_PROMPT = 1024
_LONGEST_ATTENTION = 8192
_PASSES = 3
"""How often each prompt is computed: by the engine, in a row of its own, as a shared prefix."""

_WORK = 2.4e11
"""Floating-point operations of the prompts for each thread: two to three seconds on a slow core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathComparison:
    """``bitwise``: every number equal; ``max_error``: the largest difference of log-probs in nats
    (of attention's outputs where only those differ).
    """

    bitwise: bool
    max_error: float


def compare_paths(model: PreTrainedModel, engine: Engine, *, max_len: int) -> PathComparison:
    """Generate with ``engine``, score with ``model`` as the trainer would, compare.

    Two siblings for each prompt. Requests join while others decode, and their answers differ in
    length, so that slots are given away and taken again.

    Args:
        engine: over ``model``, without requests. max_len: of its contexts, at least 2.
    """
    answer = min(_ANSWER, max_len - 1)
    vocab = output_head(model).weight.shape[0]
    sizes = _prompt_sizes(model, max_len, answer)
    requests = [
        _request(i, sibling, vocab=vocab, size=n, answer=max(1, answer - sibling * (1 + i % 3)))
        for sibling in range(2)
        for i, n in enumerate(sizes)
    ]
    pairs = _generate(engine, requests)
    # One sibling of each is enough in a row of its own: the prompt is what costs.
    errors = [
        packed_logprobs(model, some, _TEMPERATURE, shared=shared) - _recorded(some)
        for some, shared in ((pairs[: len(sizes)], False), (pairs, True))
    ]
    worst = max(float(np.abs(e).max()) for e in errors)
    by_attention = _attention_error(model, min(max_len, _LONGEST_ATTENTION))
    return PathComparison(
        bitwise=worst == by_attention == 0.0, max_error=worst if worst > 0 else by_attention
    )


def _prompt_sizes(model: PreTrainedModel, max_len: int, answer: int) -> list[int]:
    """Prompts of which half the answer lies beyond the edge of a key bucket, and one that fills
    ``max_len``; as many as the work of a start-up allows, the short ones first.
    """
    room = max_len - answer
    across = [edge - answer // 2 for edge in (TOKEN_ROWS, KEY_BLOCK, 2 * KEY_BLOCK)]
    wanted = sorted({n for n in (3, *across, min(room, _LONGEST_PROMPT)) if n <= room})
    limit = _WORK * torch.get_num_threads() / (2 * _PASSES * _weights(model))
    within = [n for n, total in zip(wanted, accumulate(wanted), strict=True) if total <= limit]
    return within or wanted[:1]


def _weights(model: PreTrainedModel) -> int:
    """Weights that a token meets, those of its embedding and of all experts included."""
    layers = model.base_model
    packed = [m.weight for m in layers.modules() if isinstance(m, PackedLinear)]
    return sum(w.numel() for w in (*packed, *layers.parameters()))


def _request(prompt: int, sibling: int, *, vocab: int, size: int, answer: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{prompt}/{sibling}",
        group_id=GroupId(prompt),
        sibling=sibling,
        turn=0,
        prompt_ids=np.random.default_rng(prompt).integers(0, vocab, size),
        params=SamplingParams(max_new_tokens=answer, temperature=_TEMPERATURE, ignore_eos=True),
        seed=100 * prompt + sibling,
    )


def _generate(engine: Engine, requests: Sequence[GenerateRequest]) -> Pairs:
    ended: dict[str, Completion] = {}
    for i, request in enumerate(requests):
        engine.submit(request)
        if i % 2:
            ended |= _step(engine)
    while len(ended) < len(requests):
        ended |= _step(engine)
    return [(r, ended[r.request_id]) for r in requests]


def _step(engine: Engine) -> dict[str, Completion]:
    finished = engine.step()
    for _, error in engine.take_failed():
        raise error
    return {r.request_id: c for r, c in finished}


def _recorded(pairs: Pairs) -> FloatArray:
    return np.concatenate([c.logprobs for _, c in pairs])


# The trainer's side


@dataclass(slots=True, kw_only=True)
class _Segments:
    """Of a packed row: tokens and parents of its segments; ``states``: (segment, first place,
    number) of the tokens that predict an answer's, in the order of the answers.
    """

    tokens: list[IntArray]
    parents: list[int | None]
    states: list[tuple[int, int, int]]

    def add(self, tokens: IntArray, parent: int | None = None) -> int:
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1


def _segments(pairs: Pairs, *, shared: bool) -> _Segments:
    """Every row by itself, or every prompt once and the answers as its continuations."""
    found = _Segments(tokens=[], parents=[], states=[])
    prefixes: dict[bytes, int] = {}
    for request, completion in pairs:
        # Nothing is predicted from the last token.
        prompt, answer = request.prompt_ids, completion.token_ids[:-1]
        if not shared:
            row = found.add(np.concatenate([prompt, answer]))
            found.states.append((row, len(prompt) - 1, len(answer) + 1))
            continue
        key = prompt.tobytes()
        if key not in prefixes:
            prefixes[key] = found.add(prompt)
        found.states.append((prefixes[key], len(prompt) - 1, 1))
        if len(answer):
            found.states.append((found.add(answer, prefixes[key]), 0, len(answer)))
    return found


@torch.no_grad()
def packed_logprobs(
    model: PreTrainedModel, pairs: Pairs, temperature: float, *, shared: bool = False
) -> FloatArray:
    """Log-probs of all answers by one packed pass, concatenated, float32 nats.

    ``shared``: each distinct prompt is computed once.
    """
    device = model.device
    rows = _segments(pairs, shared=shared)
    layout = PackedLayout.build([len(t) for t in rows.tokens], parents=rows.parents, device=device)
    tokens = layout.pack(rows.tokens)
    hidden = hidden_states(model, tokens, layout.positions, PackedContext(layout))
    begins = [(layout.starts[segment] + first, n) for segment, first, n in rows.states]
    index = torch.cat([torch.arange(begin, begin + n) for begin, n in begins]).to(device)
    targets = torch.from_numpy(np.concatenate([c.token_ids for _, c in pairs])).to(device)
    padding = (0, round_up(len(targets), TOKEN_ROWS) - len(targets))
    index, padded = (torch.nn.functional.pad(x, padding) for x in (index, targets))
    head = output_head(model)
    logp, _ = chunked_logprobs(
        hidden[index], head.weight, head.bias, padded, temperature, linear=head.linear
    )
    scored: FloatArray = logp[: len(targets)].cpu().numpy()
    return scored


# Attention alone


def _attention_error(model: PreTrainedModel, longest: int) -> float:
    """Largest difference of attention's outputs between decode steps and packed rows, for numbers
    of keys that double up to ``longest``.
    """
    lengths = [*takewhile(lambda n: n < longest, (KEY_BLOCK << i for i in count())), longest]
    return max(_attention_error_at(model, n) for n in lengths)


@torch.no_grad()
def _attention_error_at(model: PreTrainedModel, n: int) -> float:
    """The last places of a sequence of ``n`` tokens: a full block of queries against one query of
    each of four sequences, in the same key bucket and, as beside a longer sequence, in the next.
    """
    shape = HeadShape.of(model)
    kv_heads, dim = shape.kv_heads, shape.dim
    ratio, rows, steps = shape.heads // kv_heads, min(n, KEY_BLOCK), min(n, 4)
    generator = torch.Generator().manual_seed(n)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    keys = key_bucket(n)
    query = random(1, kv_heads, ratio, round_up(rows, TOKEN_ROWS), dim)
    key, value = random(1, kv_heads, keys, dim), random(1, kv_heads, keys, dim)
    seen = torch.arange(n - rows, n - rows + query.shape[3])
    packed = attend_core(query, key, value, _causal(seen[None], keys, query), dim**-0.5)
    expected = packed[0, :, :, rows - steps : rows]
    # [steps, K, G, 1, D], a sequence for each of the places.
    single = query[0, :, :, rows - steps : rows].permute(2, 0, 1, 3)[:, :, :, None]
    padding = (0, 0, 0, 0, 0, round_up(ratio, QUERY_ROWS) - ratio)
    single = torch.nn.functional.pad(single, padding)
    errors = []
    for width in (keys, key_bucket(keys + 1)):
        k, v = (
            torch.nn.functional.pad(x, (0, 0, 0, width - keys)).expand(steps, -1, -1, -1)
            for x in (key, value)
        )
        bias = _causal(torch.arange(n - steps, n)[:, None], width, query)
        out = attend_core(single, k, v, bias, dim**-0.5)[:, :, :ratio, 0]
        errors.append(out.permute(1, 2, 0, 3) - expected)
    return max(float(e.abs().max()) for e in errors)


def _causal(places: Tensor, keys: int, like: Tensor) -> Tensor:
    """[..., ``keys``]: 0 up to each of ``places``, -inf after it."""
    hidden = torch.arange(keys) > places[..., None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(like)
