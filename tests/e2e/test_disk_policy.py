"""A disk that is full or read-only under what is saved: the run goes on or ends, as it was told."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_checks import check_run

from offbeat.checkpoint.folders import latest, step_folders
from offbeat.checkpoint.manifest import verify

pytestmark = pytest.mark.slow

STEPS = 9
"""Odd, so that no folder of every second step is the last one."""

FIRST_MODEL = "checkpoints/latest"
FIRST_SNAPSHOT = "snapshots/step-000002"
SAVES = ("saver.freq_steps=2", "recover.freq_secs=0")
SNAPSHOTS = ("recover.freq_steps=2", "recover.freq_secs=0")
SLOW = ("rollout.reward_fn=task:slow", f"total_train_steps={STEPS}")
BYTES = 1000
"""Of a file, before the disk is full."""

_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE = 1

Break = Callable[[Any, Path], None]


def without_privileges() -> None:
    """In the child: a folder's permissions hold for root as for anybody else."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE)


def fill(run: Any, folder: Path) -> None:
    resource.prlimit(run.worker("writer"), resource.RLIMIT_FSIZE, (BYTES, BYTES))


def lock(run: Any, folder: Path) -> None:
    folder.chmod(0o555)


def broken_run(lab: Any, break_it: Break, saved: str, *overrides: str) -> Any:
    """A run whose disk breaks once ``saved`` is there, which comes last in a save."""
    run = lab.train(*SLOW, *overrides, preexec_fn=without_privileges)
    path = lab.run_dir() / saved
    run.until(saved, path.exists)
    break_it(run, path.parent)
    return run


def check_whole(folder: Path) -> None:
    """What can be seen is complete, and nothing else is left."""
    for path in step_folders(folder):
        verify(path)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert hidden == []


@pytest.mark.invariant("I11")
@pytest.mark.parametrize(
    ("mode", "break_it"),
    [
        pytest.param("sync", fill, id="sync-full"),
        pytest.param("async", fill, id="async-full"),
        pytest.param("async", lock, id="async-read-only"),
    ],
)
def test_training_goes_on_where_model_folders_cannot_be_saved(
    lab: Any, break_it: Break, mode: str
) -> None:
    overrides = (f"mode={mode}", *SAVES, "saver.on_error=continue")
    run = broken_run(lab, break_it, FIRST_MODEL, *overrides)
    assert run.end() == 0, run.output
    folder = lab.run_dir() / "checkpoints"
    whole = latest(folder)
    assert whole == folder / (folder / "latest").readlink()
    check_whole(folder)
    summary = lab.summary()
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    saved = len(step_folders(folder))
    assert summary["failed_saves"]["models"] == STEPS // 2 - saved > 0
    assert "checkpoints/step-" in summary["failed_saves"]["last"]
    assert "training goes on without it, as saver.on_error says" in run.output
    counted = sum(step["save/failed_count"] for step in lab.metrics())
    assert counted in (summary["failed_saves"]["models"], summary["failed_saves"]["models"] - 1)
    check_run(lab)
    shown = lab.start("show", "run")
    assert shown.end() == 0
    assert "could not be saved; the last: step " in shown.output


@pytest.mark.invariant("I11")
def test_the_first_model_folder_that_cannot_be_saved_ends_the_run_by_default(lab: Any) -> None:
    run = broken_run(lab, lock, FIRST_MODEL, "mode=async", *SAVES)
    assert run.end() == 1, run.output
    assert "checkpoints/step-" in lab.summary()["error"]
    assert "saver.on_error=continue trains on without a save that fails" in run.output
    assert "Traceback" not in run.output
    folder = lab.run_dir() / "checkpoints"
    verify((folder / "latest").resolve())
    check_whole(folder)
    check_run(lab)


@pytest.mark.invariant("I11")
def test_the_save_of_the_last_step_ends_the_run_whatever_the_policy(lab: Any) -> None:
    overrides = ("mode=async", *SAVES, "saver.at_end=true", "saver.on_error=continue")
    run = broken_run(lab, fill, FIRST_MODEL, *overrides)
    assert run.end() == 1, run.output
    assert f"step {STEPS}: saving" in lab.summary()["error"]
    assert lab.summary()["steps"] == STEPS
    assert "without which the training is lost" in run.output
    check_whole(lab.run_dir() / "checkpoints")


@pytest.mark.invariant("I11")
def test_training_goes_on_where_snapshots_cannot_be_written_and_resumes_from_the_last_one(
    lab: Any,
) -> None:
    run = broken_run(lab, fill, FIRST_SNAPSHOT, *SNAPSHOTS, "recover.on_error=continue")
    assert run.end() == 0, run.output
    summary = lab.summary()
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["failed_saves"]["snapshots"] > 0
    assert "snapshots/step-" in summary["failed_saves"]["last"]
    assert "as recover.on_error says" in run.output
    folder = lab.run_dir() / "snapshots"
    check_whole(folder)
    check_run(lab)
    newest = step_folders(folder)[0]
    further = lab.train(f"total_train_steps={STEPS + 1}", "--resume")
    assert further.end() == 0, further.output
    assert f"snapshots/{newest.name} as attempt 2" in further.output


@pytest.mark.invariant("I11")
def test_the_first_snapshot_that_cannot_be_written_ends_the_run_by_default(lab: Any) -> None:
    run = broken_run(lab, lock, FIRST_SNAPSHOT, *SNAPSHOTS)
    assert run.end() == 1, run.output
    assert "snapshots/step-" in lab.summary()["error"]
    assert "recover.on_error=continue trains on" in run.output
    assert "Traceback" not in run.output
    check_whole(lab.run_dir() / "snapshots")
