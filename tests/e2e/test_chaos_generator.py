"""Generators that die or hang in the middle of a run: it goes on, and the result is the same."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_equal, restarts

import offbeat
from offbeat import PPOTrainer
from offbeat.pipeline.update_record import UpdateRecorder
from offbeat.train.client import RemoteTrainer, TrainerSpec

SAVED = "saver.at_end=true"
STEPS = "total_train_steps=6"
SLOW = "rollout.reward_fn=task:slow"
"""Long enough steps for a fault to fall into one."""


def check_ledger(lab: Any, trial: str, trained: int) -> None:
    """Every admitted group has one fate, and none is open."""
    with closing(sqlite3.connect(lab.run_dir(trial) / "run.db")) as ledger:
        fates = dict(ledger.execute("SELECT fate, count(*) FROM groups GROUP BY fate"))
    assert fates == {"trained": trained}


@pytest.mark.slow
@pytest.mark.invariant("I03")
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_synchronous_run_ends_with_the_same_bits_after_its_generator_was_killed(
    lab: Any, replicas: int
) -> None:
    calm = lab.train("trial_name=calm", STEPS, SAVED)
    assert calm.end() == 0, calm.output
    run = lab.train("trial_name=killed", STEPS, SAVED, SLOW, f"generator.replicas={replicas}")
    run.until_text("2/6")
    pid = run.worker("generator-0")
    os.kill(pid, signal.SIGKILL)
    assert run.end() == 0, run.output
    assert restarts(lab, "killed") == 1
    said = lab.summary("killed")
    assert (said["restarts"], said["deterministic"]) == ({"generator-0": 1}, True)
    assert "mended    restarted: generator-0 once" in run.output
    assert (
        f"generator-0 (pid {pid}) was killed by SIGKILL (out of memory?); restarting it (1 of 3); "
        "end of " in run.output
    )
    check_equal(lab, "killed", "calm")
    check_ledger(lab, "killed", trained=12)


@pytest.mark.slow
@pytest.mark.invariant("I03")
@pytest.mark.invariant("I13")
def test_a_generator_that_hangs_is_replaced_and_the_bits_are_the_same(lab: Any) -> None:
    calm = lab.train("trial_name=calm", STEPS, SAVED)
    assert calm.end() == 0, calm.output
    run = lab.train("trial_name=hung", STEPS, SAVED, SLOW, "generator.heartbeat_seconds=1")
    run.until_text("2/6")
    run.stop("generator-0")
    assert run.end() == 0, run.output
    assert restarts(lab, "hung") == 1
    assert "generator-0 has not answered for 1 s" in run.output
    check_equal(lab, "hung", "calm")


@pytest.mark.slow
@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
@pytest.mark.invariant("I06")
def test_an_asynchronous_run_loses_no_group_with_its_generator(lab: Any) -> None:
    run = lab.train("mode=async", SLOW, "total_train_steps=12")
    for step in (2, 5):
        run.until_text(f"{step}/12")
        os.kill(run.worker("generator-0"), signal.SIGKILL)
    assert run.end() == 0, run.output
    assert restarts(lab, "run") == 2
    assert max(step["lag/group_max"] for step in lab.metrics()) <= 4
    check_ledger(lab, "run", trained=24)


@pytest.mark.slow
@pytest.mark.invariant("I12")
def test_a_run_that_is_asked_says_what_it_waits_for_and_goes_on(lab: Any) -> None:
    run = lab.train(STEPS, SLOW, "rollout.reward_workers=1")
    run.until_text("2/6")
    os.kill(run.pid, signal.SIGUSR1)
    run.until_text("SIGUSR1 asks what this run does: version ")
    run.until_text("admission: Loop._admit")
    run.until_text("it waits for\n  ")
    assert run.output.index("admission: ") < run.output.index("it waits for\n")
    assert run.end() == 0, run.output


@pytest.mark.slow
@pytest.mark.invariant("I12")
def test_a_generator_that_dies_before_it_is_asked_anything_is_replaced(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = UpdateRecorder.begin

    async def begin_and_kill(trainer: TrainerSpec, remote: RemoteTrainer) -> UpdateRecorder:
        begun = await begin(trainer, remote)
        os.kill(child("generator-0"), signal.SIGKILL)
        return begun

    monkeypatch.setattr(UpdateRecorder, "begin", staticmethod(begin_and_kill))
    monkeypatch.chdir(lab.folder)
    summary = PPOTrainer.from_config(offbeat.load("config.yaml")).run()
    assert (summary.status, summary.steps) == ("completed", 2)
    assert summary.restarts == {"generator-0": 1}


def child(name: str) -> int:
    """The worker of this process that has ``name``."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (entry / "cmdline").read_bytes().decode().split("\0")
            if argv[-3:-1] == [str(os.getpid()), name]:
                return int(entry.name)
    raise AssertionError(f"no {name}")
