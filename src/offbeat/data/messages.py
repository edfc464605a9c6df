"""Conversations in a row: OpenAI's list of messages becomes ours.

Owns the shape of a message and where a conversation ends; knows no columns and no chat template.
Errors say what is wrong with the value; which row and column it is, the caller knows.
"""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.errors import DataError
from offbeat.types import Message


def read_messages(value: object) -> tuple[Message, ...]:
    """The messages of a conversation, at least one.

    Each is ``{role, content}``; fields that are null do not count. The content is a text, or a list
    of ``{type: text, text}`` parts, which are joined by line ends.

    Raises:
        DataError: the value is not that.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"must be a list of messages, got {type(value).__name__}")
    if not value:
        raise DataError("is a conversation without messages")
    return tuple(_message(item, f"message {n}") for n, item in enumerate(value, start=1))


def without_answer(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str | None]:
    """The conversation up to the answer that a model is to give, and the answer it ends with.

    Raises:
        DataError: no message comes before the answer.
    """
    if messages[-1].role != "assistant":
        return messages, None
    if len(messages) == 1:
        raise DataError("has only an assistant's message; a user's must come before it")
    return messages[:-1], messages[-1].content


def check_asks(messages: tuple[Message, ...]) -> None:
    """Refuse a conversation that does not end where the model has its turn."""
    if messages[-1].role not in ("user", "tool"):
        raise DataError(
            f"asks nothing: before the model's answer comes a message of {messages[-1].role!r}, "
            "not of a user or a tool"
        )


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"has as {where} {type(item).__name__}, not {{role, content}}")
    fields = {name: value for name, value in item.items() if value is not None}
    if set(fields) != {"role", "content"}:
        raise DataError(
            f"has as {where} one with {', '.join(map(str, fields)) or 'nothing'}; it must have "
            "role and content and nothing else"
        )
    if not isinstance(fields["role"], str):
        raise DataError(f"has in {where} a role of {type(fields['role']).__name__}, not a text")
    return Message(role=fields["role"], content=_content(fields["content"], where))


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(_text(part, where) for part in content)
    raise DataError(
        f"has in {where} a content of {type(content).__name__}, not a text or a list of "
        "{type: text, text}"
    )


def _text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DataError(
            f"has in {where} a part of type {kind!r}; only text can be read: {{type: text, text}}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise DataError(f"has in {where} a part whose text is {type(text).__name__}")
    return text
