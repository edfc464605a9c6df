"""What each tracker records, with the real packages and without a network."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from offbeat.config import RunConfig, from_mapping, to_yaml
from offbeat.config.stats_logger import StatsLoggerConfig
from offbeat.errors import ConfigError, WorkerError
from offbeat.observe.sinks import JsonlSink, SinkSet, read_metrics
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.kinds import TRACKERS, check_installed
from offbeat.observe.trackers.process import TrackerProcess
from offbeat.observe.trackers.tensorboard import TensorBoardTracker

SCRIPT = """
import json, math, sys
from pathlib import Path
from offbeat.config import load
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.process import open_trackers

run_dir = Path(sys.argv[1])
trackers = open_trackers(load(run_dir / "config.yaml").stats_logger, run_dir)
for step, loss in enumerate((math.nan, math.inf, -1.0), 1):
    for tracker in trackers:
        tracker.write(step, {"reward/mean": step / 4, "actor/loss": loss, "reward_part/a%": 1})
with_torch = [str(t) for t in trackers if "libtorch" in Path(f"/proc/{t.pid}/maps").read_text()]
for tracker in trackers:
    tracker.conclude(RunStatus(sys.argv[2]), sys.argv[3] or None)
    tracker.close()
print(json.dumps({"with_torch": with_torch, "modules": sorted(sys.modules)}))
"""


def configured(run_dir: Path, **trackers: dict[str, object]) -> RunConfig:
    """A run's folder as it is when its trackers start."""
    cfg = from_mapping(
        {
            "experiment_name": "sums",
            "model": {"path": "models/none"},
            "train_dataset": {"path": "task:rows"},
            "rollout": {"reward_fn": "task:reward"},
            "actor": {"optimizer": {"lr": 0.25}},
            "stats_logger": {"console": False, **trackers},
        },
        "the test",
    )
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    return cfg


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run that every tracker recorded."""

    run_dir: Path
    home: Path
    said: dict[str, Any]


def record(folder: Path, status: str, error: str) -> Recorded:
    run_dir, home = folder / "run", folder / "home"
    home.mkdir()
    configured(run_dir, tensorboard={}, wandb={"tags": ["one"]}, mlflow={}, trackio={})
    own = ("WANDB_", "MLFLOW_", "TRACKIO_", "XDG_", "HF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), status, error],
        env={**environment, "HOME": str(home)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Recorded(run_dir=run_dir, home=home, said=json.loads(done.stdout))


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("completed"), "completed", "")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("failed"), "failed", "NonFiniteLoss: step 3")


# What is in the records


def events(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard")).Reload()


def hyperparameters(events: EventAccumulator, tag: str) -> bytes:
    return events.SummaryMetadata(tag).plugin_data.content


def test_tensorboard_has_every_step_the_configuration_and_the_end(completed: Recorded) -> None:
    found = events(completed.run_dir)
    assert [(s.step, s.value) for s in found.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert math.isnan(found.Scalars("actor/loss")[0].value)
    start = metadata.parse_session_start_info_plugin_data(
        hyperparameters(found, metadata.SESSION_START_INFO_TAG)
    )
    assert start.hparams["actor.optimizer.lr"].number_value == 0.25
    assert start.hparams["experiment_name"].string_value == "sums"
    end = metadata.parse_session_end_info_plugin_data(
        hyperparameters(found, metadata.SESSION_END_INFO_TAG)
    )
    assert end.status == api_pb2.STATUS_SUCCESS


def test_tensorboard_shows_of_a_resumed_run_the_steps_that_hold(tmp_path: Path) -> None:
    cfg = configured(tmp_path / "run", tensorboard={})
    for attempt, steps in enumerate((range(1, 6), range(3, 7))):
        tracker = TensorBoardTracker(cfg, cfg.stats_logger.tensorboard, tmp_path / "run")
        for step in steps:
            tracker.write(step, {"reward/mean": float(attempt)})
        tracker.finish("completed", None)
    shown = [(s.step, s.value) for s in events(tmp_path / "run").Scalars("reward/mean")]
    assert shown == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]


def test_tensorboard_says_why_a_run_failed(failed: Recorded) -> None:
    found = events(failed.run_dir)
    end = metadata.parse_session_end_info_plugin_data(
        hyperparameters(found, metadata.SESSION_END_INFO_TAG)
    )
    assert end.status == api_pb2.STATUS_FAILURE
    (said,) = found.Tensors("status")
    assert said.tensor_proto.string_val == [b"failed: NonFiniteLoss: step 3"]


def wandb_record(run_dir: Path) -> bytes:
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    return file.read_bytes()


def test_wandb_offline_has_every_step_the_configuration_and_the_end(completed: Recorded) -> None:
    found = wandb_record(completed.run_dir)
    for text in (b"reward/mean", b"0.25", b"0.75", b"actor", b"sums", b"one", b"completed"):
        assert text in found
    assert "wandb sync" in (completed.run_dir / "logs" / "wandb.log").read_text()


def test_wandb_says_why_a_run_failed(failed: Recorded) -> None:
    assert b"NonFiniteLoss: step 3" in wandb_record(failed.run_dir)


def mlflow_run(run_dir: Path) -> tuple[MlflowClient, Any]:
    client = MlflowClient((run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


@pytest.fixture
def _file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.mark.usefixtures("_file_store")
def test_mlflow_has_every_step_the_configuration_and_the_end(completed: Recorded) -> None:
    client, run = mlflow_run(completed.run_dir)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "reward_part/a_" in run.data.metrics
    assert run.data.params["actor.optimizer.lr"] == "0.25"
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"


@pytest.mark.usefixtures("_file_store")
def test_mlflow_says_why_a_run_failed(failed: Recorded) -> None:
    _, run = mlflow_run(failed.run_dir)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "NonFiniteLoss: step 3"


def trackio_rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(run_dir / "trackio" / "sums.db")) as database:
        return database.execute(query).fetchall()


def test_trackio_has_every_step_and_the_configuration(completed: Recorded) -> None:
    rows = trackio_rows(completed.run_dir, "SELECT step, metrics FROM metrics ORDER BY step")
    found = [(step, json.loads(metrics)["reward/mean"]) for step, metrics in rows]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]
    ((config,),) = trackio_rows(completed.run_dir, "SELECT config FROM configs")
    assert json.loads(config)["actor"]["optimizer"]["lr"] == 0.25


def test_trackio_alerts_why_a_run_failed(failed: Recorded) -> None:
    rows = trackio_rows(failed.run_dir, "SELECT title, text FROM alerts")
    assert rows == [("run failed", "NonFiniteLoss: step 3")]


# Where they are, and what they cost the controller


def test_nothing_is_written_outside_of_the_run_folder(completed: Recorded) -> None:
    assert list(completed.home.rglob("*")) == []
    assert sorted(p.name for p in completed.run_dir.parent.iterdir()) == ["home", "run"]
    assert sorted(p.name for p in completed.run_dir.iterdir()) == sorted(
        ["config.yaml", "logs", *TRACKERS]
    )


@pytest.mark.invariant("I16")
def test_neither_the_controller_nor_a_tracker_loads_torch(completed: Recorded) -> None:
    assert completed.said["with_torch"] == []
    loaded = set(completed.said["modules"])
    assert loaded & {"torch", "transformers", *TRACKERS} == set()


# What cannot be used is said before the run


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"stats_logger.{name}: needs the {name} package") as info:
        check_installed(StatsLoggerConfig(**{name: {}}))
    assert f"offbeat's extra {name})" in str(info.value)


def test_a_tracker_that_is_off_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_installed(StatsLoggerConfig(wandb={"mode": "disabled"}))


# A tracker that fails, hangs or dies


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[TrackerProcess]:
    """MLflow with a queue that nobody waits for; ended in any case."""
    configured(tmp_path / "run", mlflow={})
    tracker = TrackerProcess.start("mlflow", tmp_path / "run", patience=0.0)
    tracker.write(1, {"reward/mean": 0.5})
    try:
        yield tracker
    finally:
        with suppress(ProcessLookupError):
            os.killpg(tracker.pid, signal.SIGKILL)
        with suppress(WorkerError):
            tracker.close()


def write_until_it_raises(tracker: TrackerProcess) -> str:
    deadline = time.monotonic() + 30
    with pytest.raises(WorkerError) as info:  # noqa: PT012  # the failure arrives when it arrives
        while time.monotonic() < deadline:
            tracker.write(2, {"reward/mean": 0.5})
    return str(info.value)


def test_a_step_that_cannot_be_written_is_raised_with_its_reason(
    tracker: TrackerProcess, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "run" / "mlflow")
    message = write_until_it_raises(tracker)
    assert "tracker mlflow: mlflow: " in message
    assert str(tmp_path / "run" / "logs" / "mlflow.log") in message


def test_a_call_past_its_deadline_ends_the_process_and_leaves_its_stack(
    tracker: TrackerProcess, tmp_path: Path
) -> None:
    os.kill(tracker.pid, signal.SIGALRM)
    assert "did not return in time" in write_until_it_raises(tracker)
    assert "worker.py" in (tmp_path / "run" / "logs" / "mlflow.log").read_text()


def test_a_killed_tracker_is_reported_with_its_exit_code(tracker: TrackerProcess) -> None:
    os.kill(tracker.pid, signal.SIGKILL)
    assert "exit code -9" in write_until_it_raises(tracker)


def test_a_tracker_that_hangs_costs_steps_but_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configured(tmp_path / "run", mlflow={})
    tracker = TrackerProcess.start("mlflow", tmp_path / "run", patience=0.0)
    tracker.write(1, {"reward/mean": 0.5})
    os.kill(tracker.pid, signal.SIGSTOP)
    metrics = {f"area/quantity_{i}": float(i) for i in range(100)}
    slowest = 0.0
    while tracker.dropped < 100:
        began = time.monotonic()
        tracker.write(2, metrics)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1
    os.kill(tracker.pid, signal.SIGCONT)
    tracker.close()
    assert "100 of " in caplog.text
    assert "metrics.jsonl has all of them" in caplog.text


def test_an_interrupted_run_does_not_wait_for_a_tracker_that_hangs(tmp_path: Path) -> None:
    configured(tmp_path / "run", tensorboard={})
    tracker = TrackerProcess.start("tensorboard", tmp_path / "run")
    tracker.write(1, {"reward/mean": 0.5})
    os.kill(tracker.pid, signal.SIGSTOP)
    tracker.conclude(RunStatus.INTERRUPTED, None)
    with pytest.raises(WorkerError, match="not finished 5 s after the end of the run"):
        tracker.close()
    assert not Path(f"/proc/{tracker.pid}").exists()


def test_a_failing_tracker_is_reported_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "file").write_text("")
    configured(run_dir, tensorboard={"path": str(tmp_path / "file")})
    broken = TrackerProcess.start("tensorboard", run_dir)
    sinks = SinkSet([broken, JsonlSink(run_dir / "metrics.jsonl")])
    for step in (1, 2, 3):
        sinks.write(step, {"version": step, "seconds": 0.1})
    sinks.close()
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 3
    (report,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "tracker tensorboard" in report
    assert "training goes on" in report
    assert "Free space" not in report


def test_wandb_online_without_a_key_neither_asks_nor_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    configured(tmp_path / "run", wandb={"mode": "online"})
    tracker = TrackerProcess.start("wandb", tmp_path / "run")
    with pytest.raises(WorkerError, match="No API key configured"):
        tracker.write(1, {"reward/mean": 0.5})
    tracker.close()


ORPHAN = """
import os, signal, sys
from pathlib import Path
from offbeat.observe.trackers.process import TrackerProcess
tracker = TrackerProcess.start("mlflow", Path(sys.argv[1]))
tracker.write(1, {"reward/mean": 0.5})
print(tracker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.invariant("I13")
@pytest.mark.usefixtures("_file_store")
def test_a_killed_controller_leaves_a_closed_record_and_no_process(tmp_path: Path) -> None:
    configured(tmp_path / "run", mlflow={})
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        timeout=50,
        check=False,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    _, run = mlflow_run(tmp_path / "run")
    assert run.info.status == "KILLED"
