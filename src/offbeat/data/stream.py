"""The endless, seeded stream of prompts: which row is prompt number n, and its tokens.

Owns the order of the rows and the length limit. Random access: ``prompt_at(group_id)`` needs
nothing but the number, so resuming a run means asking for the numbers that were not trained.
Consumes ``Rows``, produces ``Prompt``; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from offbeat.data.columns import ColumnMap, RowPrompt
from offbeat.data.rows import Rows
from offbeat.data.tokens import TextCodec
from offbeat.errors import ConfigError, DataError, PromptTooLong
from offbeat.seeds import derive
from offbeat.types import GroupId, IntArray, Message, Prompt

Overlong: TypeAlias = Literal["drop", "error"]

EVALUATION_GROUP = GroupId(-1)
"""The group id of every evaluation prompt; ``Prompt.row`` tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts.

    Attributes:
        columns: what the data set's columns mean.
        shuffle: another permutation in each epoch; otherwise file order.
        chat: render plain text prompts through the chat template as one user message. None: when
            the model has a template. Rows with messages, and a system prompt, always need the
            template.
        max_prompt_len: longest prompt, in tokens; None: as the context allows.
        context_len: tokens that the model can hold, prompt and answer together; None: no limit.
        max_new_tokens: room kept for the answer.
        overlong_prompt: what a prompt above the limit is: ``drop`` raises PromptTooLong, which ends
            its group with a reason; ``error`` raises DataError, which ends the run.
    """

    columns: ColumnMap
    shuffle: bool = True
    chat: bool | None = None
    max_prompt_len: int | None = None
    context_len: int | None = None
    max_new_tokens: int = 0
    overlong_prompt: Overlong = "drop"

    def __post_init__(self) -> None:
        if self.chat is False and self.columns.system_prompt is not None:
            raise ConfigError(
                f"{self.columns.key}.system_prompt has no effect with {self.columns.key}.chat=false"
            )
        if self.max_prompt_len is not None and self.max_prompt_len < 1:
            raise ConfigError(
                f"{self.columns.key}.max_prompt_len must be at least 1 or null, "
                f"got {self.max_prompt_len}"
            )
        if self.context_len is not None and self.context_len <= self.max_new_tokens:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} leaves no room for a prompt in a context of "
                f"{self.context_len} tokens"
            )

    @property
    def limit(self) -> int | None:
        """min(max_prompt_len, context_len - max_new_tokens), tokens; None when neither is given."""
        room = None if self.context_len is None else self.context_len - self.max_new_tokens
        given = [value for value in (self.max_prompt_len, room) if value is not None]
        return min(given, default=None)


class PromptStream:
    """Prompt number ``group_id`` of an endless walk over the rows.

    Epoch e holds the numbers e*n .. e*n + n - 1 for n rows, each row once. All rows are checked for
    their columns at construction; tokens are made when a prompt is asked for.

    Raises:
        DataError: a row lacks its prompt or has it in a wrong type.
    """

    def __init__(self, rows: Rows, codec: TextCodec, options: PromptOptions, *, seed: int) -> None:
        if not rows:
            raise DataError(f"{rows.name} has no rows")
        self._rows = rows
        self._codec = codec
        self._options = options
        self._seed = seed
        self._orders: dict[int, IntArray] = {}
        for index in range(len(rows)):
            self._check_chat(self._read(index), index)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._rows)

    def epoch_of(self, group_id: GroupId) -> int:
        """How many times the whole data set came before this prompt."""
        return group_id // len(self._rows)

    def row_of(self, group_id: GroupId) -> int:
        """Index of this prompt's row in the data set."""
        if group_id < 0:
            raise IndexError(f"group ids start at 0, got {group_id}")
        epoch, position = divmod(group_id, len(self._rows))
        return int(self._order(epoch)[position]) if self._options.shuffle else position

    def prompt_at(self, group_id: GroupId) -> Prompt:
        """The prompt with this number, the same in every run with this seed and these rows.

        Raises:
            PromptTooLong: longer than the limit, and ``overlong_prompt`` is ``drop``.
            DataError: longer than the limit, and it is ``error``; or the chat template refuses the
                row.
        """
        return self._prompt(self.row_of(group_id), group_id, self.epoch_of(group_id))

    def evaluation_prompt(self, row: int) -> Prompt:
        """The prompt of one row, outside the training stream. Raises like ``prompt_at``."""
        return self._prompt(row, EVALUATION_GROUP, 0)

    def evaluation_prompts(self) -> Iterator[Prompt]:
        """Every row once, in file order.

        Raises like ``prompt_at`` at the first overlong row, and ends there; ask
        ``evaluation_prompt`` for each row to go on past it.
        """
        return (self.evaluation_prompt(row) for row in range(len(self._rows)))

    def _order(self, epoch: int) -> IntArray:
        """The permutation of one epoch; two are kept, as open groups straddle the border."""
        order = self._orders.get(epoch)
        if order is None:
            order = _permutation(len(self._rows), derive(self._seed, "data", epoch))
            kept = self._orders.get(epoch - 1)
            self._orders = {epoch: order} if kept is None else {epoch - 1: kept, epoch: order}
        return order

    def _place(self, row: int) -> str:
        return f"{self._rows.name}: row {row + 1}"

    def _read(self, row: int) -> RowPrompt:
        return self._options.columns.read(self._rows[row], self._place(row))

    def _check_chat(self, asked: RowPrompt, row: int) -> None:
        """Messages, and an explicit chat option, need a template."""
        if self._codec.has_chat_template or not (asked.messages or self._options.chat):
            return
        raise DataError(
            f"{self._place(row)} is a conversation, but {self._codec.model_dir} has no chat "
            "template; give a plain text prompt without system_prompt, or a model with a template"
        )

    def _prompt(self, row: int, group_id: GroupId, epoch: int) -> Prompt:
        asked = self._read(row)
        messages = asked.messages or self._as_chat(asked.text)
        try:
            token_ids = self._encoded(asked.text, messages)
        except DataError as exc:
            raise DataError(f"{self._place(row)}: {exc}") from exc
        self._check_length(len(token_ids), row)
        return Prompt(
            group_id=group_id,
            epoch=epoch,
            row=row,
            token_ids=np.asarray(token_ids, dtype=np.int64),
            text=asked.text,
            messages=messages,
            columns=asked.columns,
        )

    def _encoded(self, text: str, messages: tuple[Message, ...]) -> list[int]:
        if messages:
            return self._codec.encode(self._codec.render_chat(messages))
        return self._codec.encode_prompt(text)

    def _as_chat(self, text: str) -> tuple[Message, ...]:
        """``text`` as one user message where plain text goes through the template."""
        chat = self._options.chat
        use = self._codec.has_chat_template if chat is None else chat
        return (Message(role="user", content=text),) if use else ()

    def _check_length(self, length: int, row: int) -> None:
        if length == 0:
            raise DataError(f"{self._place(row)}: the prompt has no tokens")
        limit = self._options.limit
        if limit is None or length <= limit:
            return
        message = f"{self._place(row)}: the prompt has {length} tokens, the limit is {limit}"
        if self._options.overlong_prompt == "error":
            raise DataError(f"{message} ({self._options.columns.key}.overlong_prompt=error)")
        raise PromptTooLong(message)


def _permutation(n: int, seed: int) -> IntArray:
    """A permutation of 0..n-1 by sorting n random keys.

    Made from a bit stream that numpy promises to keep, which ``Generator.permutation`` is not: the
    order of the data must survive an upgrade.
    """
    keys = np.random.PCG64(seed).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)
