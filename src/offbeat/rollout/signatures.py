"""The four ways to write a reward function, told apart by the names of its parameters.

Owns what a function is called with and how what it returns becomes one value for each answer. Knows
neither processes nor deadlines, and imports no numpy: it runs in the reward process.

| form  | parameters                                                       | called with         |
| ----- | ---------------------------------------------------------------- | ------------------- |
| areal | ``prompt, completions, prompt_ids, completion_ids, **columns``   | one answer, the     |
|       | (``completion`` is the same; ``*args`` takes what is not named)  | four by position    |
| trl   | ``completions, prompts, prompt_ids, completion_ids, **columns``  | one group's answers,|
|       | ``-> list``; known by ``completions`` without ``prompt``         | lists by name       |
| verl  | ``data_source, solution_str, ground_truth, extra_info``          | one answer, by name |
|       | ``-> number or {"score": number}``; known by ``solution_str``    |                     |
| plain | ``completion``, and by name what else it needs of ``prompt``,    | one answer, by name |
|       | ``prompt_ids``, ``completion_ids``, ``messages``, ``columns``    |                     |
|       | (all of them in one mapping) and the columns themselves          |                     |

The rows are tried in this order; a function that fits none of them is refused. Each form gets the
columns whose names it has as parameters, or all of them when it ends with ``**columns``.

trl: a list has one entry for each finished answer of the group, in order. None as a value means
that this answer has no reward. Where the prompt went through a chat template, prompts are lists of
``{"role", "content"}`` and completions are lists with one such message, otherwise both are texts.
``completions_ids`` is another name of ``completion_ids``.

verl: ``ground_truth`` is the column of that name, else the one in the column ``reward_model``, else
the column ``answer`` or ``reference``; numbers beside "score" are parts, anything else is not kept.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from offbeat.errors import ConfigError, RewardError
from offbeat.rewards.reference import reference_of

RewardFn: TypeAlias = Callable[..., object]


class Form(StrEnum):
    """A row of the table above."""

    AREAL = "areal"
    TRL = "trl"
    VERL = "verl"
    PLAIN = "plain"


FORMS = """\
  (prompt, completions, prompt_ids, completion_ids, **columns) -> number         AReaL
  (completions, prompts, **columns) -> list of numbers, for a group's answers    TRL
  (data_source, solution_str, ground_truth, extra_info) -> number or {"score"}   verl
  (completion) -> number, and by name what else it needs                         plain"""

_AREAL = (("prompt",), ("completions", "completion"), ("prompt_ids",), ("completion_ids",))
_GROUND_TRUTH = ("ground_truth", "reward_model", "answer", "reference")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One answer to be scored: plain data, as it is sent to the reward process.

    ``messages`` is the conversation where the prompt went through a chat template, else empty.
    """

    prompt: str
    completion: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    columns: Mapping[str, object] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A call whose arguments the function gets as they are, whatever its form."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


Request: TypeAlias = Arguments | tuple[RewardInput, ...]


def form_of(signature: inspect.Signature) -> Form | None:
    """The form that these parameters have; None when it is none of the four."""
    parameters = signature.parameters
    if _is_areal(parameters.values()):
        return Form.AREAL
    if "completions" in parameters and "prompt" not in parameters:
        return Form.TRL
    if "solution_str" in parameters:
        return Form.VERL
    return Form.PLAIN if "completion" in parameters else None


def _is_areal(parameters: Iterable[inspect.Parameter]) -> bool:
    known = list(parameters)
    named = [p.name for p in known if p.kind in _POSITIONAL]
    takes_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known)
    fits = all(name in allowed for name, allowed in zip(named, _AREAL, strict=False))
    return fits and (takes_rest or len(named) >= len(_AREAL))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function with its form and its fixed arguments; ``of`` makes one."""

    fn: RewardFn
    args: Mapping[str, object]
    signature: inspect.Signature | None
    form: Form | None

    @classmethod
    def of(cls, fn: RewardFn, args: Mapping[str, object], key: str) -> RewardFunction:
        """Recognize ``fn``; ``key`` names ``args`` in the configuration.

        Raises:
            ConfigError: ``args`` has a name that ``fn`` has not.
        """
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # builtins without one
            return cls(fn=fn, args=args, signature=None, form=None)
        _check_args(signature, args, key)
        return cls(fn=fn, args=args, signature=signature, form=form_of(signature))

    @property
    def is_batched(self) -> bool:
        """Whether one call takes all answers of a group."""
        return self.form is Form.TRL

    @property
    def complaint(self) -> str:
        """Why this function cannot score answers; empty when it can."""
        if self.form is not None:
            return ""
        shown = "(...)" if self.signature is None else _names_of(self.signature)
        return f"{_name(self.fn)}{shown} is none of the four known forms of a reward:\n{FORMS}"

    def call(self, request: Request) -> object:
        """What the function returns, possibly an awaitable.

        Raises:
            RewardError, DataError: the row has not the columns that the function needs.
        """
        if isinstance(request, Arguments):
            return self.fn(*request.args, **{**request.kwargs, **self.args})
        assert self.signature is not None  # the controller asks only what has a form
        positional, keywords = self._arguments(request)
        keywords = self._accepted({**keywords, **self.args}, taken=len(positional))
        try:
            self.signature.bind(*positional, **keywords)
        except TypeError as exc:
            columns = ", ".join(map(str, request[0].columns)) or "none"
            raise RewardError(
                f"{_name(self.fn)}: {exc}; the row's other columns: {columns}. Rename one with "
                "train_dataset.columns: {name: COLUMN}, or give the parameter a default"
            ) from exc
        return self.fn(*positional, **keywords)

    def values(self, request: Request, returned: object) -> list[object]:
        """One value for each answer of ``request``.

        Raises:
            RewardError: a function of the trl form returned no list of that length.
        """
        if isinstance(request, Arguments) or self.form in (Form.AREAL, Form.PLAIN):
            return [returned]
        if self.form is Form.VERL:
            return [_from_verl(returned)]
        return _from_trl(returned, len(request))

    def _arguments(
        self, answers: tuple[RewardInput, ...]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if self.form is Form.TRL:
            return (), _trl(answers)
        (answer,) = answers
        if self.form is Form.AREAL:
            texts = (answer.prompt, answer.completion)
            ids = (list(answer.prompt_ids), list(answer.completion_ids))
            return (*texts, *ids), dict(answer.columns)
        if self.form is Form.VERL:
            return (), {**answer.columns, **_verl(answer)}
        return (), {**answer.columns, **self._named(answer)}

    def _named(self, answer: RewardInput) -> dict[str, object]:
        """What a plain function gets from offbeat under the names that it has."""
        assert self.signature is not None
        known = {
            "prompt": answer.prompt,
            "completion": answer.completion,
            "prompt_ids": list(answer.prompt_ids),
            "completion_ids": list(answer.completion_ids),
            "messages": [dict(message) for message in answer.messages],
            "columns": dict(answer.columns),
        }
        return {name: known[name] for name in known if name in self.signature.parameters}

    def _accepted(self, keywords: Mapping[str, object], taken: int) -> dict[str, object]:
        """Those of ``keywords`` that the function has a parameter for and has not got yet."""
        assert self.signature is not None
        parameters = list(self.signature.parameters.values())
        by_position = {p.name for p in parameters[:taken] if p.kind in _POSITIONAL}
        everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        return {
            name: value
            for name, value in keywords.items()
            if name not in by_position and (everything or name in names)
        }


def _name(fn: RewardFn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _names_of(signature: inspect.Signature) -> str:
    """``signature`` without its annotations."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _check_args(signature: inspect.Signature, args: Mapping[str, object], key: str) -> None:
    parameters = signature.parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in args if name not in parameters]
    if unknown:
        raise ConfigError(
            f"{key}.args: {unknown[0]!r} is no parameter of the function; it has "
            f"{', '.join(parameters)}"
        )


def _trl(answers: tuple[RewardInput, ...]) -> dict[str, object]:
    """Lists over the answers, by TRL's names."""
    first = answers[0]
    ids = [list(answer.completion_ids) for answer in answers]
    chat = bool(first.messages)
    return {
        **{name: [answer.columns[name] for answer in answers] for name in first.columns},
        "prompts": [
            [dict(message) for message in answer.messages] if chat else answer.prompt
            for answer in answers
        ],
        "completions": [
            [{"role": "assistant", "content": answer.completion}] if chat else answer.completion
            for answer in answers
        ],
        "prompt_ids": [list(answer.prompt_ids) for answer in answers],
        "completion_ids": ids,
        "completions_ids": ids,
    }


def _verl(answer: RewardInput) -> dict[str, object]:
    return {
        "solution_str": answer.completion,
        "ground_truth": reference_of(answer.columns, _GROUND_TRUTH),
        "extra_info": answer.columns.get("extra_info"),
    }


def _from_verl(returned: object) -> object:
    if not isinstance(returned, Mapping) or "score" not in returned:
        return returned
    kept = {
        key: value
        for key, value in returned.items()
        if key != "score" and isinstance(value, numbers.Real)
    }
    return {**kept, "reward": returned["score"]}


def _from_trl(returned: object, answers: int) -> list[object]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        what = type(returned).__name__
        raise RewardError(f"returned {what} for {answers} answers, expected a list of numbers")
    if len(values) != answers:
        raise RewardError(f"returned {len(values)} values for {answers} answers")
    return list(values)
