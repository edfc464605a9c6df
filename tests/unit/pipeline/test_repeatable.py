"""Which generators may be trusted to write the same bits in another run."""

from __future__ import annotations

import dataclasses

import pytest

from offbeat.generate.client import EngineInfo
from offbeat.pipeline.workers import why_not_repeatable

EXACT = EngineInfo(
    device="cpu",
    dtype="float32",
    threads=1,
    bitwise=True,
    max_error=0.0,
    parameters=10,
    onednn=True,
)


def test_generators_that_agree_bit_for_bit_are_repeatable() -> None:
    assert why_not_repeatable([EXACT]) == why_not_repeatable([EXACT, EXACT]) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cuda"}, "in float32 on cuda"),
        ({"dtype": "bfloat16"}, "in bfloat16 on cpu"),
        ({"bitwise": False, "max_error": 1e-6}, "agree to 1e-06 nats only"),
    ],
)
def test_other_generators_say_why_they_are_not(change: dict[str, object], why: str) -> None:
    other = dataclasses.replace(EXACT, **change)  # type: ignore[arg-type]  # of a test
    assert why in why_not_repeatable([other])


@pytest.mark.parametrize("change", [{"onednn": False}, {"threads": 2}])
def test_generators_that_decided_otherwise_than_each_other_are_not(
    change: dict[str, object],
) -> None:
    other = dataclasses.replace(EXACT, **change)  # type: ignore[arg-type]  # of a test
    assert "do not compute alike" in why_not_repeatable([EXACT, other])
