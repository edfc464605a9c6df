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


LOST = {
    "cut": "generator-0: connection lost in collect",
    "swallow": "generator-0: no answer to collect in 3 s",
    "cut-request": "generator-0: connection lost in submit",
}
"""What is said of each call that is lost."""

PATIENCE = "rollout.request_timeout_seconds=6"


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I03")
@pytest.mark.invariant("I12")
@pytest.mark.parametrize("fault", LOST)
def test_a_lost_call_is_made_again_and_the_bits_are_the_same(lab: Any, fault: str) -> None:
    calm = lab.train("trial_name=calm", STEPS, SAVED)
    assert calm.end() == 0, calm.output
    run = start(lab, fault, "trial_name=lost", STEPS, SAVED, PATIENCE)
    assert run.end() == 0, run.output
    assert LOST[fault] in run.output
    check_equal(lab, "lost", "calm")
    check_run(lab, "lost")
    assert fates(lab, "lost") == {"trained": 16}
    said = lab.summary("lost")
    assert (said["lost_replies"], said["restarts"], said["deterministic"]) == (1, {}, True)


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
@pytest.mark.parametrize("fault", ["cut", "cut-request"])
def test_an_asynchronous_run_loses_no_group_with_a_call(lab: Any, fault: str) -> None:
    run = start(lab, fault, "mode=async", "total_train_steps=20")
    assert run.end() == 0, run.output
    check_run(lab)
    assert fates(lab) == {"trained": 40}
    assert lab.summary()["lost_replies"] == 1


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I03")
@pytest.mark.invariant("I12")
def test_a_generator_whose_replies_never_come_is_replaced(lab: Any) -> None:
    calm = lab.train("trial_name=calm", STEPS, SAVED)
    assert calm.end() == 0, calm.output
    run = start(lab, "deaf", "trial_name=deaf", STEPS, SAVED)
    assert run.end() == 0, run.output
    assert "generator-0: connection lost in collect" in run.output
    check_equal(lab, "deaf", "calm")
    assert fates(lab, "deaf") == {"trained": 16}
    said = lab.summary("deaf")
    assert (said["lost_replies"], said["restarts"]) == (0, {"generator-0": 1})


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
