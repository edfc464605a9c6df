"""Which requests an engine can serve.

Owns the check of one request before it joins others: whatever an array, a pass or the sampler would
choke on later, when it is in the same step as everybody else. Knows no slots and no model but the
size of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from offbeat.config.generation import MOST_TOP_K, temperature_problem
from offbeat.errors import GenerationError, PromptTooLong
from offbeat.types import GenerateRequest, SamplingParams


def check_request(request: GenerateRequest, *, max_len: int, vocab: int) -> None:
    """Refuse what cannot be served.

    Args:
        max_len: most tokens of prompt plus answer. vocab: number of token ids.

    Raises:
        PromptTooLong: prompt plus ``max_new_tokens`` exceed ``max_len``.
        GenerationError: an empty prompt, a token id outside of the vocabulary, or a sampling option
            out of its range.
    """
    n, new = len(request.prompt_ids), request.params.max_new_tokens
    if n + new > max_len:
        raise PromptTooLong(
            f"request {request.request_id}: {n} prompt tokens + max_new_tokens {new} exceed "
            f"the context of {max_len}"
        )
    for problem in (*_of_lengths(n, new), *_of_prompt(request, vocab), *_of(request.params, vocab)):
        raise GenerationError(f"request {request.request_id}: {problem}")


def _of_lengths(n: int, new: int) -> Iterator[str]:
    if n == 0 or new < 1:
        yield f"{n} prompt tokens, max_new_tokens {new}; both must be at least 1"


def _of_prompt(request: GenerateRequest, vocab: int) -> Iterator[str]:
    ids = request.prompt_ids
    if ids.ndim != 1 or ids.dtype != np.int64:
        yield f"prompt is an array {list(ids.shape)} of {ids.dtype}, not one row of int64"
    elif ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab:
        yield f"prompt has a token id outside 0..{vocab - 1}"


def _of(params: SamplingParams, vocab: int) -> Iterator[str]:
    wrong = temperature_problem(params.temperature)
    if wrong is not None:
        yield f"temperature {wrong}"
    if not 0 < params.top_p <= 1:
        yield f"top_p {params.top_p:g} is not > 0 and <= 1"
    if not 0 <= params.top_k <= MOST_TOP_K:
        yield f"top_k {params.top_k} is not between 0 and {MOST_TOP_K}"
    if not 0 <= params.min_p <= 1:
        yield f"min_p {params.min_p:g} is not between 0 and 1"
    if not all(params.stop):
        yield "stop has an empty string"
    outside = next((i for i in params.stop_token_ids if not 0 <= i < vocab), None)
    if outside is not None:
        yield f"stop token id {outside} is outside 0..{vocab - 1}"
