"""Has an answer reached a stop string?

Owns how much of an answer must be looked at after each token. Knows no engine: token ids in, yes or
no out; the decoder is the caller's.

The answer's text is what its tokens decode to *together*: a character may take several tokens, a
decoder may strip the first space or skip special tokens. Decoding everything at each step would
cost the square of the length, so only a tail is decoded, long enough that no stop string can reach
beyond it, and a hit is confirmed on the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.types import IntArray

_LOCAL_TOKENS = 8
"""The newest token changes the text of at most so many tokens: UTF-8 needs four of one byte."""

_LOCAL_CHARACTERS = 8
"""At the front of a tail so many characters may differ: half a character, a stripped space."""


def ends_with_stop(
    tokens: IntArray,
    stops: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> bool:
    """Whether the text of ``tokens`` has a stop string that it had not without its last token.

    Once true, the answer must end: a stop string further back is not looked for.
    """
    reach = max(map(len, stops)) + _LOCAL_CHARACTERS
    size = reach + _LOCAL_TOKENS
    # Tokens without text (special ones, parts of a character) make a tail too short: double it.
    while size < len(tokens) and len(decode(tokens[-size:-_LOCAL_TOKENS].tolist())) < reach:
        size *= 2
    tail = decode(tokens[-size:].tolist())
    if not any(stop in tail for stop in stops):
        return False
    if size >= len(tokens):
        return True
    text = decode(tokens.tolist())
    return any(stop in text for stop in stops)
