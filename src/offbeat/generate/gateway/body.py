"""What may be asked: the parameters of the OpenAI protocol that have an effect here.

Owns the check of a request's body, and what each parameter means for the engine. A parameter that
cannot be honored is refused by name, never ignored; one that asks for nothing (``"echo": false``)
passes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from offbeat.config.generation import MOST_TOP_K, temperature_problem
from offbeat.data.tokens import TextCodec
from offbeat.generate.gateway.answers import Answers, Ask, as_prompt, encode_chat
from offbeat.generate.gateway.refusal import Refusal
from offbeat.types import IntArray, Message, SamplingParams

COMPLETION_TOKENS = 16
"""Longest answer of a completion that names none, as the protocol has it; a chat's is what fits."""

MOST_ANSWERS = 128
"""Answers to one prompt."""

_NOTHING: Mapping[str, object] = {
    "audio": None,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": None,
    "functions": None,
    "logit_bias": {},
    "metadata": None,
    "modalities": ["text"],
    "parallel_tool_calls": None,
    "prediction": None,
    "presence_penalty": 0,
    "reasoning_effort": None,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": None,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}
"""Parameters of the protocol that the engine does not have, and the value that asks for nothing."""

MOST_STOPS = 64
"""Stop strings, and stop token ids, of one answer: each costs time in every step of the engine."""

_Stop: TypeAlias = Annotated[str, Meta(min_length=1)]
_Stops: TypeAlias = Annotated[list[_Stop], Meta(max_length=MOST_STOPS)]
_TokenIds: TypeAlias = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MOST_STOPS)]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON with these keys only."""


class StreamOptions(_Struct, frozen=True, kw_only=True):
    """``include_usage``: a last chunk has the counts of tokens."""

    include_usage: bool = False


class Body(_Struct, frozen=True, kw_only=True):
    """What both endpoints take; null is the default."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    seed: int | None = None
    stop: _Stop | _Stops | None = None
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, max_new_tokens: int) -> SamplingParams:
        """How to sample one answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )

    def ask(self, prompts: Sequence[IntArray], max_new_tokens: int, codec: TextCodec) -> Ask:
        """These prompts, asked as the body says. Raises ``Refusal``."""
        wrong = None if self.temperature is None else temperature_problem(self.temperature)
        if wrong is not None:
            raise Refusal(f"temperature: {wrong}", param="temperature")
        _check_token_ids("stop_token_ids", self.stop_token_ids or (), codec)
        return Ask(
            prompts=tuple(prompts),
            params=self.params(max_new_tokens),
            n=self.n or 1,
            seed=self.seed,
        )


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0)] | None = None

    def question(self, answers: Answers) -> Ask:
        """What the generator is asked."""
        if (self.logprobs or 0) > 1:
            raise Refusal(
                f"logprobs: {self.logprobs} is not 0 or 1: there is the log-prob of the token that "
                "was written, not of others",
                param="logprobs",
                code="unsupported_value",
            )
        prompts = [self._encode(p, answers) for p in self._prompts()]
        return self.ask(prompts, self.max_tokens or COMPLETION_TOKENS, answers.codec)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def _prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [p for p in self.prompt if isinstance(p, int)]
        if ids and len(ids) == len(self.prompt):
            return [ids]
        if ids or not self.prompt:
            raise Refusal(
                "prompt: must be a text, a list of token ids, or a list of texts or of lists of "
                "token ids, and not empty",
                param="prompt",
            )
        return [p for p in self.prompt if not isinstance(p, int)]

    def _encode(self, prompt: str | list[int], answers: Answers) -> IntArray:
        codec = answers.codec
        ids = codec.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise Refusal("prompt: has no tokens; it must have at least one", param="prompt")
        _check_token_ids("prompt", ids, codec)
        return as_prompt(ids)


def _check_token_ids(param: str, ids: Sequence[int], codec: TextCodec) -> None:
    wrong = next((i for i in ids if not 0 <= i < codec.vocab_size), None)
    if wrong is not None:
        raise Refusal(
            f"{param}: token id {wrong} is not between 0 and {codec.vocab_size - 1}", param=param
        )


class TextPart(_Struct, frozen=True, kw_only=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Struct, frozen=True, kw_only=True):
    """One message. What else an assistant's message has in responses must be null."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: None = None

    @property
    def message(self) -> Message:
        """As the chat template takes it."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        return Message(role=self.role, content=text)


class ChatBody(Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None

    def question(self, answers: Answers) -> Ask:
        """What the generator is asked."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise Refusal(
                f"max_completion_tokens: {self.max_completion_tokens} contradicts max_tokens "
                f"{self.max_tokens}, its older name; leave one out",
                param="max_completion_tokens",
            )
        prompt = encode_chat([m.message for m in self.messages], answers.codec)
        longest = self.max_completion_tokens or self.max_tokens or answers.room(prompt)
        return self.ask([prompt], longest, answers.codec)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


B = TypeVar("B", bound=Body)


def parse(data: bytes, kind: type[B]) -> B:
    """The body ``data`` as ``kind``. Raises ``Refusal``."""
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as exc:
        raise Refusal(f"the body is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise Refusal("the body is JSON that is nested too deeply") from exc
    if not isinstance(raw, dict):
        raise Refusal("the body must be a JSON object")
    known = kind.__struct_fields__
    given = {k: v for k, v in raw.items() if k in known or not _asks_for_nothing(k, v)}
    for name in given:
        if name not in known:
            raise _unsupported(name, known)
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as exc:
        raise _invalid(str(exc)) from exc
    if body.stream_options is not None and not body.stream:
        raise Refusal(
            "stream_options: has no effect without stream: true; leave it out",
            param="stream_options",
        )
    return body


def _asks_for_nothing(name: str, value: object) -> bool:
    return name in _NOTHING and (value is None or value == _NOTHING[name])


def _unsupported(name: str, known: Sequence[str]) -> Refusal:
    if name in _NOTHING:
        text = f"{name}: not supported by this server; leave it out"
    else:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        text = f"{name}: unknown parameter; {meant}"
    return Refusal(text, param=name, code="unsupported_parameter")


_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def _invalid(problem: str) -> Refusal:
    """A violation as msgspec reports it, with the parameter in front."""
    match = _PLACE.fullmatch(problem)
    what, path = (match["what"], match["path"] or "") if match else (problem, "")
    missing = _MISSING.fullmatch(what)
    if missing and not path:
        return Refusal(f"{missing['name']}: required, and not given", param=missing["name"])
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    what = what[:1].lower() + what[1:]
    return Refusal(f"{path}: {what}" if path else what, param=name or None)
