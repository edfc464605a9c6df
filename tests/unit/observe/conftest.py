"""Runs on disk as the pipeline leaves them, for everything that looks at one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offbeat.observe.ledger import LedgerTotals, TokenTotals
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import RolloutLog
from offbeat.observe.sinks import JsonlSink
from offbeat.observe.summary import RunStatus, RunTotals
from offbeat.types import (
    Completion,
    DropReason,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    Turn,
)

GROUPS = LedgerTotals(
    admitted=9, trained=6, dropped=dict.fromkeys(DropReason, 0) | {DropReason.FAILED: 2}, open=1
)
TOKENS = TokenTotals(generated=200, trained=150, wasted={"failed": 50})


def step_records(steps: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=i, version=i, seconds=1.0, metrics={"reward/mean": i / 10, "lag/group_mean": 1.0}
        )
        for i in range(1, steps + 1)
    ]


@pytest.fixture
def records() -> Callable[[int], list[StepRecord]]:
    """Step records with a reward of a tenth of the step."""
    return step_records


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Writes the metrics of a run, ``steps`` of them, and returns its folder."""

    def make(path: Path, steps: int = 3, changed_at: float | None = None) -> Path:
        sink = JsonlSink(path / "metrics.jsonl")
        for record in step_records(steps):
            sink.write(record.step, record.flat())
        if changed_at is not None:
            os.utime(path / "metrics.jsonl", (changed_at, changed_at))
        return path

    return make


@pytest.fixture
def end_run() -> Callable[..., None]:
    """Writes the summary of a run of three steps that took five seconds."""

    def end(path: Path, status: RunStatus, error: str | None = None) -> None:
        totals = RunTotals(0.0, step_records(3))
        summary = totals.summary(now=5.0, status=status, groups=GROUPS, tokens=TOKENS, error=error)
        summary.write(path / "summary.json")

    return end


@pytest.fixture
def log_rollouts() -> Callable[[Path], None]:
    """Writes the rollouts of step 3: group 5, rewards 1, 0.5, 0 and an invalid one; the answer has
    a terminal's control sequence in it.
    """

    def log(path: Path) -> None:
        completion = Completion(
            token_ids=np.array([7, 8, 9], dtype=np.int64),
            logprobs=np.array([-0.5, -1.0, -2.0], dtype=np.float32),
            versions=np.array([2, 2, 3], dtype=np.int64),
            stop_reason=StopReason.LENGTH,
            text="\x1b[2Jfirst\nsecond",
        )
        turn = Turn(prompt_ids=np.array([1], dtype=np.int64), completion=completion)
        rewards = [Scored(value=v, parts={"correct": v}) for v in (1.0, 0.5, 0.0)]
        prompt = Prompt(group_id=GroupId(5), epoch=0, row=0, token_ids=turn.prompt_ids, text="2+2=")
        group = RolloutGroup(
            prompt=prompt,
            rollouts=tuple(
                Rollout(sibling=i, turns=(turn,), reward=r)
                for i, r in enumerate([*rewards, Invalid(reason="timeout")])
            ),
            admission_version=PolicyVersion(2),
        )
        RolloutLog(path).write(3, [group], {(GroupId(5), 0): 1.25})

    return log
