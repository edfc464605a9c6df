"""Run as a program: how many log-probs of cached decode differ from those of one packed pass.

A process of its own, because a thread pool's size is best set before torch starts.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.selfcheck import packed_logprobs
from offbeat.model.attention import ATTENTION, attention_forward
from offbeat.types import Completion, GenerateRequest, GroupId, SamplingParams

PROMPTS = (1, 6, 16, 60, 187, 190, 192, 208, 380, 384, 400, 3, 13, 33)
ANSWER = 10
TEMPERATURE = 0.7


def build(heads: int, kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=70,
        hidden_size=16 * heads,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.2,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(heads)
    return LlamaForCausalLM(config).eval()


def differing(model: LlamaForCausalLM) -> tuple[int, int]:
    """Differing and all log-probs."""
    engine = Engine(model, slots=16, max_len=512, eos_token_ids=(), decode=str)
    rng = np.random.default_rng(0)
    requests = [
        GenerateRequest(
            request_id=str(i),
            group_id=GroupId(i),
            sibling=0,
            turn=0,
            prompt_ids=rng.integers(0, 70, n),
            params=SamplingParams(max_new_tokens=ANSWER, temperature=TEMPERATURE),
            seed=i,
        )
        for i, n in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.submit(request)
    answers: dict[str, Completion] = {}
    while engine.running or engine.waiting:
        answers |= {r.request_id: c for r, c in engine.step()}
    pairs = [(r, answers[r.request_id]) for r in requests]
    recorded = np.concatenate([a.logprobs for _, a in pairs])
    return int((recorded != packed_logprobs(model, pairs, TEMPERATURE)).sum()), len(recorded)


def main() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_forward)
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        for heads, kv_heads in ((4, 4), (6, 2), (4, 1), (7, 1)):
            wrong, total = differing(build(heads, kv_heads))
            ratio = heads // kv_heads
            sys.stdout.write(f"{threads} threads, ratio {ratio}: {wrong} of {total} differ\n")


if __name__ == "__main__":
    main()
