"""The text of an answer while it is written: only what will not change.

Owns how much of it is certain: no half character, and nothing that may turn out to be the beginning
of a stop string. Token ids in, text out; the decoder is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.types import Completion, IntArray

_CONTEXT_TOKENS = 8
"""How many tokens before the new ones are decoded along: what a token's text may depend on."""

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""


class AnswerText:
    """Text of one answer, piece by piece; the pieces together are the completion's text.

    With one exception: a decoder that falls back to bytes shows a whole run of them as no
    characters once one of them is wrong, and what is out cannot be taken back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._context = 0
        """First token that is decoded along."""
        self._read = 0
        """Tokens whose text is in ``_held`` or out."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._sent = 0
        """Characters that are out."""

    def wrote(self, token_ids: IntArray) -> str:
        """What is certain after these tokens and was not before; may be empty."""
        self._tokens += token_ids.tolist()
        text = self._held + self._fresh()
        certain = len(text) - _overlap(text, self._stops)
        self._held = text[certain:]
        self._sent += certain
        return text[:certain]

    def ended(self, completion: Completion) -> str:
        """What is left of the whole text."""
        return completion.text[self._sent :]

    def _fresh(self) -> str:
        """Text of the tokens not read yet, once it is whole characters."""
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_REPLACEMENT) or not text.startswith(known):
            return ""
        self._read = len(self._tokens)
        begin = max(self._context, self._read - _CONTEXT_TOKENS)
        # A context without text (special tokens) would hide what the next token's text follows.
        if self._decode(self._tokens[begin:]).strip(" " + _REPLACEMENT):
            self._context = begin
        return text[len(known) :]


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which a stop string begins."""
    longest = min(len(text), max(map(len, stops), default=0))
    ends = (text[-n:] for n in range(longest, 0, -1))
    return next((len(end) for end in ends if any(s.startswith(end) for s in stops)), 0)
