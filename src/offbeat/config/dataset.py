"""A data set: where its rows come from and how a row becomes a prompt."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.schema import PositiveInt, Problem, Section, Text, preset


class OverlongPrompt(StrEnum):
    """What happens to a prompt longer than ``max_prompt_len``."""

    DROP = "drop"
    ERROR = "error"


class ChatTemplate(StrEnum):
    """Whether a plain prompt is wrapped as a user message through the model's chat template."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig(Section):
    """Rows to train on or to evaluate on."""

    path: Text
    """A file (``rows.jsonl``) or ``module:function``, which returns the rows."""

    batch_size: PositiveInt = 8
    """g: prompts (groups) of one training step. Training only."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name (prompt, messages, ...) to the data set's column name."""

    args: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the function that ``path`` names."""

    shuffle: bool = field(default_factory=preset(True))
    """Seeded order, new in every epoch. Training only: evaluation reads rows in order."""

    max_prompt_len: PositiveInt | None = None
    """Longest prompt, tokens; null: whatever fits the model."""

    overlong_prompt: OverlongPrompt = OverlongPrompt.DROP
    """drop leaves the row out and counts it; error stops the run."""

    limit: PositiveInt | None = None
    """Use the first n rows only."""

    system_prompt: str | None = None
    """System message put before every conversation."""

    prompt_template: str | None = None
    """Python format string over the row's columns, for example ``What is {a}+{b}?``."""

    chat_template: ChatTemplate = ChatTemplate.AUTO
    """auto: on when the tokenizer has a chat template."""

    def _contradictions(self) -> Iterator[Problem]:
        if self.args and ":" not in self.path:
            yield Problem(
                path="args",
                text=f"no effect: path {self.path!r} is a file; args are for a module:function",
            )
        if self.prompt_template is not None:
            yield from _template_problems(self.prompt_template)


def _template_problems(template: str) -> Iterator[Problem]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as exc:
        yield Problem(
            path="prompt_template", text=f"{template!r} is not a Python format string: {exc}"
        )
        return
    if any(not name or name[0].isdigit() for name in names):
        yield Problem(
            path="prompt_template",
            text=f"{template!r} has a field without a name; write {{column}}",
        )
    elif not names:
        yield Problem(
            path="prompt_template", text=f"{template!r} names no column; write {{column}}"
        )
