"""What a data set's columns mean."""

from __future__ import annotations

import pytest

from offbeat.data.columns import ColumnMap
from offbeat.errors import ConfigError, DataError
from offbeat.types import Message


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_mapped_columns_are_known_under_our_names_only() -> None:
    columns = ColumnMap(columns={"prompt": "question", "answer": "solution"})
    read = columns.read({"question": "q", "solution": "s", "level": 3}, "d: row 1")
    assert read.text == "q"
    assert read.messages == ()
    assert read.columns == {"answer": "s", "level": 3}


def test_mapped_column_hides_one_that_has_its_name() -> None:
    columns = ColumnMap(columns={"answer": "final"})
    read = columns.read({"prompt": "q", "answer": "long", "final": "short"}, "d: row 1")
    assert read.columns == {"answer": "short"}


def test_names_can_be_swapped() -> None:
    columns = ColumnMap(columns={"a": "b", "b": "a"})
    assert columns.read({"prompt": "q", "a": 1, "b": 2}, "p").columns == {"a": 2, "b": 1}


def test_template_uses_columns_under_either_name() -> None:
    columns = ColumnMap(
        columns={"answer": "solution"}, prompt_template="{question} ({info[level]}, {answer})"
    )
    row = {"question": "q", "info": {"level": 2}, "solution": "s"}
    read = columns.read(row, "d: row 1")
    assert read.text == "q (2, s)"
    assert read.columns == {"question": "q", "info": {"level": 2}, "answer": "s"}


def test_conversation_text_is_the_last_user_message() -> None:
    row = {"messages": [user("first"), {"role": "assistant", "content": "x"}, user("second")]}
    read = ColumnMap().read(row, "d: row 1")
    assert read.text == "second"
    assert [m.role for m in read.messages] == ["user", "assistant", "user"]


def test_system_prompt_goes_first_and_makes_a_plain_prompt_a_conversation() -> None:
    columns = ColumnMap(system_prompt="be brief")
    system = Message(role="system", content="be brief")
    plain = columns.read({"prompt": "q"}, "d: row 1")
    assert plain.messages == (system, Message(role="user", content="q"))
    assert plain.text == "q"
    chat = columns.read({"messages": [user("q")]}, "d: row 1")
    assert chat.messages == plain.messages


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (
            ColumnMap(),
            {"question": "q", "id": 1},
            r"found: question, id\. .*train_dataset\.columns",
        ),
        (ColumnMap(columns={"prompt": "q"}), {"question": "x"}, r"no column 'q'.*columns\.prompt"),
        (ColumnMap(), {"prompt": 3}, "row 7: column 'prompt' must be text, got int"),
        (
            ColumnMap(columns={"prompt": "q"}),
            {"q": None},
            r"column 'q' \(as prompt\) must be text, got NoneType",
        ),
        (ColumnMap(), {"prompt": "q", "messages": []}, "both 'prompt' and 'messages'"),
        (ColumnMap(), {"messages": "hi"}, "must be a list of messages, got str"),
        (ColumnMap(), {"messages": []}, "is empty"),
        (ColumnMap(), {"messages": ["hi"]}, r"message 1 must be \{role, content\}, got str"),
        (ColumnMap(), {"messages": [{"role": "user"}]}, "nothing else, got role"),
        (ColumnMap(), {"messages": [user("a") | {"tool_calls": [1]}]}, "nothing else, got .*tool"),
        (
            ColumnMap(),
            {"messages": [{"role": "user", "content": 3}]},
            "must be text, got str and int",
        ),
        (
            ColumnMap(),
            {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
            "ends with a message of 'assistant'",
        ),
        (ColumnMap(), {"prompt": "q", "completions": "c"}, r"columns: \{other_name: completions\}"),
        (ColumnMap(prompt_template="{x}"), {"y": 1}, "KeyError: 'x'; the columns are: y"),
        (
            ColumnMap(prompt_template="{y:.2f}"),
            {"y": "a"},
            "prompt_template failed with ValueError",
        ),
        (
            ColumnMap(system_prompt="s"),
            {"messages": [{"role": "system", "content": "own"}, user("a")]},
            "has its own system message",
        ),
    ],
)
def test_bad_row_is_named_with_what_to_change(
    columns: ColumnMap, row: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        columns.read(row, "d: row 7")
    assert str(caught.value).startswith("d: row 7")


def test_explicit_mapping_settles_prompt_against_messages() -> None:
    row = {"prompt": "p", "messages": [user("m")]}
    assert ColumnMap(columns={"prompt": "prompt"}).read(row, "d").messages == ()
    assert ColumnMap(columns={"messages": "messages"}).read(row, "d").text == "m"


def test_null_fields_of_a_message_do_not_count() -> None:
    row = {"messages": [user("a") | {"name": None}]}
    assert ColumnMap().read(row, "d").text == "a"


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("columns", "template", "message"),
    [
        ({}, "no column here", "uses no column"),
        ({}, "{open", "is not a format string"),
        ({"prompt": "q"}, "{question}", r"columns\.prompt has no effect"),
    ],
)
def test_template_without_effect_is_refused(
    columns: dict[str, str], template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ColumnMap(columns=columns, prompt_template=template)
