"""Does cached decode give the bits of the packed training pass, on this machine with these threads?

The padding rules of ``model/attention.py`` are facts of one build on one CPU. This asks at start-up
instead of believing: it generates a few answers, scores them with one packed pass, and compares the
log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat.algo.logprobs import chunked_logprobs
from offbeat.generate.engine.engine import Engine
from offbeat.model.attention import TOKEN_ROWS, PackedContext, PackedLayout, round_up
from offbeat.model.linear import output_head
from offbeat.model.load import hidden_states
from offbeat.types import Completion, GenerateRequest, GroupId, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPTS = (3, 17, 60, 188)
_ANSWER = 8
_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class PathComparison:
    """``bitwise``: every log-prob equal; ``max_error``: the largest difference in nats."""

    bitwise: bool
    max_error: float


def compare_paths(model: PreTrainedModel, engine: Engine, *, max_len: int) -> PathComparison:
    """Generate with ``engine``, score with a packed pass; prompts of several key buckets.

    Prompts that do not fit ``max_len`` are left out; the shortest is cut to fit.
    """
    vocab = output_head(model).weight.shape[0]
    rng = np.random.default_rng(0)
    sizes = [n for n in _PROMPTS if n + _ANSWER <= max_len] or [1]
    answer = min(_ANSWER, max_len - sizes[0])
    params = SamplingParams(max_new_tokens=answer, temperature=_TEMPERATURE, ignore_eos=True)
    requests = [
        GenerateRequest(
            request_id=str(i),
            group_id=GroupId(i),
            sibling=0,
            turn=0,
            prompt_ids=rng.integers(0, vocab, n),
            params=params,
            seed=i,
        )
        for i, n in enumerate(sizes)
    ]
    for request in requests:
        engine.submit(request)
    completions: dict[str, Completion] = {}
    while len(completions) < len(requests):
        completions |= {r.request_id: c for r, c in engine.step()}
    pairs = [(r, completions[r.request_id]) for r in requests]
    scored = packed_logprobs(model, pairs, _TEMPERATURE)
    recorded = np.concatenate([c.logprobs for _, c in pairs])
    return PathComparison(
        bitwise=bool(np.array_equal(scored, recorded)),
        max_error=float(np.abs(scored - recorded).max()),
    )


@torch.no_grad()
def packed_logprobs(
    model: PreTrainedModel, pairs: list[tuple[GenerateRequest, Completion]], temperature: float
) -> np.ndarray:
    """Log-probs of all answers by one packed pass, concatenated, float32 nats."""
    device = model.device
    rows = [torch.from_numpy(np.concatenate([r.prompt_ids, c.token_ids])) for r, c in pairs]
    layout = PackedLayout.build([len(x) for x in rows], device=device)
    ctx = PackedContext(layout)
    tokens = layout.pack([x.to(device) for x in rows])
    hidden = hidden_states(model, tokens, layout.positions, ctx)
    before = [
        torch.arange(start + len(r.prompt_ids) - 1, start + n - 1)
        for (r, _), start, n in zip(pairs, layout.starts, layout.lengths, strict=True)
    ]
    index = torch.cat(before).to(device)
    count = len(index)
    index = torch.nn.functional.pad(index, (0, round_up(count, TOKEN_ROWS) - count))
    head = output_head(model)
    targets = tokens[(index + 1).clamp(max=len(tokens) - 1)]
    logp, _ = chunked_logprobs(
        hidden[index], head.weight, head.bias, targets, temperature, linear=head.linear
    )
    scored: np.ndarray = logp[:count].cpu().numpy()
    return scored
