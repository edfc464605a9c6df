"""A data set: where its rows come from and how a row becomes a prompt."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.schema import PositiveInt, Problem, Section, Text, preset

RESERVED_COLUMNS = ("completions", "prompt_ids", "completion_ids")
"""Names under which a reward function gets what offbeat made; no column may have them."""


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
    """A .jsonl, .json, .csv or .parquet file; ``FOLDER[@SPLIT]``, laid out as on the Hugging Face
    hub; ``hub:NAME[:CONFIG][@SPLIT]``; ``reasoning_gym:NAME``; or ``module:function``, which
    returns the rows."""

    batch_size: PositiveInt = 8
    """g: prompts (groups) of one training step. Training only."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name (prompt, messages, ...) to the data set's column name; dots reach into mappings
    (``{answer: reward_model.ground_truth}``)."""

    args: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the function, or options of the task, that ``path`` names."""

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
        if self.args and (":" not in self.path or self.path.startswith("hub:")):
            kind = "on the hub" if ":" in self.path else "a file or folder"
            yield Problem(
                path="args",
                text=f"no effect: path {self.path!r} is {kind}; args are for module:function and "
                "reasoning_gym:NAME",
            )
        for name in RESERVED_COLUMNS:
            if name in self.columns:
                yield Problem(
                    path=f"columns.{name}",
                    text=f"{self.columns[name]!r} cannot be handed on under this name: reward "
                    "functions get it from offbeat; choose another",
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
