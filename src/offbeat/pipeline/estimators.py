"""Estimates from the answers to a set of prompts: pass@k, means, and how far off they may be.

Plain numbers in, plain numbers out; knows neither models nor rewards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over ``prompts`` prompts and its standard error.

    NaN where there are too few: none for the mean, fewer than two for the error.
    """

    mean: float
    standard_error: float
    prompts: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of ``k`` answers passes, from ``n`` answers of which ``c`` passed.

    1 - C(n-c, k) / C(n, k), without bias over draws of the n answers; as a product, so that no
    binomial coefficient overflows (Chen et al. 2021, arXiv 2107.03374).

    Args:
        n: answers to the prompt, at least ``k``.
        c: how many of them passed, 0 to ``n``.
        k: answers that somebody would look at, at least 1.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value per prompt, with its analytic standard error.

    The error is s / sqrt(m), s the sample standard deviation of the m values. Prompts are the
    independent draws: answers to one prompt are averaged before, so they do not shrink the error as
    if they were prompts of their own (Miller 2024, arXiv 2411.00640, section 2.2).
    """
    m = len(values)
    return Estimate(
        mean=statistics.fmean(values) if m else math.nan,
        standard_error=statistics.stdev(values) / math.sqrt(m) if m > 1 else math.nan,
        prompts=m,
    )
