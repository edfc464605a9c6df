"""What a data set's columns mean."""

from __future__ import annotations

import pytest

from offbeat.data.columns import ColumnMap
from offbeat.errors import ConfigError, DataError
from offbeat.types import Message


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


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
            r"found: question, id\. Did you mean train_dataset\.columns: \{prompt: question\}\?",
        ),
        (ColumnMap(), {"id": 1}, r"found: id\. Name the one that .*columns: \{prompt: COLUMN\}"),
        (
            ColumnMap(),
            {"input_id": "x", "Question": "q", "text": [1]},
            r"Did you mean train_dataset\.columns: \{prompt: Question\}\?",
        ),
        (
            ColumnMap(),
            {"id": 1, "conversation": [user("a")]},
            r"Did you mean train_dataset\.columns: \{messages: conversation\}\?",
        ),
        (
            ColumnMap(columns={"prompt": "qestion"}),
            {"question": "x"},
            r"no column 'qestion', which train_dataset\.columns\.prompt names; found: question\. "
            r"Did you mean 'question'\? .*columns: \{prompt: COLUMN\}",
        ),
        (
            ColumnMap(columns={"answer": "info.gold"}),
            {"prompt": "x", "info": {"golds": 1, "level": 2}},
            r"no column 'info\.gold', .* \('info' has golds, level\); .*mean 'info\.golds'\?",
        ),
        (ColumnMap(columns={"answer": "a.b"}), {"prompt": "x", "a": "b"}, r"no column 'a\.b'"),
        (
            ColumnMap(),
            {"prompt": 3, "id": 1},
            r"column 'prompt' must be text or a list of messages, got int; found: prompt, id\. "
            r".*train_dataset\.columns: \{prompt: COLUMN\}",
        ),
        (
            ColumnMap(columns={"prompt": "q"}),
            {"q": None},
            r"column 'q' \(as prompt\) must be text or a list of messages, got NoneType",
        ),
        (ColumnMap(), {"prompt": "q", "messages": []}, "both 'prompt' and 'messages'"),
        (
            ColumnMap(),
            {"messages": "hi", "id": 1},
            r"column 'messages' must be a list of messages, got str; found: messages, id\. .*COL",
        ),
        (ColumnMap(), {"messages": []}, "is a conversation without messages"),
        (ColumnMap(), {"messages": ["hi"]}, r"as message 1 str, not \{role, content\}"),
        (ColumnMap(), {"messages": [{"role": "user"}]}, "one with role; it must have role and"),
        (ColumnMap(), {"messages": [user("a") | {"tool_calls": [1]}]}, "role, content, tool_calls"),
        (ColumnMap(), {"messages": [{"role": 3, "content": "a"}]}, "in message 1 a role of int"),
        (ColumnMap(), {"messages": [{"role": "user", "content": 3}]}, "a content of int, not a"),
        (
            ColumnMap(),
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "in message 1 a part of type 'image_url'; only text can be read",
        ),
        (
            ColumnMap(),
            {"messages": [{"role": "user", "content": ["a"]}]},
            "in message 1 a part of type 'str'",
        ),
        (
            ColumnMap(),
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "a part whose text is NoneType",
        ),
        (ColumnMap(), {"messages": [assistant("b")]}, "has only an assistant's message"),
        (
            ColumnMap(),
            {"messages": [user("a"), assistant("b"), assistant("c")]},
            "asks nothing: before the model's answer comes a message of 'assistant'",
        ),
        (
            ColumnMap(),
            {"messages": [user("a"), assistant("b")], "reference": "c"},
            r"there is one already; .*columns: \{other_name: reference\}",
        ),
        (
            ColumnMap(columns={"prompt": "chat"}),
            {"chat": [user("a"), assistant("b")]},
            r"column 'chat' \(as prompt\) asks nothing: .*; \{messages: chat\} takes an assist",
        ),
        (ColumnMap(), {"prompt": "q", "completions": "c"}, r"columns: \{other_name: completions\}"),
        (
            ColumnMap(prompt_template="{x}"),
            {"y": 1},
            r"KeyError: 'x'; found: y\. Correct the template",
        ),
        (
            ColumnMap(prompt_template="{qestion}"),
            {"question": 1},
            r"found: question\. Did you mean 'question'\? Correct the template '\{qestion\}'",
        ),
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


def test_a_dotted_name_reaches_into_a_column_that_stays() -> None:
    row = {"prompt": "q", "info": {"gold": {"text": "s"}}}
    read = ColumnMap(columns={"answer": "info.gold.text"}).read(row, "d")
    assert read.columns == {"answer": "s", "info": row["info"]}


def test_a_column_with_a_dot_in_its_name_comes_before_what_lies_inside_another() -> None:
    row = {"prompt": "q", "a.b": "whole", "a": {"b": "inside"}}
    read = ColumnMap(columns={"answer": "a.b"}).read(row, "d")
    assert read.columns == {"answer": "whole", "a": {"b": "inside"}}


def test_a_row_of_trl_may_have_a_conversation_as_its_prompt() -> None:
    row = {"prompt": [{"role": "system", "content": "s"}, user("q")], "solution": "4"}
    read = ColumnMap().read(row, "d")
    assert read.text == "q"
    assert [m.role for m in read.messages] == ["system", "user"]
    assert read.columns == {"solution": "4"}


def test_a_row_of_verl_gives_its_reward_the_ground_truth_by_name() -> None:
    model = {"style": "rule", "ground_truth": "4"}
    row = {
        "prompt": [user("q")],
        "data_source": "openai/gsm8k",
        "reward_model": model,
        "extra_info": {"index": 3},
    }
    columns = ColumnMap().read(row, "d").columns
    assert columns["ground_truth"] == "4"
    assert columns["data_source"] == "openai/gsm8k"
    assert columns["extra_info"] == {"index": 3}
    assert columns["reward_model"] == model


def test_a_ground_truth_of_its_own_is_kept() -> None:
    row = {"prompt": "q", "ground_truth": "own", "reward_model": {"ground_truth": "other"}}
    assert ColumnMap().read(row, "d").columns["ground_truth"] == "own"
    mapped = ColumnMap(columns={"ground_truth": "gold"}).read({**row, "gold": "mine"}, "d")
    assert mapped.columns["ground_truth"] == "mine"


@pytest.mark.parametrize("model", ["a-reward-model", {"style": "model"}, None])
def test_a_reward_model_without_ground_truth_is_a_column_like_others(model: object) -> None:
    columns = ColumnMap().read({"prompt": "q", "reward_model": model}, "d").columns
    assert columns == {"reward_model": model}


def test_text_parts_of_a_message_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    read = ColumnMap().read({"messages": [{"role": "user", "content": parts}]}, "d")
    assert read.text == "a\nb"


def test_the_answer_that_a_conversation_ends_with_is_cut_off_and_becomes_the_reference() -> None:
    row = {"messages": [user("q"), assistant("a"), user("r"), assistant("b")], "id": 1}
    read = ColumnMap().read(row, "d")
    assert [m.content for m in read.messages] == ["q", "a", "r"]
    assert read.text == "r"
    assert read.columns == {"id": 1, "reference": "b"}


def test_a_conversation_that_ends_with_its_user_has_no_reference() -> None:
    assert ColumnMap().read({"messages": [user("q")]}, "d").columns == {}


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
