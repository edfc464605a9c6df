"""Give the columns of a data set their meaning: what is the prompt, what do rewards get.

Owns the mapping from the data set's column names to ours, and the shapes of rows that need none:
TRL's, verl's and OpenAI's. Consumes a row, produces a ``RowPrompt``; knows no tokenizer and no
order of rows.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from offbeat.config.dataset import RESERVED_COLUMNS
from offbeat.data.messages import check_asks, read_messages, without_answer
from offbeat.errors import ConfigError, DataError
from offbeat.types import Message

PROMPT = "prompt"
MESSAGES = "messages"
REFERENCE = "reference"
"""Column for the answer that a conversation of ``messages`` ends with."""
GROUND_TRUTH = "ground_truth"
REWARD_MODEL = "reward_model"

_PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "input", "text")
_CONVERSATION_NAMES = ("messages", "conversation", "conversations", "chat", "dialogue")
_LIKE = 0.75
"""How like one of these a column's name must be to be suggested, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrompt:
    """What one row asks.

    Either a plain ``text``, or the ``messages`` of a conversation; then ``text`` is the last
    user's. ``columns`` are the row's other columns, under our names where they are mapped.
    """

    text: str
    messages: tuple[Message, ...]
    columns: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a row is, and what it has: what every error about it says beside the problem."""

    name: str
    row: Mapping[str, object]

    def error(self, problem: str, way_out: str) -> DataError:
        return DataError(f"{self.name}: {problem}; found: {_names(self.row)}. {way_out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """How to read a row.

    ``columns`` maps our name to the data set's: ``{"prompt": "question"}``. A mapped column is
    known under our name only and hides a column that already has it; the others keep theirs. A
    dotted name reaches into a column of mappings, which stays: ``{"answer": "info.solution"}``.

    The prompt comes from ``prompt_template`` (a Python format string over the columns, under either
    name) when given, else from the column ``prompt`` (a text, or a list of messages) or
    ``messages`` (a list of messages, whose last one may be the assistant's: it is cut off and
    becomes the column ``reference``). A message is ``{role, content}``. ``reward_model.
    ground_truth``, which verl's rows have, is also the column ``ground_truth`` unless there is one.

    ``system_prompt`` is put in front as a system message. ``key`` is the section named in errors.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_template: str | None = None
    system_prompt: str | None = None
    key: str = "train_dataset"

    def __post_init__(self) -> None:
        if self.prompt_template is not None:
            self._check_template(self.prompt_template)

    def _check_template(self, template: str) -> None:
        where = f"{self.key}.prompt_template"
        try:
            fields = {
                name for _, name, _, _ in string.Formatter().parse(template) if name is not None
            }
        except ValueError as exc:
            raise ConfigError(f"{where}: {template!r} is not a format string: {exc}") from exc
        if not fields:
            raise ConfigError(
                f"{where}: {template!r} uses no column; every prompt would be the same"
            )
        used = {name.partition(".")[0].partition("[")[0] for name in fields}
        for name in (PROMPT, MESSAGES):
            if name in self.columns and name not in used:
                raise ConfigError(
                    f"{self.key}.columns.{name} has no effect: the prompt comes from {where}, "
                    f"which does not use {{{name}}}"
                )

    def read(self, row: Mapping[str, object], place: str) -> RowPrompt:
        """The prompt of ``row``; ``place`` names data set and row in errors.

        Raises:
            DataError: a column is missing, ambiguous or of the wrong type.
        """
        at = _Place(name=place, row=row)
        named = _with_ground_truth(self._rename(row, at))
        self._check_reserved(named, at)
        if self.prompt_template is not None:
            text = self._format(self.prompt_template, {**row, **named}, at)
            asked = RowPrompt(text=text, messages=(), columns=_others(named))
        elif self._prompt_column(named, at) == MESSAGES:
            asked = self._conversation(named, at)
        else:
            asked = self._asked(named, at)
        return self._with_system(asked, at)

    def _rename(self, row: Mapping[str, object], at: _Place) -> dict[str, object]:
        """The row under our names."""
        mapped = {ours: self._find(row, ours, theirs, at) for ours, theirs in self.columns.items()}
        gone = set(self.columns.values())
        kept = {name: value for name, value in row.items() if name not in gone}
        return {**kept, **mapped}

    def _find(self, row: Mapping[str, object], ours: str, theirs: str, at: _Place) -> object:
        """The column ``theirs``; a name that no column has whole reaches in at its dots."""
        if theirs in row:
            return row[theirs]
        value: object = row
        for name in theirs.split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise at.error(
                    f"no column {theirs!r}, which {self.key}.columns.{ours} names"
                    f"{_inside(row, theirs)}",
                    f"{_did_you_mean(theirs, _paths(row))}Name one that is there with "
                    f"{self.key}.columns: {{{ours}: COLUMN}}",
                )
            value = value[name]
        return value

    def _check_reserved(self, named: Mapping[str, object], at: _Place) -> None:
        for name in RESERVED_COLUMNS:
            if name in named:
                raise at.error(
                    f"reward functions get {name!r} from offbeat, so no column may have that name",
                    f"Give it another with {self.key}.columns: {{other_name: {name}}}",
                )

    def _prompt_column(self, named: Mapping[str, object], at: _Place) -> str:
        """Which of ``prompt`` and ``messages`` is the prompt; a mapped one wins."""
        there = [name for name in (PROMPT, MESSAGES) if name in named]
        chosen = [name for name in there if name in self.columns] or there
        if not chosen:
            raise at.error("no column 'prompt' or 'messages'", self._suggestion(named))
        if len(chosen) > 1:
            raise at.error(
                "both 'prompt' and 'messages' are there",
                f"Choose one with {self.key}.columns: {{messages: messages}} or {{prompt: prompt}}",
            )
        return chosen[0]

    def _suggestion(self, named: Mapping[str, object]) -> str:
        """How to name the prompt, with the column that most looks like one."""
        ways = (
            f"Name the one that holds the prompt with {self.key}.columns: {{prompt: COLUMN}}, "
            f"or write {self.key}.prompt_template"
        )
        best = max(_prompt_like(named), default=None)
        if best is None:
            return ways
        _, ours, theirs = best
        return f"Did you mean {self.key}.columns: {{{ours}: {theirs}}}? {ways}"

    def _conversation(self, named: Mapping[str, object], at: _Place) -> RowPrompt:
        """The prompt of a row with ``messages``."""
        try:
            messages, reference = without_answer(read_messages(named[MESSAGES]))
            check_asks(messages)
        except DataError as exc:
            raise at.error(f"column {self._theirs(MESSAGES)} {exc}", self._remap()) from exc
        columns = _others(named)
        if reference is not None:
            if REFERENCE in columns:
                raise at.error(
                    f"column {self._theirs(MESSAGES)} ends with an answer, which becomes the "
                    f"column {REFERENCE!r}, and there is one already",
                    f"Give that one another name with {self.key}.columns: "
                    f"{{other_name: {REFERENCE}}}",
                )
            columns[REFERENCE] = reference
        return RowPrompt(text=_last_user(messages), messages=messages, columns=columns)

    def _asked(self, named: Mapping[str, object], at: _Place) -> RowPrompt:
        """The prompt of a row with ``prompt``."""
        value, where = named[PROMPT], f"column {self._theirs(PROMPT)}"
        if isinstance(value, str):
            return RowPrompt(text=value, messages=(), columns=_others(named))
        if not isinstance(value, list | tuple):
            raise at.error(
                f"{where} must be text or a list of messages, got {type(value).__name__}",
                self._remap(),
            )
        try:
            messages = read_messages(value)
            check_asks(messages)
        except DataError as exc:
            theirs = self.columns.get(PROMPT, PROMPT)
            raise at.error(
                f"{where} {exc}",
                f"{self._remap()}; {{messages: {theirs}}} takes an assistant's last message as "
                "the reference answer",
            ) from exc
        return RowPrompt(text=_last_user(messages), messages=messages, columns=_others(named))

    def _remap(self) -> str:
        return (
            f"Correct the row, or name another column with {self.key}.columns: {{prompt: COLUMN}} "
            "or {messages: COLUMN}"
        )

    def _theirs(self, ours: str) -> str:
        theirs = self.columns.get(ours, ours)
        return repr(ours) if theirs == ours else f"{theirs!r} (as {ours})"

    def _format(self, template: str, values: Mapping[str, object], at: _Place) -> str:
        try:
            return template.format_map(values)
        except (LookupError, AttributeError, ValueError, TypeError) as exc:
            near = _did_you_mean(str(exc).strip("'"), list(values))
            raise at.error(
                f"{self.key}.prompt_template failed with {type(exc).__name__}: {exc}",
                f"{near}Correct the template {template!r}",
            ) from exc

    def _with_system(self, asked: RowPrompt, at: _Place) -> RowPrompt:
        if self.system_prompt is None:
            return asked
        if asked.messages and asked.messages[0].role == "system":
            raise at.error(
                "the row has its own system message, so "
                f"{self.key}.system_prompt would be a second one",
                f"Leave out {self.key}.system_prompt",
            )
        system = Message(role="system", content=self.system_prompt)
        messages = asked.messages or (Message(role="user", content=asked.text),)
        return RowPrompt(text=asked.text, messages=(system, *messages), columns=asked.columns)


def _with_ground_truth(named: dict[str, object]) -> dict[str, object]:
    """The row, with what verl's rewards call ``ground_truth`` as a column."""
    model = named.get(REWARD_MODEL)
    if GROUND_TRUTH in named or not isinstance(model, Mapping) or GROUND_TRUTH not in model:
        return named
    return {**named, GROUND_TRUTH: model[GROUND_TRUTH]}


def _others(named: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in named.items() if name not in (PROMPT, MESSAGES)}


def _last_user(messages: tuple[Message, ...]) -> str:
    users = [m.content for m in messages if m.role == "user"] or [messages[-1].content]
    return users[-1]


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(map(str, row)) or "none"


def _paths(row: Mapping[str, object]) -> list[str]:
    """The names of the columns, and of what lies one level inside them."""
    inside = [
        f"{name}.{below}"
        for name, value in row.items()
        if isinstance(value, Mapping)
        for below in value
    ]
    return [*map(str, row), *inside]


def _inside(row: Mapping[str, object], theirs: str) -> str:
    """What there is in the column that a dotted name reaches into."""
    outer = theirs.partition(".")[0]
    value = row.get(outer)
    return f" ({outer!r} has {_names(value)})" if isinstance(value, Mapping) else ""


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def _prompt_like(row: Mapping[str, object]) -> Iterator[tuple[float, str, str]]:
    """Likeness, our name and theirs of each column that may hold the prompt."""
    for name, value in row.items():
        if not isinstance(value, str | list):
            continue
        known = _PROMPT_NAMES if isinstance(value, str) else _PROMPT_NAMES + _CONVERSATION_NAMES
        ours = PROMPT if isinstance(value, str) else MESSAGES
        likeness = max(difflib.SequenceMatcher(None, name.lower(), k).ratio() for k in known)
        if likeness >= _LIKE:
            yield likeness, ours, name
