"""How reward functions are recognized, called and read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from offbeat.errors import DataError, RewardError
from offbeat.rollout.signatures import Form, RewardFunction, RewardInput, form_of


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs): ...
def areal_singular(prompt, completion, prompt_ids, completion_ids): ...
def areal_rest(prompt, completion, *ids, **columns): ...
def anything(*texts, name, **columns): ...
def trl(completions, **kwargs): ...
def trl_prompts(prompts, completions, ground_truth, **kwargs): ...
def trl_ids(completion_ids, completions): ...
def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_rest(solution_str, **kwargs): ...
def plain(completion): ...
def plain_columns(completion, answer, *, scale=1.0): ...
def plain_first(answer, completion): ...


@functools.wraps(verl)
def wrapped(*args, **kwargs): ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (areal, Form.AREAL),
        (areal_singular, Form.AREAL),
        (areal_rest, Form.AREAL),
        (anything, Form.AREAL),
        (trl, Form.TRL),
        (trl_prompts, Form.TRL),
        (trl_ids, Form.TRL),
        (verl, Form.VERL),
        (verl_rest, Form.VERL),
        (wrapped, Form.VERL),
        (plain, Form.PLAIN),
        (plain_columns, Form.PLAIN),
        (plain_first, Form.PLAIN),
        (lambda text: 1.0, None),
        (lambda prompt, completions: 1.0, None),
        (lambda a, b, c, d: 1.0, None),
        (lambda **columns: 1.0, None),
        (lambda: 1.0, None),
    ],
)
def test_the_form_follows_from_the_names_of_the_parameters(
    function: Callable[..., object], form: Form | None
) -> None:
    assert form_of(inspect.signature(function)) is form


def answer(text: str = "4", **columns: object) -> RewardInput:
    return RewardInput(
        prompt="2+2=", completion=text, prompt_ids=[7], completion_ids=[1, 2], columns=columns
    )


def called(function: Callable[..., object], *answers: RewardInput, **args: object) -> list[object]:
    reward = RewardFunction.of(function, args, "rollout.reward_fn")
    return reward.values(answers, reward.call(answers))


def test_each_form_gets_the_columns_that_it_has_parameters_for() -> None:
    given = answer(answer="4", other=1)
    assert called(lambda completion, answer: (completion, answer), given) == [("4", "4")]
    assert called(lambda completion, **rest: rest, given) == [{"answer": "4", "other": 1}]
    assert called(lambda completion, columns: columns, given) == [{"answer": "4", "other": 1}]
    assert called(
        lambda prompt, completions, prompt_ids, completion_ids, other: [completion_ids, other],
        given,
    ) == [[[1, 2], 1]]
    assert called(lambda completions, other: other, given, given) == [1, 1]


def test_a_column_does_not_hide_what_offbeat_gives() -> None:
    given = answer(completion="column", columns="column", solution_str="column", answer="a")
    assert called(lambda completion: completion, given) == ["4"]
    assert called(lambda completion, columns: columns["answer"], given) == ["a"]
    assert called(lambda solution_str: solution_str, given) == ["4"]


def test_fixed_arguments_win_over_columns() -> None:
    assert called(lambda completion, scale: scale, answer(scale=1), scale=5) == [5]


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(RewardError) as caught:
        called(plain_columns, answer(question="q", solution="s"))
    assert "missing a required argument: 'answer'" in str(caught.value)
    assert "question, solution" in str(caught.value)
    assert "train_dataset.columns" in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        {"ground_truth": "t", "answer": "no"},
        {"reward_model": {"ground_truth": "t", "style": "rule"}, "answer": "no"},
        {"answer": "t"},
        {"reference": "t"},
    ],
)
def test_verl_finds_its_ground_truth(columns: dict[str, object]) -> None:
    def score(data_source, solution_str, ground_truth, extra_info=None):
        return [data_source, solution_str, ground_truth, extra_info]

    assert called(score, answer(data_source="d", **columns)) == [["d", "4", "t", None]]


def test_verl_without_a_ground_truth_names_the_columns() -> None:
    with pytest.raises(DataError, match=r"ground_truth, .*its other columns: data_source"):
        called(verl, answer(data_source="d"))


def test_a_verl_score_becomes_the_reward_and_its_numbers_parts() -> None:
    returned = {"score": 0.5, "acc": True, "pred": "four"}
    assert called(lambda solution_str: returned, answer(answer="4")) == [
        {"reward": 0.5, "acc": True}
    ]
    assert called(lambda solution_str: 0.25, answer(answer="4")) == [0.25]


@pytest.mark.parametrize("values", [[1.0, None], (1.0, None), np.array([1.0, np.nan])])
def test_lists_tuples_and_arrays_have_one_value_for_each_answer(values: object) -> None:
    assert called(lambda completions: values, answer(), answer())[0] == 1.0


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (1.0, "returned float for 2 answers, expected a list of numbers"),
        ({"a": 1}, "returned dict for 2 answers"),
        ("ab", "returned str for 2 answers"),
        ([1.0], "returned 1 values for 2 answers"),
    ],
)
def test_what_is_no_list_of_that_length_is_refused(returned: object, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        called(lambda completions: returned, answer(), answer())


def test_both_spellings_of_the_ids_of_answers_are_there() -> None:
    assert called(
        lambda completions, completion_ids, completions_ids: [
            completion_ids == completions_ids == [[1, 2]]
        ],
        answer(),
    ) == [True]
