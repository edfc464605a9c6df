"""math-verify, in this process and where it really runs: in a reward process, under a deadline."""

from __future__ import annotations

import sys

import pytest

from offbeat.errors import ConfigError, DataError, RewardError
from offbeat.rewards import math_verify
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.rollout.reward_source import RewardPart
from offbeat.types import Invalid, Scored

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        (r"so it is $\frac{1}{2}$", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"The answer is $\frac{1}{2}$.", 1.0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        (r"\boxed{4}", 4, 1.0),
    ],
)
def test_equal_expressions_are_equal(answer: str, reference: object, value: float) -> None:
    assert math_verify(answer, {"answer": reference}) == value


def test_a_reference_without_expression_is_a_fault_of_the_data() -> None:
    with pytest.raises(DataError, match="has no expression"):
        math_verify("4", {"answer": "$ $"})


def test_what_takes_too_long_is_an_error_and_not_zero() -> None:
    with pytest.raises(RewardError, match="not done after 1 s"):
        math_verify(r"$9^{9^{9^{9}}}$", {"answer": "4"}, seconds=1)


async def test_it_works_in_a_reward_process_by_name_with_its_options() -> None:
    part = RewardPart(source="offbeat.rewards:math_verify", name="math", args={"seconds": 1})
    async with AsyncRewardWrapper([part], timeout_seconds=10, workers=1) as score:
        right = await score("p", r"\boxed{\frac{1}{2}}", [], [], answer="0.5")
        assert right == Scored(value=1.0, parts={"math": 1.0})
        late = await score("p", r"$9^{9^{9^{9}}}$", [], [], answer="4")
        assert late == Invalid(reason="math: math-verify was not done after 1 s")
        assert score.counters.restarts == 0


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install math-verify"):
        math_verify("4", {"answer": "4"})
