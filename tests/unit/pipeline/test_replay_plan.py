"""What a replay looks for before it starts anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from offbeat.config import ActorConfig
from offbeat.errors import DataError
from offbeat.observe import liveness
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import RolloutLog, rollouts_path
from offbeat.observe.sinks import JsonlSink
from offbeat.pipeline.replay import plan_replay
from offbeat.pipeline.update_record import UpdateRecord
from offbeat.train.client import TrainerSpec
from offbeat.types import Environment, PolicyVersion

HERE = Environment(torch="", build="", threads=1, processor="", cpu_flags=())


def record(step: int, before: str | None = None) -> str:
    return UpdateRecord(
        trainer=TrainerSpec(
            model_path="models/tiny",
            dtype=None,
            device="cpu",
            seed=1,
            temperature=1.0,
            max_new_tokens=4,
            total_steps=9,
            actor=ActorConfig(),
        ),
        environment=HERE,
        version=PolicyVersion(step),
        before=before or f"digest-{step - 1}",
        digest=f"digest-{step}",
        tensors=("t",),
    ).to_json()


def recorded_run(folder: Path, steps: int) -> Path:
    log = RolloutLog(folder)
    for step in range(1, steps + 1):
        log.write(step, [], None, record(step))
    return folder


def planned(folder: Path, **steps: int) -> list[int]:
    return [update.step for update in plan_replay(folder, **steps).updates]


def test_all_recorded_steps_are_replayed_unless_some_are_asked_for(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 4)
    assert planned(run) == [1, 2, 3, 4]
    assert planned(run, to_step=2) == [1, 2]
    # There is no snapshot to start from: the steps before are needed for their weights.
    assert planned(run, from_step=3, to_step=3) == [1, 2, 3]


@pytest.mark.parametrize(
    "steps", [{"to_step": 5}, {"from_step": 5}, {"from_step": 2, "to_step": 5}]
)
def test_steps_that_are_not_there_are_refused_with_those_that_are(
    tmp_path: Path, steps: dict[str, int]
) -> None:
    with pytest.raises(DataError, match="step 5 was not recorded; recorded are steps 1 to 4"):
        plan_replay(recorded_run(tmp_path, 4), **steps)


@pytest.mark.parametrize("first", [3, 9])
def test_range_without_a_step_is_said_to_be_empty(tmp_path: Path, first: int) -> None:
    with pytest.raises(DataError, match=f"--from-step {first} lies behind --to-step 2"):
        plan_replay(recorded_run(tmp_path, 4), from_step=first, to_step=2)


def test_run_without_rollouts_has_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rollouts were recorded"):
        plan_replay(tmp_path)


def remove(path: Path) -> None:
    path.unlink()


def forget(path: Path) -> None:
    RolloutLog(path.parents[1]).write(3, [])


def rewrite(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def mix(path: Path) -> None:
    RolloutLog(path.parents[1]).write(3, [], None, record(3, before="another run's"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, r"step-000003\.parquet is missing.*replay what lies before it with --to-step 2"),
        (forget, r"step-000003\.parquet has no record of its update: an offbeat that kept none"),
        (rewrite, r"or the file was rewritten since: bring the file back, or .*--to-step 2"),
        (tear, r"step-000003\.parquet cannot be read as Parquet: .*; bring the file back"),
        (mix, r"step-000003\.parquet: .*another run's, and step 2 produced digest-2"),
    ],
)
def test_step_that_cannot_be_replayed_is_named_with_the_way_out(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    run = recorded_run(tmp_path, 4)
    damage(rollouts_path(run, 3))
    with pytest.raises(DataError, match=message):
        plan_replay(run)
    assert planned(run, to_step=2) == [1, 2]


def test_missing_first_step_leaves_nothing_before_it_to_offer(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, 2)
    rollouts_path(run, 1).unlink()
    with pytest.raises(DataError, match=r"step-000001\.parquet is missing") as caught:
        plan_replay(run)
    assert "--to-step" not in str(caught.value)


def test_steps_that_were_trained_and_not_recorded_are_missed_once_the_run_has_ended(
    tmp_path: Path,
) -> None:
    run = recorded_run(tmp_path, 2)
    sink = JsonlSink(run / "metrics.jsonl")
    for step in range(4):
        sink.write(step, StepRecord(step=step, version=step, seconds=1.0).flat())
    with liveness.held(run):
        assert planned(run) == [1, 2]
    with pytest.raises(DataError, match=r"step-000003\.parquet is missing.*--to-step 2"):
        plan_replay(run)
    assert planned(run, to_step=2) == [1, 2]
