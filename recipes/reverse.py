"""Reverse a string of digits: a task that a tiny random model learns on a CPU in minutes.

Prompt ``a1b2c3d4e5f6=``, answer ``654321``. A letter in front of each digit names its place: a
model without any training needs something to attend to. The reward is the share of right positions,
so a model that knows nothing earns a little, and every step towards the answer earns more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from string import ascii_lowercase

HELD_OUT = 200
"""At most so many digit strings are kept from training (a tenth of all, where that is fewer)."""


def rows(n: int, seed: int = 1, digits: int = 6, held_out: bool = False) -> list[dict[str, str]]:
    """``n`` rows with ``prompt`` and ``answer``; the same arguments give the same rows.

    All digit strings stand in one order, drawn from ``seed``: the held-out ones are its beginning,
    the training ones follow. With the same seed and digits the two never share a string.
    """
    total = 10**digits
    kept = min(HELD_OUT, total // 10)
    most = kept if held_out else total - kept
    if not 1 <= n <= most:
        kind = "held-out" if held_out else "training"
        raise ValueError(f"n must be between 1 and {most} ({kind} rows, digits={digits}), got {n}")
    start = 0 if held_out else kept
    numbers = islice(_distinct(total, seed), start, start + n)
    return [_row(f"{number:0{digits}d}") for number in numbers]


def _distinct(total: int, seed: int) -> Iterator[int]:
    """The numbers below ``total`` in a seeded random order, drawn as they are asked for."""
    draw = random.Random(seed)
    seen: set[int] = set()
    while len(seen) < total:
        number = draw.randrange(total)
        if number not in seen:
            seen.add(number)
            yield number


def _row(text: str) -> dict[str, str]:
    marked = "".join(f"{place}{digit}" for place, digit in zip(ascii_lowercase, text, strict=False))
    return {"prompt": f"{marked}=", "answer": text[::-1]}


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str,
    **columns: object,
) -> dict[str, float]:
    """Right positions / max(digits, tokens given); ``exact`` is 1.0 for exactly the answer.

    Length counts in tokens, the end token apart: special tokens do not show in the text, and an
    answer that goes on with them instead of ending is not the answer.
    """
    right = sum(given == wanted for given, wanted in zip(completions, answer, strict=False))
    length = max(len(answer), len(completions), len(completion_ids) - 1)
    exact = completions == answer and length == len(answer)
    return {"reward": right / length, "exact": float(exact)}
