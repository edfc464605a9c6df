"""A whole run that TensorBoard and an offline wandb record."""

from __future__ import annotations

from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

VALIDATION = "valid_dataset={path: 'task:rows', args: {name: valid, n: 2}}"


def test_trackers_record_training_evaluation_and_the_end_of_a_run(lab: Any) -> None:
    run = lab.train(
        VALIDATION,
        "stats_logger.tensorboard.enabled=true",
        "stats_logger.wandb.mode=offline",
        "stats_logger.wandb.project=numbers",
    )
    assert run.end() == 0, run.output
    metrics = lab.metrics()
    events = EventAccumulator(str(lab.run_dir() / "tensorboard")).Reload()
    for name in ("reward/mean", "eval/reward_mean", "train/update_seconds"):
        found = {s.step: s.value for s in events.Scalars(name)}
        assert found.keys() == {m["step"] for m in metrics if name in m}
    assert "_hparams_/session_end_info" in events.Tags()["tensors"]
    (record,) = lab.run_dir().glob("wandb/offline-run-*/run-*.wandb")
    for text in (b"numbers", b"eval/reward_mean", b"max_staleness", b"completed"):
        assert text in record.read_bytes()


@pytest.mark.slow
def test_a_tracker_that_cannot_start_is_reported_once_and_training_goes_on(lab: Any) -> None:
    run = lab.train("stats_logger.tensorboard.path=config.yaml")
    assert run.end() == 0, run.output
    assert lab.summary()["status"] == "completed"
    assert run.output.count("tracker tensorboard: ") == 1
    assert "training goes on" in run.output


def test_a_misspelled_mode_is_refused_before_anything_starts(lab: Any) -> None:
    run = lab.train("stats_logger.wandb.mode=ofline")
    assert run.end() == 2
    assert "did you mean 'offline'?" in run.output
    assert not lab.run_dir().exists()
