"""``offbeat chaos``: it breaks a run, the run survives, and what does not hold is found."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_run, max_staleness

from offbeat.pipeline.chaos.faults import Fault
from offbeat.pipeline.chaos.judge import judge

TAMPERED = {
    "every admitted group has one fate (I02)": (
        "UPDATE groups SET fate = NULL, step = NULL, ended_at = NULL, trained_tokens = 0 "
        "WHERE group_id = 3"
    ),
    "groups and steps are numbered without a gap": "DELETE FROM groups WHERE group_id = 2",
    "every trained group was trained once, in its step": (
        "UPDATE groups SET step = 1 WHERE group_id = 3"
    ),
    "no group was trained later than max_staleness allows (I01)": (
        "UPDATE groups SET start_version = start_version + 1 WHERE group_id = 1"
    ),
}


def tamper(file: Path, change: str) -> None:
    with closing(sqlite3.connect(file)) as ledger, ledger:
        assert ledger.execute(change).rowcount == 1


@pytest.mark.slow
def test_each_claim_fails_when_the_folder_says_otherwise(lab: Any) -> None:
    run = lab.train("total_train_steps=3")
    assert run.end() == 0, run.output
    check_run(lab)
    for claim, change in TAMPERED.items():
        copy = lab.folder / "copy"
        shutil.copytree(lab.run_dir(), copy)
        tamper(copy / "run.db", change)
        failed = [
            f.claim for f in judge(copy, max_staleness=max_staleness(lab)) if f.holds is False
        ]
        assert claim in failed
        shutil.rmtree(copy)
    shutil.copy(
        lab.run_dir() / "rollouts" / "step-000001.parquet",
        lab.run_dir() / "rollouts" / "step-000004.parquet",
    )
    failed = [f.claim for f in judge(lab.run_dir(), max_staleness=0) if f.holds is False]
    assert failed == ["every trained group was trained once, in its step"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_survives_every_fault_and_all_claims_hold(lab: Any, mode: str) -> None:
    run = lab.start(
        "chaos", "config.yaml", f"mode={mode}", "trial_name=soak", "generator.replicas=2",
        "generator.heartbeat_seconds=1", "rollout.reward_timeout_seconds=0.5",
        "rollout.reward_workers=2", "rollout.max_failure_rate=0.9", "--every", "1",
        "--minutes", "0.4", "--reach", "0.01",
    )  # fmt: skip
    assert run.end(within=100) == 0, run.output
    assert "FAILS" not in run.output
    assert "\nevery claim holds\nlook at the run: offbeat show runs/e2e/soak\n" in run.output
    assert "exit code 143, as asked by SIGTERM after " in run.output
    assert re.search(r"the reward reached 0\.01 +holds", run.output)
    assert "(I01)" in run.output
    for fault in Fault:
        assert re.search(rf"^{fault} ", run.output, re.MULTILINE), f"{fault}\n{run.output}"
    assert "poison" in (lab.run_dir("soak") / "config.yaml").read_text()
    check_run(lab, "soak")


@pytest.mark.slow
def test_a_run_that_fails_under_faults_is_an_exit_code_of_one_with_its_last_words(
    lab: Any,
) -> None:
    run = lab.start(
        "chaos", "config.yaml", "trial_name=soak", "generator.max_restarts=0",
        "total_train_steps=1000000", "--faults", "kill-generator", "--every", "0.1",
        "--reach", "1.1",
    )  # fmt: skip
    assert run.end() == 1, run.output
    assert re.search(r"the reward reached 1\.1 +FAILS", run.output)
    assert "FAILS" in run.output
    assert re.search(r"generator-0 \(pid \d+\) was killed by SIGKILL", run.output)
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_ctrl_c_ends_the_run_under_faults_as_well(lab: Any) -> None:
    run = lab.start("chaos", "config.yaml", "trial_name=soak", "total_train_steps=1000000")
    run.until("the first step", lambda: lab.groups("trained", "soak"))
    run.interrupt()
    assert run.end(within=20) == 130, run.output
    assert lab.summary("soak")["status"] == "interrupted"


def test_a_fault_that_does_not_exist_is_named_with_those_that_do(lab: Any) -> None:
    run = lab.start("chaos", "config.yaml", "--faults", "kill-generator,sabotage")
    assert run.end() == 2, run.output
    assert "'sabotage' is no fault" in run.output
    assert not (lab.folder / "runs").exists()
