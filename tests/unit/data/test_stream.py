"""The order of prompts and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.columns import ColumnMap
from offbeat.data.rows import Rows
from offbeat.data.stream import PromptOptions, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import ConfigError, DataError, PromptTooLong
from offbeat.model.init import write_tokenizer
from offbeat.types import GroupId


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("plain")
    write_tokenizer(folder)
    return TextCodec.open(folder)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder, chat=True)
    return TextCodec.open(folder)


def numbered(n: int) -> Rows:
    return Rows(name="d", items=[{"prompt": f"{i}=", "answer": i} for i in range(n)])


def stream(rows: Rows, codec: TextCodec, seed: int = 1, **options: Any) -> PromptStream:
    options.setdefault("columns", ColumnMap())
    return PromptStream(rows, codec, PromptOptions(**options), seed=seed)


def test_prompt_carries_its_row_and_tokens(plain: TextCodec) -> None:
    prompts = stream(numbered(5), plain, shuffle=False)
    prompt = prompts.prompt_at(GroupId(13))
    assert (prompt.group_id, prompt.epoch, prompt.row) == (13, 2, 3)
    assert prompt.text == "3="
    assert prompt.token_ids.dtype == np.int64
    assert prompt.token_ids.tolist() == plain.encode("3=")
    assert prompt.columns == {"answer": 3}
    assert prompt.messages == ()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_each_epoch_has_every_row_once(plain: TextCodec, n: int, seed: int, epoch: int) -> None:
    prompts = stream(numbered(n), plain, seed)
    rows = [prompts.row_of(GroupId(epoch * n + i)) for i in range(n)]
    assert sorted(rows) == list(range(n))


def test_epochs_and_seeds_have_different_orders(plain: TextCodec) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        prompts = stream(numbered(50), plain, seed)
        return [prompts.row_of(GroupId(epoch * 50 + i)) for i in range(50)]

    orders = [order(1, 0), order(1, 1), order(2, 0), list(range(50))]
    assert len({tuple(o) for o in orders}) == 4


def test_order_is_pinned(plain: TextCodec) -> None:
    prompts = stream(numbered(8), plain, seed=1)
    found = [prompts.row_of(GroupId(i)) for i in range(16)]
    assert found == [4, 6, 3, 1, 5, 2, 0, 7, 5, 6, 1, 4, 0, 3, 7, 2]


@pytest.mark.invariant("I04")
def test_access_in_any_order_gives_the_same_prompts(plain: TextCodec) -> None:
    ids = [GroupId(i) for i in range(40)]
    forward = stream(numbered(7), plain)
    backward = stream(numbered(7), plain)
    scattered = {i: backward.prompt_at(i).row for i in sorted(ids, key=lambda i: (i * 17) % 40)}
    assert [forward.prompt_at(i).row for i in ids] == [scattered[i] for i in ids]
    late = stream(numbered(7), plain)
    assert late.prompt_at(GroupId(39)).row == scattered[GroupId(39)]


def test_data_set_of_one_row_never_ends(plain: TextCodec) -> None:
    prompts = stream(numbered(1), plain)
    assert [prompts.prompt_at(GroupId(i)).epoch for i in (0, 1, 10**9)] == [0, 1, 10**9]


def test_negative_group_id_is_refused(plain: TextCodec) -> None:
    with pytest.raises(IndexError, match="start at 0"):
        stream(numbered(3), plain).prompt_at(GroupId(-1))


def test_evaluation_has_every_row_once_in_order(plain: TextCodec) -> None:
    prompts = list(stream(numbered(6), plain, shuffle=True).evaluation_prompts())
    assert [p.row for p in prompts] == list(range(6))
    assert {p.group_id for p in prompts} == {-1}


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"max_prompt_len": 3}, 3),
        ({"context_len": 10, "max_new_tokens": 7}, 3),
        ({"context_len": 10, "max_new_tokens": 2, "max_prompt_len": 3}, 3),
        ({"context_len": 5, "max_new_tokens": 2, "max_prompt_len": 100}, 3),
    ],
)
def test_long_prompt_is_dropped_by_name(
    plain: TextCodec, options: dict[str, int], limit: int
) -> None:
    rows = Rows(name="d", items=[{"prompt": "12="}, {"prompt": "123="}])
    prompts = stream(rows, plain, shuffle=False, **options)
    assert len(prompts.prompt_at(GroupId(0)).token_ids) == 3
    with pytest.raises(PromptTooLong, match=rf"d: row 2: .* 4 tokens, the limit is {limit}"):
        prompts.prompt_at(GroupId(1))
    with pytest.raises(PromptTooLong):
        prompts.evaluation_prompt(1)
    assert prompts.prompt_at(GroupId(2)).row == 0


def test_long_prompt_ends_the_run_when_told_so(plain: TextCodec) -> None:
    prompts = stream(numbered(1), plain, max_prompt_len=1, overlong_prompt="error")
    with pytest.raises(DataError, match="overlong_prompt=error"):
        prompts.prompt_at(GroupId(0))


def test_prompt_without_tokens_is_an_error(plain: TextCodec) -> None:
    prompts = stream(Rows(name="d", items=[{"prompt": ""}]), plain)
    with pytest.raises(DataError, match="row 1: the prompt has no tokens"):
        prompts.prompt_at(GroupId(0))


def test_text_goes_through_the_template_of_a_model_that_has_one(chat: TextCodec) -> None:
    rows = numbered(1)
    rendered = chat.encode("<|user|>0=<|assistant|>")
    prompt = stream(rows, chat).prompt_at(GroupId(0))
    assert prompt.token_ids.tolist() == rendered
    assert prompt.text == "0="
    assert [m.role for m in prompt.messages] == ["user"]
    bare = stream(rows, chat, chat=False).prompt_at(GroupId(0))
    assert bare.token_ids.tolist() == chat.encode("0=")


def test_conversation_and_system_prompt_are_rendered(chat: TextCodec) -> None:
    rows = Rows(name="d", items=[{"messages": [{"role": "user", "content": "1?"}]}])
    prompts = stream(rows, chat, columns=ColumnMap(system_prompt="add"))
    prompt = prompts.prompt_at(GroupId(0))
    assert prompt.token_ids.tolist() == chat.encode("<|system|>add<|user|>1?<|assistant|>")
    assert prompt.text == "1?"


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": [{"role": "user", "content": "1?"}]}, {}),
        ({"prompt": "1"}, {"columns": ColumnMap(system_prompt="add")}),
        ({"prompt": "1"}, {"chat": True}),
    ],
)
def test_conversation_without_a_template_fails_at_the_start(
    plain: TextCodec, row: dict[str, object], options: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"row 1 is a conversation, but .* has no chat template"):
        stream(Rows(name="d", items=[row]), plain, **options)


def test_bad_row_fails_at_the_start_with_its_number(plain: TextCodec) -> None:
    rows = Rows(name="d", items=[{"prompt": "1"}, {"prompt": None}])
    with pytest.raises(DataError, match="d: row 2: column 'prompt' must be text"):
        stream(rows, plain)


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prompt_len": 0}, "at least 1 or null"),
        ({"context_len": 8, "max_new_tokens": 8}, "leaves no room for a prompt"),
        ({"chat": False, "columns": ColumnMap(system_prompt="s")}, "has no effect"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    options.setdefault("columns", ColumnMap())
    with pytest.raises(ConfigError, match=message):
        PromptOptions(**options)
