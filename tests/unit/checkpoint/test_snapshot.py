"""Snapshots: whole or not there, the newest good one is used, errors are raised."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.checkpoint.folders import step_folder, step_folders
from offbeat.checkpoint.manifest import SaveManifest, seal
from offbeat.checkpoint.saver import ScheduleState
from offbeat.checkpoint.snapshot import (
    Counts,
    RunState,
    Snapshots,
    newest_snapshot,
    read_snapshot,
)
from offbeat.errors import CheckpointError, CorruptCheckpoint
from offbeat.types import (
    DropReason,
    Environment,
    GroupId,
    PolicyVersion,
    TrainerState,
    WeightUpdate,
)
from offbeat.weights.layout import digest_of

MakeWeights = Callable[..., WeightUpdate]

MACHINE = Environment(
    torch="2.0", build="options", threads=2, processor="Z80", cpu_flags=("fast", "wide")
)


def run_state(step: int) -> RunState:
    return RunState(
        step=step,
        version=PolicyVersion(step),
        attempt=2,
        next_group_id=GroupId(9),
        open_groups=(GroupId(7), GroupId(4)),
        lookahead=6,
        counts=Counts(admitted=3, dropped={DropReason.FAILED: 2}, restarts=1),
        saved=True,
        save=ScheduleState(step=step, epoch=1, elapsed_seconds=0.1 + 0.2),
        evaluate=ScheduleState(step=step - 1),
        snapshot=ScheduleState(),
    )


def trainer_state(tensors: WeightUpdate) -> TrainerState:
    return TrainerState(tensors=tensors, optimizer_steps=3, environment=MACHINE)


async def written(directory: Path, make_weights: MakeWeights, *steps: int, keep: int = 2) -> None:
    async with Snapshots(directory, keep=keep) as snapshots:
        for step in steps:
            await snapshots.ready()
            await snapshots.write(run_state(step), trainer_state(make_weights(step)))


@pytest.mark.invariant("I04")
async def test_what_is_read_is_what_was_written(tmp_path: Path, make_weights: MakeWeights) -> None:
    there = tmp_path / "snapshots"
    async with Snapshots(there, keep=2) as snapshots:
        update = make_weights(5)
        await snapshots.write(run_state(5), trainer_state(update))
        await snapshots.ready()
        (report,) = snapshots.take_reports()
    found = newest_snapshot(there)
    assert found is not None
    assert found.state.run == run_state(5)
    assert (found.state.optimizer_steps, found.state.environment) == (3, MACHINE)
    assert digest_of(found.tensors.read_bytes()) == update.digest
    assert report.step == 5
    assert report.nbytes > update.nbytes


async def test_the_newest_stay_as_many_as_are_kept(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    await written(tmp_path / "snapshots", make_weights, 1, 2, 3, 4)
    left = [folder.name for folder in step_folders(tmp_path / "snapshots")]
    assert left == ["step-000004", "step-000003"]


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "trainer.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "trainer.safetensors").write_bytes(content)


def cut_the_tensors(folder: Path) -> None:
    os.truncate(folder / "trainer.safetensors", 100)


def lose_the_state(folder: Path) -> None:
    (folder / "state.json").unlink()


def tear_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 30)


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def write_another_state(folder: Path) -> None:
    """Well sealed, and of no form that is known."""
    (folder / "state.json").write_text('{"run": {}}')
    seal(folder, SaveManifest(step=2, version=PolicyVersion(2)), known={})


DAMAGES = (
    flip_a_byte,
    cut_the_tensors,
    lose_the_state,
    tear_the_manifest,
    lose_the_manifest,
    write_another_state,
)


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_one_is_refused_by_name_and_the_one_before_it_used(
    tmp_path: Path,
    make_weights: MakeWeights,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = tmp_path / "snapshots"
    await written(there, make_weights, 1, 2)
    damage(step_folder(there, 2))
    with caplog.at_level(logging.ERROR):
        found = newest_snapshot(there)
    assert found is not None
    assert found.folder == step_folder(there, 1)
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{step_folder(there, 2)} is damaged and not used" in said
    with pytest.raises(CorruptCheckpoint, match="step-000002"):
        read_snapshot(step_folder(there, 2))


async def test_without_a_good_one_nothing_is_started_over_silently(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    there = tmp_path / "snapshots"
    await written(there, make_weights, 1, 2)
    for folder in step_folders(there):
        flip_a_byte(folder)
    with pytest.raises(
        CheckpointError, match=r"none of the 2 snapshots can be used: .*step-000001"
    ):
        newest_snapshot(there)


async def test_what_a_killed_writer_left_is_no_snapshot(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    there = tmp_path / "snapshots"
    assert newest_snapshot(there) is None
    await written(there, make_weights, 1)
    torn = there / ".step-000002.tmp-1"
    torn.mkdir()
    (torn / "trainer.safetensors").write_bytes(b"half")
    # Killed between the two renames of a folder that replaces one.
    step_folder(there, 1).rename(there / ".step-000001.old-1")
    found = newest_snapshot(there)
    assert found is not None
    assert found.folder == step_folder(there, 1)
    assert [path.name for path in there.iterdir()] == ["step-000001"]


@pytest.mark.invariant("I11")
async def test_error_of_one_is_raised_by_the_next_and_leaves_the_one_before(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    there = tmp_path / "snapshots"
    async with Snapshots(there, keep=2) as snapshots:
        await snapshots.write(run_state(1), trainer_state(make_weights(1)))
        await snapshots.ready()
        pid = snapshots.writer_pid
        assert pid is not None
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, -1))
        await snapshots.write(run_state(2), trainer_state(make_weights(2)))
        with pytest.raises(CheckpointError, match=r"step 2: .*step-000002 .*File too large"):
            await snapshots.ready()
        assert [path.name for path in there.iterdir()] == ["step-000001"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        await snapshots.write(run_state(3), trainer_state(make_weights(3)))
    assert [f.name for f in step_folders(there)] == ["step-000003", "step-000001"]


async def test_error_of_the_last_one_is_raised_at_the_end(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    update = dataclasses.replace(make_weights(1), digest="0" * 32)

    async def run() -> None:
        async with Snapshots(tmp_path / "snapshots", keep=2) as snapshots:
            await snapshots.write(run_state(1), trainer_state(update))

    with pytest.raises(CheckpointError, match=r"step 1: .*was announced"):
        await run()
    assert step_folders(tmp_path / "snapshots") == []


async def test_files_that_a_resumed_run_needs_may_be_missing(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    (tmp_path / "metrics").write_text("x")
    needs = (tmp_path / "metrics", tmp_path / "absent")
    async with Snapshots(tmp_path / "snapshots", needs=needs, keep=2) as snapshots:
        await snapshots.write(run_state(1), trainer_state(make_weights(1)))
    assert newest_snapshot(tmp_path / "snapshots") is not None


async def test_no_process_is_started_before_the_first_one(tmp_path: Path) -> None:
    async with Snapshots(tmp_path / "snapshots", keep=2) as snapshots:
        await snapshots.ready()
        assert snapshots.writer_pid is None
    assert not (tmp_path / "snapshots").exists()


@pytest.mark.invariant("I12")
async def test_a_writer_that_hangs_is_killed_at_the_deadline(
    tmp_path: Path, make_weights: MakeWeights
) -> None:
    async with (
        asyncio.timeout(10),
        Snapshots(tmp_path / "snapshots", keep=2, deadline_seconds=0.2) as snapshots,
    ):
        await snapshots.write(run_state(1), trainer_state(make_weights(1)))
        pid = snapshots.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=r"step 1: .*did not end within 0\.2 s"):
            await snapshots.ready()
