"""Runs that are killed and resumed: as if nothing had happened, or with every group accounted for.

``OFFBEAT_KILL_POINTS`` sets how many random kill points the slow tests try (5 of each kind unless
it is set), ``OFFBEAT_KILL_SEED`` the first seed.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

SAVED = ("saver.at_end=true", "saver.freq_steps=3")
EVALUATED = (
    "valid_dataset={path: 'task:rows', args: {name: valid, n: 2}}",
    "evaluator.freq_steps=2",
)
OFTEN = "recover.freq_steps=1"
STEPS = 6
LONG = 20
SLOW = "rollout.reward_fn=task:slow"
"""Long enough steps for a fault to fall into one."""

POINTS = int(os.environ.get("OFFBEAT_KILL_POINTS", "5"))
SEED = int(os.environ.get("OFFBEAT_KILL_SEED", "0"))

TIMES = ("throughput/", "wait/", "train/", "weights/", "generate/pause", "generate/restarts")
"""What may differ between two runs that are otherwise equal."""


def weights(lab: Any, trial: str) -> bytes:
    return bytes((lab.run_dir(trial) / "checkpoints/latest/model.safetensors").read_bytes())


def without_times(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            k: v
            for k, v in step.items()
            if k not in ("seconds", "eval/seconds") and not k.startswith(TIMES)
        }
        for step in steps
    ]


def trained(lab: Any, trial: str) -> int:
    return int(lab.groups("trained", trial))


def kill(run: Any, worker: str | None = None) -> None:
    """SIGKILL a worker, or the controller; returns when the run has ended."""
    pid = run.pid if worker is None else run.worker(worker)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    run.end()


def resume(lab: Any, *overrides: str) -> Any:
    run = lab.train(*overrides, "--resume")
    assert run.end() == 0, run.output
    return run


def snapshots(lab: Any, trial: str) -> list[Path]:
    return sorted((lab.run_dir(trial) / "snapshots").glob("step-??????"))


def until_step(lab: Any, run: Any, trial: str, step: int) -> None:
    run.until(f"step {step}", lambda: trained(lab, trial) >= 2 * step)


def until_snapshot(lab: Any, run: Any, trial: str, step: int) -> None:
    place = lab.run_dir(trial) / "snapshots" / f"step-{step:06d}"
    run.until(f"snapshot {step}", place.exists)


def check_equal(lab: Any, trial: str, calm: str) -> None:
    assert without_times(lab.metrics(trial)) == without_times(lab.metrics(calm))
    assert weights(lab, trial) == weights(lab, calm)


def check_ledger(lab: Any, trial: str, steps: int) -> None:
    """Over the surviving line every group has one fate, the records count the same, and each step
    has trained the groups of its rollout file.
    """
    with closing(sqlite3.connect(lab.run_dir(trial) / "run.db")) as ledger:
        rows = ledger.execute(
            "SELECT group_id, fate, step, start_version - admission_version FROM groups "
            "WHERE superseded_by IS NULL ORDER BY group_id"
        ).fetchall()
    groups = [row[0] for row in rows]
    assert groups == list(range(len(groups))), "a group is missing, or there twice"
    assert [row for row in rows if row[1] is None] == []
    assert sorted(row[2] for row in rows if row[1] == "trained") == sorted(
        step for step in range(1, steps + 1) for _ in range(2)
    )
    metrics = [m for m in lab.metrics(trial) if m["step"] > 0]
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert sum(m["groups/admitted_count"] for m in metrics) == len(rows)
    assert max(m["lag/group_max"] for m in metrics) <= 4
    assert all(0 <= lag <= 4 for _, fate, _, lag in rows if fate == "trained")
    files = sorted(p.name for p in (lab.run_dir(trial) / "rollouts").glob("step-??????.parquet"))
    assert files == [f"step-{step:06d}.parquet" for step in range(1, steps + 1)]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.invariant("I04")
def test_a_synchronous_run_that_was_killed_ends_with_the_bits_of_an_uninterrupted_one(
    lab: Any,
) -> None:
    steps = f"total_train_steps={STEPS}"
    calm = lab.train("trial_name=calm", steps, *SAVED, *EVALUATED)
    assert calm.end() == 0, calm.output
    told = ("trial_name=killed", steps, OFTEN, *SAVED, *EVALUATED)
    run = lab.train(*told)
    until_snapshot(lab, run, "killed", 3)
    kill(run)
    resumed = resume(lab, *told)
    assert "resuming from" in resumed.output
    check_equal(lab, "killed", "calm")
    check_ledger(lab, "killed", STEPS)
    assert [p.name for p in snapshots(lab, "killed")] == ["step-000005", "step-000006"]


@pytest.mark.slow
def test_an_unfinished_run_names_the_way_to_continue_it_and_a_complete_one_cannot(lab: Any) -> None:
    told = (OFTEN, SLOW, f"total_train_steps={STEPS}")
    run = lab.train(*told)
    until_step(lab, run, "run", 1)
    kill(run)
    refused = lab.train(*told)
    assert refused.end() == 2
    assert "holds a run already" in refused.output
    assert "--resume continues it" in refused.output
    resume(lab, *told)
    again = lab.train(*told, "--resume")
    assert again.end() == 2
    assert "is complete" in again.output


@pytest.mark.slow
@pytest.mark.invariant("I02")
@pytest.mark.invariant("I04")
def test_an_asynchronous_run_that_was_killed_loses_no_group_and_trains_none_twice(lab: Any) -> None:
    told = ("trial_name=killed", "mode=async", "total_train_steps=12", SLOW)
    run = lab.train(*told, "recover.freq_steps=2")
    until_snapshot(lab, run, "killed", 4)
    kill(run)
    resume(lab, *told, "recover.freq_steps=2")
    check_ledger(lab, "killed", 12)
    assert list(lab.run_dir("killed").glob("spans.attempt-1.jsonl"))


@pytest.mark.slow
@pytest.mark.invariant("I04")
def test_a_run_that_ended_with_its_trainer_is_resumed_to_the_same_bits(lab: Any) -> None:
    steps = f"total_train_steps={STEPS}"
    calm = lab.train("trial_name=calm", steps, "saver.at_end=true")
    assert calm.end() == 0, calm.output
    run = lab.train("trial_name=killed", steps, OFTEN, SLOW, "saver.at_end=true")
    until_snapshot(lab, run, "killed", 2)
    kill(run, "trainer")
    resume(lab, "trial_name=killed", steps, OFTEN, "saver.at_end=true")
    check_equal(lab, "killed", "calm")


@pytest.mark.slow
@pytest.mark.invariant("I04")
def test_a_kill_while_a_snapshot_is_written_costs_only_that_snapshot(lab: Any) -> None:
    steps = f"total_train_steps={STEPS}"
    calm = lab.train("trial_name=calm", steps, "saver.at_end=true")
    assert calm.end() == 0, calm.output
    # Without a saver the only writer is the one of the snapshots.
    run = lab.train("trial_name=killed", steps, OFTEN, SLOW, "saver.at_end=false")
    until_snapshot(lab, run, "killed", 2)
    run.stop("writer")
    until_step(lab, run, "killed", 4)
    newest = snapshots(lab, "killed")[-1]
    kill(run)
    torn = newest.with_name(".step-000004.tmp-1")
    torn.mkdir()
    (torn / "trainer.safetensors").write_bytes(b"half")
    resumed = resume(lab, "trial_name=killed", steps, OFTEN, "saver.at_end=true")
    assert f"snapshots/{newest.name} as attempt 2" in resumed.output
    assert not torn.exists()
    check_equal(lab, "killed", "calm")


@pytest.mark.slow
@pytest.mark.invariant("I04")
@pytest.mark.invariant("I11")
def test_a_damaged_snapshot_is_refused_by_name_and_the_one_before_it_used(lab: Any) -> None:
    steps = f"total_train_steps={STEPS}"
    calm = lab.train("trial_name=calm", steps, "saver.at_end=true")
    assert calm.end() == 0, calm.output
    run = lab.train("trial_name=killed", steps, OFTEN, SLOW, "saver.at_end=true")
    until_snapshot(lab, run, "killed", 3)
    kill(run)
    good, damaged = snapshots(lab, "killed")[-2:]
    content = bytearray((damaged / "trainer.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "trainer.safetensors").write_bytes(content)
    resumed = resume(lab, "trial_name=killed", steps, OFTEN, "saver.at_end=true")
    assert f"snapshots/{damaged.name} is damaged and not used" in resumed.output
    assert f"snapshots/{good.name} as attempt 2" in resumed.output
    check_equal(lab, "killed", "calm")


@pytest.mark.slow
@pytest.mark.invariant("I04")
def test_a_run_without_a_snapshot_starts_over_and_says_so(lab: Any) -> None:
    steps = f"total_train_steps={STEPS}"
    calm = lab.train("trial_name=calm", steps, "saver.at_end=true")
    assert calm.end() == 0, calm.output
    run = lab.train("trial_name=killed", steps, SLOW, "saver.at_end=true")
    until_step(lab, run, "killed", 2)
    kill(run)
    resumed = resume(lab, "trial_name=killed", steps, "saver.at_end=true")
    assert "has no snapshot: the run starts over, as attempt 2" in resumed.output
    check_equal(lab, "killed", "calm")
    check_ledger(lab, "killed", STEPS)


@pytest.mark.slow
@pytest.mark.invariant("I04")
def test_a_complete_run_that_goes_back_to_a_snapshot_ends_with_the_same_bits_again(
    lab: Any,
) -> None:
    told = ("trial_name=back", f"total_train_steps={STEPS}", "recover.freq_steps=2", *SAVED)
    run = lab.train(*told)
    assert run.end() == 0, run.output
    ended, steps = weights(lab, "back"), without_times(lab.metrics("back"))
    older = snapshots(lab, "back")[-2]
    again = lab.train(*told, "--resume-from", str(older.relative_to(lab.folder)))
    assert again.end() == 0, again.output
    assert f"snapshots/{older.name} as attempt 2" in again.output
    assert (weights(lab, "back"), without_times(lab.metrics("back"))) == (ended, steps)
    check_ledger(lab, "back", STEPS)


@pytest.mark.slow
def test_recover_auto_starts_a_run_and_continues_it_with_the_same_command(lab: Any) -> None:
    told = ("recover.mode=auto", OFTEN, SLOW, f"total_train_steps={STEPS}")
    run = lab.train(*told)
    until_snapshot(lab, run, "run", 2)
    kill(run)
    again = lab.train(*told)
    assert again.end() == 0, again.output
    assert "resuming from" in again.output
    check_ledger(lab, "run", STEPS)


@pytest.mark.slow
def test_other_prompts_are_refused_and_other_changes_are_said(lab: Any) -> None:
    run = lab.train(OFTEN, SLOW, f"total_train_steps={STEPS}")
    until_snapshot(lab, run, "run", 2)
    kill(run)
    refused = lab.train("seed=7", OFTEN, f"total_train_steps={STEPS}", "--resume")
    assert refused.end() == 2
    assert "seed: 1 became 7" in refused.output
    longer = resume(lab, OFTEN, SLOW, "total_train_steps=8")
    assert "total_train_steps: 6 became 8" in longer.output
    check_ledger(lab, "run", 8)


def test_resume_without_a_run_says_what_it_looked_for(lab: Any) -> None:
    run = lab.train("trial_name=nothing", "--resume")
    assert run.end() == 2
    assert "there is no unfinished run in runs/e2e/nothing to resume" in run.output
    run = lab.train("--dry-run", "--resume")
    assert run.end() == 2
    assert "leave --resume out" in run.output


# --- random kill points


def killed_at_random(lab: Any, run: Any, trial: str, dice: random.Random) -> str:
    """Kill one process at some point of the run; what was killed and when."""
    step, delay = dice.randrange(LONG), dice.random() * 0.3
    with suppress(AssertionError):  # it may have ended before
        until_step(lab, run, trial, step)
    time.sleep(delay)
    workers = run.workers()
    name = dice.choice(["controller", *sorted(workers)])
    with suppress(ProcessLookupError):
        os.kill(workers.get(name, run.pid), signal.SIGKILL)
    run.end()
    return f"{name} {delay:.3f} s after step {step}"


def survive(lab: Any, trial: str, told: tuple[str, ...], seed: int, capsys: Any) -> None:
    """Start a run, kill it once or twice, and let it come to its end."""
    dice = random.Random(seed)
    told = (*told, "recover.mode=auto")  # which starts it as well when it never came to begin
    points = [killed_at_random(lab, lab.train(*told), trial, dice)]
    if dice.random() < 0.5:
        points.append(killed_at_random(lab, lab.train(*told), trial, dice))
    with capsys.disabled():
        sys.stdout.write(f"\nseed {seed}: killed {'; '.join(points)}")
    summary = lab.run_dir(trial) / "summary.json"
    if not summary.exists() or lab.summary(trial)["status"] != "completed":
        run = lab.train(*told)
        assert run.end() == 0, run.output


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * POINTS)
@pytest.mark.invariant("I04")
def test_synchronous_runs_killed_anywhere_end_with_the_same_bits(lab: Any, capsys: Any) -> None:
    told = (
        f"total_train_steps={LONG}",
        OFTEN,
        *EVALUATED,
        "saver.at_end=true",
        "saver.freq_steps=4",
        "saver.mode=async",
    )
    calm = lab.train("trial_name=calm", *told)
    assert calm.end() == 0, calm.output
    for seed in range(SEED, SEED + POINTS):
        survive(lab, f"s{seed}", (f"trial_name=s{seed}", *told), seed, capsys)
        check_equal(lab, f"s{seed}", "calm")
        check_ledger(lab, f"s{seed}", LONG)


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * POINTS)
@pytest.mark.invariant("I02")
@pytest.mark.invariant("I04")
def test_asynchronous_runs_killed_anywhere_keep_their_ledger_exact(lab: Any, capsys: Any) -> None:
    told = (f"total_train_steps={LONG}", "mode=async", "recover.freq_steps=2", "saver.freq_steps=3")
    for seed in range(SEED, SEED + POINTS):
        survive(lab, f"a{seed}", (f"trial_name=a{seed}", *told), seed, capsys)
        check_ledger(lab, f"a{seed}", LONG)
