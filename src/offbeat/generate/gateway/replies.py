"""How answers look in the OpenAI protocol: whole, and chunk by chunk.

Owns the JSON of responses; knows no HTTP and no generator. Log-probs and token ids cover every
token that was written, also the one that ended the answer, and those of a stop string that the text
does not show.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from offbeat.generate.gateway.answers import Ask, Piece
from offbeat.types import Completion, FloatArray, IntArray

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(ABC):
    """The response to one question.

    Args:
        model: the name under which the model is served.
        decode: token ids to text.
        versioned: the weights may change; say which version wrote the last token.
    """

    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    ask: Ask
    model: str
    decode: Callable[[Sequence[int]], str]
    logprobs: bool
    token_ids: bool
    versioned: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> Json:
        """All answers in one."""
        return {
            **self._head(self.OBJECT),
            "choices": [self._choice(i, c) for i, c in enumerate(completions)],
            "usage": self._usage(completions),
            **self._fingerprint(completions),
        }

    def chunk(self, piece: Piece, *, first: bool) -> Json:
        """A piece of one answer; ``first``: no other of this answer came before."""
        completion = piece.completion
        choice: Json = {
            "index": piece.index,
            **self._delta(piece.text, first=first),
            "logprobs": self._scores(piece.token_ids, piece.logprobs),
            "finish_reason": None if completion is None else completion.stop_reason.value,
        }
        if self.token_ids:
            choice["token_ids"] = piece.token_ids.tolist()
            if first:
                choice["prompt_token_ids"] = self._prompt(piece.index)
        ended = () if completion is None else (completion,)
        return {**self._head(self.CHUNK), "choices": [choice], **self._fingerprint(ended)}

    def counts(self, completions: Iterable[Completion]) -> Json:
        """The last chunk of a stream that ends with the counts of tokens."""
        return {
            **self._head(self.CHUNK),
            "choices": [],
            "usage": self._usage(completions),
        }

    def shows(self, piece: Piece, *, first: bool) -> bool:
        """Whether ``chunk`` has something to say."""
        tokens = (self.token_ids or self.logprobs) and len(piece.token_ids)
        return bool(first or piece.text or piece.completion is not None or tokens)

    @abstractmethod
    def _said(self, text: str) -> Json:
        """The text of a whole answer."""

    @abstractmethod
    def _delta(self, text: str, *, first: bool) -> Json:
        """More text of an answer."""

    @abstractmethod
    def _scores(self, token_ids: IntArray, logprobs: FloatArray) -> Json | None:
        """Log-probs of tokens, if they were asked for."""

    def _choice(self, index: int, completion: Completion) -> Json:
        choice: Json = {
            "index": index,
            **self._said(completion.text),
            "logprobs": self._scores(completion.token_ids, completion.logprobs),
            "finish_reason": completion.stop_reason.value,
        }
        if self.token_ids:
            choice["prompt_token_ids"] = self._prompt(index)
            choice["token_ids"] = completion.token_ids.tolist()
        return choice

    def _prompt(self, index: int) -> list[int]:
        ids: list[int] = self.ask.prompts[index // self.ask.n].tolist()
        return ids

    def _head(self, kind: str) -> Json:
        name = f"{self.PREFIX}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _fingerprint(self, completions: Sequence[Completion]) -> Json:
        newest = [c.versions.max() for c in completions if len(c.versions)]
        return {"system_fingerprint": f"version-{max(newest)}"} if self.versioned and newest else {}

    def _usage(self, completions: Iterable[Completion]) -> Mapping[str, int]:
        read = sum(len(p) for p in self.ask.prompts)
        written = sum(len(c.token_ids) for c in completions)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    def _tokens(self, token_ids: IntArray) -> list[str]:
        return [self.decode([i]) for i in token_ids.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    PREFIX: ClassVar[str] = "cmpl"
    OBJECT: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"

    def _said(self, text: str) -> Json:
        return {"text": text}

    def _delta(self, text: str, *, first: bool) -> Json:
        return {"text": text}

    def _scores(self, token_ids: IntArray, logprobs: FloatArray) -> Json | None:
        if not self.logprobs:
            return None
        return {
            "tokens": self._tokens(token_ids),
            "token_logprobs": logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply(Reply):
    """Of ``/v1/chat/completions``."""

    PREFIX: ClassVar[str] = "chatcmpl"
    OBJECT: ClassVar[str] = "chat.completion"
    CHUNK: ClassVar[str] = "chat.completion.chunk"

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str, *, first: bool) -> Json:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text}}

    def _scores(self, token_ids: IntArray, logprobs: FloatArray) -> Json | None:
        if not self.logprobs:
            return None
        scored = zip(self._tokens(token_ids), logprobs.tolist(), strict=True)
        return {
            "content": [
                {"token": text, "logprob": logp, "bytes": _utf8(text), "top_logprobs": []}
                for text, logp in scored
            ],
            "refusal": None,
        }


def _utf8(text: str) -> list[int] | None:
    """The bytes of a token's text; None when it is part of a character."""
    return None if "\ufffd" in text else list(text.encode())
