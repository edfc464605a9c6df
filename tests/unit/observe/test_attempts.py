"""Claims about what a resumed run sets aside."""

import os
from pathlib import Path

import pytest

from offbeat.observe.attempts import reopen, supersede
from offbeat.observe.find import find_run
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import RolloutLog, recorded_steps
from offbeat.observe.show import load_run
from offbeat.observe.sinks import JsonlSink, read_metrics


def run_of(path: Path, steps: int) -> Path:
    sink, log = JsonlSink(path / "metrics.jsonl"), RolloutLog(path)
    for i in range(1, steps + 1):
        metrics = {"reward/mean": float("nan") if i == 1 else i / 10}
        sink.write(i, StepRecord(step=i, version=i, seconds=1.0, metrics=metrics).flat())
        log.write(i, [])
    (path / "spans.jsonl").write_text("")
    (path / "summary.json").write_text("{}")
    return path


@pytest.mark.invariant("I04")
def test_steps_after_the_snapshot_are_kept_under_the_ended_attempts_name(tmp_path: Path) -> None:
    run_of(tmp_path, 4)
    reopen(tmp_path, 1)
    survivors = supersede(tmp_path, after_step=2, attempt=1)
    assert [r.step for r in survivors] == [1, 2]
    assert [r.step for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [r.step for r in read_metrics(tmp_path / "metrics.attempt-1.jsonl")] == [3, 4]
    assert recorded_steps(tmp_path) == (1, 2)
    assert sorted(os.listdir(tmp_path / "rollouts"))[2:] == [
        "step-000003.attempt-1.parquet",
        "step-000004.attempt-1.parquet",
    ]
    assert not (tmp_path / "summary.json").exists()
    assert (tmp_path / "summary.attempt-1.json").exists()
    assert (tmp_path / "spans.attempt-1.jsonl").exists()
    assert load_run(find_run(str(tmp_path))).summary.steps == 2


def test_second_call_changes_nothing(tmp_path: Path) -> None:
    run_of(tmp_path, 4)
    supersede(tmp_path, after_step=2, attempt=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    supersede(tmp_path, after_step=2, attempt=1)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_snapshot_of_step_zero_and_an_empty_folder_are_fine(tmp_path: Path) -> None:
    assert supersede(tmp_path, after_step=0, attempt=1) == ()
    run_of(tmp_path, 2)
    assert supersede(tmp_path, after_step=0, attempt=1) == ()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
