"""Small additions for an instruction model: "What is 7+12?", answered with the number.

A small pretrained model talks around the sum and often misses it; the reward counts the number that
its answer ends on.
"""

from __future__ import annotations

import random
import re

LARGEST = 20
HELD_OUT_PAIRS = 24
"""Unordered pairs kept from training, in both orders."""


def rows(n: int | None = None, seed: int = 1, held_out: bool = False) -> list[dict[str, object]]:
    """Rows with ``messages`` and ``answer`` for a, b in 0..20; the first ``n``, or all.

    a+b and b+a are the same question to a model, so the split is over unordered pairs: with the
    same seed no training row has the numbers of a held-out row, in any order.
    """
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(a, LARGEST + 1)]
    draw.shuffle(pairs)
    chosen = pairs[:HELD_OUT_PAIRS] if held_out else pairs[HELD_OUT_PAIRS:]
    ordered = sorted({order for a, b in chosen for order in ((a, b), (b, a))})
    draw.shuffle(ordered)
    if n is not None and not 1 <= n <= len(ordered):
        raise ValueError(f"n must be between 1 and {len(ordered)}, got {n}")
    return [_row(a, b) for a, b in ordered[:n]]


def _row(a: int, b: int) -> dict[str, object]:
    question = f"What is {a}+{b}? Answer with just the number."
    return {"messages": [{"role": "user", "content": question}], "answer": str(a + b)}


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str,
    **columns: object,
) -> float:
    """1.0 when the last number of the answer is the sum, otherwise 0.0."""
    numbers = re.findall(r"\d+", completions)
    return float(bool(numbers) and numbers[-1] == answer)
