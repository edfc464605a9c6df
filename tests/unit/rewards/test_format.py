"""Rewards of form and of length."""

from __future__ import annotations

import pytest

from offbeat.errors import ConfigError
from offbeat.rewards import json_format, length_limit, length_penalty, regex_format

THINK = r"<think>.*</think>\s*<answer>.*</answer>"


def test_the_whole_answer_must_match_the_expression() -> None:
    assert regex_format("\n<think>a\nb</think>\n<answer>4</answer>\n", pattern=THINK) == 1.0
    assert regex_format("so <think>a</think><answer>4</answer>", pattern=THINK) == 0.0
    with pytest.raises(ConfigError, match=r"pattern: '\(' is not a regular expression"):
        regex_format("a", pattern="(")


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("[1, 2]", (), 1.0),
        ("{'a': 1}", (), 0.0),
        ("NaN", (), 0.0),
        ("", (), 0.0),
        ("[" * 100_000, (), 0.0),
        ('{"a": 1}', ("a",), 1.0),
        ('{"a": 1}', ("a", "b"), 0.0),
        ("[1]", ("a",), 0.0),
        ('{"a": 1}', {"a": "integer"}, 1.0),
        ('{"a": 1.5}', {"a": "integer"}, 0.0),
        ('{"a": 1}', {"a": "number"}, 1.0),
        ('{"a": true}', {"a": "integer"}, 0.0),
        ('{"a": true}', {"a": "boolean"}, 1.0),
        ('{"a": null}', {"a": "null"}, 1.0),
        ('```json\n{"a": "x"}\n```', {"a": "string"}, 1.0),
    ],
)
def test_json_with_its_keys_and_types(text: str, keys: object, value: float) -> None:
    assert json_format(text, keys=keys) == value  # type: ignore[arg-type]  # tuples and mappings


def test_a_code_fence_can_be_refused_and_an_unknown_type_is_an_error() -> None:
    assert json_format("```\n1\n```", fenced=False) == 0.0
    with pytest.raises(ConfigError, match=r"keys\.a: 'int' is not one of string, integer"):
        json_format("{}", keys={"a": "int"})


def test_length_is_limited_and_punished_by_tokens() -> None:
    assert [length_limit("", [0] * n, tokens=2) for n in (1, 2, 3)] == [1.0, 1.0, 0.0]
    punished = [length_penalty("", [0] * n, free=2, limit=6) for n in (0, 2, 3, 4, 6, 9)]
    assert punished == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ConfigError, match="0 <= free < limit"):
        length_penalty("", [], free=6, limit=6)
    with pytest.raises(ConfigError, match="tokens: 0"):
        length_limit("", [], tokens=0)
