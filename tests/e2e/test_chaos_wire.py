"""Answers that are lost, repeated or held up on their way: one fate per group, and no hang."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_equal, check_run, fates, max_staleness, restarts

pytestmark = pytest.mark.slow

SAVED = "saver.at_end=true"
STEPS = "total_train_steps=8"
SOON = 15.0
"""Seconds from the start of a run, its deadlines included, within which it must have ended."""


def start(lab: Any, fault: str, *overrides: str) -> Any:
    """A run whose wire to the generator has ``fault``."""
    shutil.copy(Path(__file__).with_name("faulty_wire.py"), lab.folder)
    workflow = "rollout.workflow=faulty_wire:Workflow"
    return lab.train(workflow, *overrides, env={**os.environ, "OFFBEAT_WIRE": fault})


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I03")
@pytest.mark.parametrize("fault", ["repeat-answers", "repeat-requests"])
def test_what_comes_twice_counts_once_and_the_bits_are_the_same(lab: Any, fault: str) -> None:
    calm = lab.train("trial_name=calm", STEPS, SAVED)
    assert calm.end() == 0, calm.output
    run = start(lab, fault, "trial_name=twice", STEPS, SAVED)
    assert run.end() == 0, run.output
    check_equal(lab, "twice", "calm")
    check_run(lab, "twice")
    assert fates(lab, "twice") == {"trained": 16}


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
def test_answers_that_come_twice_count_once_in_an_asynchronous_run(lab: Any) -> None:
    run = start(lab, "repeat-answers", "mode=async", "total_train_steps=20")
    assert run.end() == 0, run.output
    check_run(lab)
    assert fates(lab) == {"trained": 40}


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I12")
@pytest.mark.parametrize(
    ("fault", "mode", "named"),
    [
        ("cut", "sync", "generator-0: connection lost in collect"),
        ("cut", "async", "generator-0: connection lost in collect"),
        ("swallow", "async", "generator-0: no answer to request train-"),
    ],
)
def test_a_lost_reply_ends_the_run_with_the_name_of_what_was_waited_for(
    lab: Any, fault: str, mode: str, named: str
) -> None:
    run = start(lab, fault, f"mode={mode}", STEPS, "rollout.request_timeout_seconds=3")
    run.until("the first step", lambda: lab.groups("trained"))
    assert run.end(within=SOON) == 1, run.output
    assert named in lab.summary()["error"]
    assert "Traceback" not in run.output
    check_run(lab)
    assert set(fates(lab)) == {"trained", "cancelled"}


@pytest.mark.invariant("I06")
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_generator_that_hangs_in_a_commit_is_replaced_under_the_new_weights(
    lab: Any, mode: str
) -> None:
    late = ("generator.heartbeat_seconds=1", STEPS, f"mode={mode}", SAVED)
    run = start(lab, "stop-at-commit", *late)
    run.until_file("stopped")
    assert run.end() == 0, run.output
    assert "generator-0 has not answered for 1 s" in run.output
    assert restarts(lab, "run") == 1
    check_run(lab)
    assert fates(lab) == {"trained": 16}
    if max_staleness(lab) == 0:
        calm = lab.train("trial_name=calm", STEPS, SAVED)
        assert calm.end() == 0, calm.output
        check_equal(lab, "run", "calm")
