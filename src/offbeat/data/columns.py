"""Give the columns of a data set their meaning: what is the prompt, what do rewards get.

Owns the mapping from the data set's column names to ours and the types of ``prompt`` and
``messages``. Consumes a row, produces a ``RowPrompt``; knows no tokenizer and no order of rows.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.errors import ConfigError, DataError
from offbeat.types import Message

PROMPT = "prompt"
MESSAGES = "messages"
RESERVED = ("completions", "prompt_ids", "completion_ids")
"""Names that a reward function gets from offbeat itself; a column must not have them."""


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
class ColumnMap:
    """How to read a row.

    ``columns`` maps our name to the data set's: ``{"prompt": "question"}``. A mapped column is
    known under our name only and hides a column that already has it; the others keep theirs. The
    prompt comes from ``prompt_template`` (a Python format string over the columns, under either
    name) when given, else from the column ``prompt`` (text) or ``messages`` (a list of ``{role,
    content}`` that ends with the user's turn). ``system_prompt`` is put in front as a system
    message. ``key`` is the section named in errors.
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
        named = self._rename(row, place)
        columns = {name: value for name, value in named.items() if name not in (PROMPT, MESSAGES)}
        for name in RESERVED:
            if name in columns:
                raise DataError(
                    f"{place}: reward functions get {name!r} from offbeat, so no column may have "
                    f"that name; give it another with {self.key}.columns: {{other_name: {name}}}"
                )
        if self.prompt_template is not None:
            text = self._format(self.prompt_template, {**row, **named}, place)
            return self._with_system(text, (), columns, place)
        source = self._prompt_column(named, place)
        if source == MESSAGES:
            messages = _messages(named[MESSAGES], f"{place}: column {self._theirs(MESSAGES)}")
            users = [m.content for m in messages if m.role == "user"] or [messages[-1].content]
            return self._with_system(users[-1], messages, columns, place)
        value = named[PROMPT]
        if not isinstance(value, str):
            raise DataError(
                f"{place}: column {self._theirs(PROMPT)} must be text, got {type(value).__name__}"
            )
        return self._with_system(value, (), columns, place)

    def _rename(self, row: Mapping[str, object], place: str) -> dict[str, object]:
        for ours, theirs in self.columns.items():
            if theirs not in row:
                raise DataError(
                    f"{place}: no column {theirs!r}, which {self.key}.columns.{ours} names; "
                    f"found: {_names(row)}"
                )
        mapped = set(self.columns.values())
        kept = {name: value for name, value in row.items() if name not in mapped}
        return {**kept, **{ours: row[theirs] for ours, theirs in self.columns.items()}}

    def _prompt_column(self, named: Mapping[str, object], place: str) -> str:
        """Which of ``prompt`` and ``messages`` is the prompt; a mapped one wins."""
        there = [name for name in (PROMPT, MESSAGES) if name in named]
        chosen = [name for name in there if name in self.columns] or there
        if not chosen:
            raise DataError(
                f"{place}: no column 'prompt' or 'messages'; found: {_names(named)}. "
                f"Name the one that holds the prompt with {self.key}.columns: {{prompt: COLUMN}}, "
                f"or write {self.key}.prompt_template"
            )
        if len(chosen) > 1:
            raise DataError(
                f"{place}: both 'prompt' and 'messages' are there; choose one with "
                f"{self.key}.columns: {{messages: messages}} or {{prompt: prompt}}"
            )
        return chosen[0]

    def _theirs(self, ours: str) -> str:
        theirs = self.columns.get(ours, ours)
        return repr(ours) if theirs == ours else f"{theirs!r} (as {ours})"

    def _format(self, template: str, values: Mapping[str, object], place: str) -> str:
        try:
            return template.format_map(values)
        except (LookupError, AttributeError, ValueError, TypeError) as exc:
            raise DataError(
                f"{place}: {self.key}.prompt_template failed with {type(exc).__name__}: {exc}; "
                f"the columns are: {_names(values)}"
            ) from exc

    def _with_system(
        self,
        text: str,
        messages: tuple[Message, ...],
        columns: Mapping[str, object],
        place: str,
    ) -> RowPrompt:
        if self.system_prompt is None:
            return RowPrompt(text=text, messages=messages, columns=columns)
        if messages and messages[0].role == "system":
            raise DataError(
                f"{place}: the row has its own system message, "
                f"so {self.key}.system_prompt would be a second one"
            )
        system = Message(role="system", content=self.system_prompt)
        asked = messages or (Message(role="user", content=text),)
        return RowPrompt(text=text, messages=(system, *asked), columns=columns)


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(map(str, row)) or "none"


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} must be a list of messages, got {type(value).__name__}")
    messages = tuple(
        _message(item, f"{where}, message {n}") for n, item in enumerate(value, start=1)
    )
    if not messages:
        raise DataError(f"{where} is empty")
    if messages[-1].role not in ("user", "tool"):
        raise DataError(
            f"{where} ends with a message of {messages[-1].role!r}; the model answers a user's "
            "turn, so leave out what follows it"
        )
    return messages


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where} must be {{role, content}}, got {type(item).__name__}")
    fields = {name: value for name, value in item.items() if value is not None}
    if set(fields) != {"role", "content"}:
        raise DataError(
            f"{where} must have role and content and nothing else, got {_names(fields)}"
        )
    role, content = fields["role"], fields["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{where}: role and content must be text, got {type(role).__name__} "
            f"and {type(content).__name__}"
        )
    return Message(role=role, content=content)
