"""Ctrl-C and SIGTERM, at any moment: out within seconds, a summary that says so, nothing left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SOON = 10.0
"""Seconds within which an interrupted run must have ended."""

AT_ONCE = 5.0
"""The same where somebody asked twice, less than the patience with a worker that hangs."""

STAGES = [
    "generation",
    *(
        pytest.param(stage, marks=pytest.mark.slow)
        for stage in ("start", "evaluation", "reward", "update", "save")
    ),
]


def check_interrupted(lab: Any, run: Any, code: int, expected: int = 130) -> None:
    assert code == expected, run.output
    assert "interrupted" in run.output
    assert "Traceback" not in run.output
    for ugly in ("never retrieved", "was destroyed", "Unclosed", "ignored", "survives"):
        assert ugly not in run.output
    assert lab.summary()["status"] == "interrupted"
    groups = lab.summary()["groups"]
    assert groups["open"] == 0
    assert groups["admitted"] == groups["trained"] + sum(groups["dropped"].values())


def ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_the_run_within_seconds_and_leaves_nothing(lab: Any, stage: str) -> None:
    run = lab.at(stage)
    run.interrupt()
    run.proceed()
    check_interrupted(lab, run, run.end(within=SOON))


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_ends_the_run_as_ctrl_c_does_with_a_code_of_its_own(lab: Any, stage: str) -> None:
    run = lab.at(stage)
    os.kill(run.pid, signal.SIGTERM)
    run.proceed()
    check_interrupted(lab, run, run.end(within=SOON), 143)
    assert "interrupted by SIGTERM" in run.output


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_sigterm_ends_a_run_that_a_shell_script_started_in_the_background(lab: Any) -> None:
    # Such a shell lets its background jobs ignore Ctrl-C, and ``kill`` must work all the same.
    run = lab.train("rollout.reward_fn=task:hanging", preexec_fn=ignore_ctrl_c)
    run.until_file("hanging")
    run.interrupt()
    os.kill(run.pid, signal.SIGTERM)
    check_interrupted(lab, run, run.end(within=SOON), 143)


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize(("stage", "hung"), [("update", "trainer"), ("save", "writer")])
def test_ctrl_c_does_not_wait_for_a_worker_that_hangs(lab: Any, stage: str, hung: str) -> None:
    run = lab.at(stage)
    run.interrupt()
    check_interrupted(lab, run, run.end(within=SOON))
    assert hung in run.output  # a worker that had to be killed is named


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("stage", ["start", "generation", "update", "save"])
def test_a_second_ctrl_c_during_the_clean_up_makes_it_quicker_and_no_uglier(
    lab: Any, stage: str
) -> None:
    run = lab.at(stage)
    before = set(run.workers())
    run.interrupt()
    # The first worker to go shows that the clean-up goes on; in update and save one of them hangs.
    run.until("the clean-up", lambda: set(run.workers()) < before)
    run.interrupt()
    check_interrupted(lab, run, run.end(within=AT_ONCE))


@pytest.mark.invariant("I13")
@pytest.mark.parametrize(
    ("stage", "pauses"),
    [
        ("generation", (0.01,)),
        *(
            pytest.param(stage, pauses, marks=pytest.mark.slow)
            for stage in ("start", "reward", "update", "save")
            for pauses in ((0.01,), (0.5,), (0.1, 0.1, 0.1))
        ),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signals_that_come_again_and_again_interrupt_a_run_once(
    lab: Any, stage: str, pauses: tuple[float, ...], number: signal.Signals
) -> None:
    run = lab.at(stage)
    os.kill(run.pid, number)
    for pause in pauses:
        time.sleep(pause)
        with suppress(ProcessLookupError):
            os.kill(run.pid, number)
    code = 130 if number is signal.SIGINT else 143
    check_interrupted(lab, run, run.end(within=AT_ONCE), code)


@pytest.mark.slow
def test_signals_before_the_run_has_begun_leave_one_that_can_be_shown(lab: Any) -> None:
    run = lab.train()
    run.until_text("run folder")
    for _ in range(2):
        os.kill(run.pid, signal.SIGTERM)
    assert run.end(within=SOON) == 143, run.output
    assert "Traceback" not in run.output
    if not (lab.run_dir() / "config.yaml").exists():
        return  # stopped before anything was written
    shown = lab.start("show", str(lab.run_dir()))
    assert shown.end() == 0, shown.output
    assert "interrupted after 0 steps" in shown.output


@pytest.mark.slow
def test_ctrl_c_while_the_configuration_is_read_writes_nothing(lab: Any) -> None:
    (lab.folder / "slow_rows.py").write_text(
        "import time\nfrom pathlib import Path\n\n"
        "def rows():\n    (Path(__file__).parent / 'reading').touch()\n    time.sleep(600)\n"
    )
    run = lab.train("train_dataset.path=slow_rows:rows")
    run.until_file("reading")
    run.interrupt()
    assert run.end(within=SOON) == 130, run.output
    assert "interrupted" in run.output
    assert "Traceback" not in run.output
    assert not (lab.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.invariant("I11")
def test_a_save_that_goes_on_when_the_run_is_interrupted_is_finished(lab: Any) -> None:
    run = lab.at("save")
    run.interrupt()
    run.proceed()
    check_interrupted(lab, run, run.end(within=SOON))
    newest: Path = lab.run_dir() / "checkpoints" / "latest"
    assert newest.resolve().name == "step-000004"


@pytest.mark.slow
def test_ctrl_c_during_an_evaluation_of_its_own_leaves_nothing(lab: Any) -> None:
    run = lab.start(
        "eval",
        "config.yaml",
        "valid_dataset={path: 'task:rows', args: {name: valid, n: 2}}",
        "rollout.reward_fn=task:hanging",
    )
    run.until_file("hanging")
    run.interrupt()
    assert run.end(within=SOON) == 130, run.output
    assert "Traceback" not in run.output
    assert not (lab.folder / "runs").exists()
