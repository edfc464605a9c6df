"""Rewards of an answer's length in tokens, its end token included.

Knows no reference answer, no model and no process.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.errors import ConfigError


def length_limit(completion: str, completion_ids: Sequence[int], *, tokens: int) -> float:
    """1.0 when the answer has at most so many tokens, otherwise 0.0.

    Raises:
        ConfigError: ``tokens`` is below 1.
    """
    if tokens < 1:
        raise ConfigError(f"tokens: {tokens} is not >= 1")
    return float(len(completion_ids) <= tokens)


def length_penalty(
    completion: str, completion_ids: Sequence[int], *, free: int, limit: int
) -> float:
    """0.0 up to ``free`` tokens, then falling in a line to -1.0 at ``limit``, and -1.0 above.

    This is the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), where ``limit -
    free`` is called the cache.

    Raises:
        ConfigError: not 0 <= free < limit.
    """
    if not 0 <= free < limit:
        raise ConfigError(f"free: {free}, limit: {limit}; they must be 0 <= free < limit")
    over = len(completion_ids) - free
    return -min(1.0, max(0.0, over / (limit - free)))
