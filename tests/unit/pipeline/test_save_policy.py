"""A disk that refuses a save ends the run or does not, as it was told; it is never silent."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.checkpoint.folders import latest, step_folders
from offbeat.checkpoint.manifest import verify
from offbeat.checkpoint.saver import Saver, ScheduleState
from offbeat.checkpoint.snapshot import Counts, RunState, Snapshots
from offbeat.config import AsyncMode, OnError
from offbeat.errors import CheckpointError
from offbeat.pipeline import save_policy
from offbeat.pipeline.save_policy import ModelSaves, SavePolicy, SnapshotSaves
from offbeat.types import Environment, GroupId, PolicyVersion, TrainerState, WeightUpdate
from offbeat.weights.layout import TensorSpec, digest_of, lay_out

LAST_STEP = 9
MODES = [AsyncMode.SYNC, AsyncMode.ASYNC]
HERE = Environment(torch="", build="", threads=1, processor="", cpu_flags=())

RUN = RunState(
    step=1,
    version=PolicyVersion(1),
    attempt=1,
    next_group_id=GroupId(1),
    open_groups=(),
    lookahead=0,
    counts=Counts(),
    saved=False,
    save=ScheduleState(),
    evaluate=ScheduleState(),
    snapshot=ScheduleState(),
)


class Disk:
    """A folder that can be broken, as for a full disk: a file is in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refuse(self) -> None:
        self.folder.write_text("full")

    def take(self) -> None:
        self.folder.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "checkpoints")


@pytest.fixture
def weights(tmp_path: Path) -> WeightUpdate:
    layout = lay_out([TensorSpec(name="w", dtype="F32", shape=(4,))])
    content = layout.header + bytes(16)
    (tmp_path / "weights").write_bytes(content)
    return WeightUpdate(
        version=PolicyVersion(1),
        uri=str(tmp_path / "weights"),
        nbytes=len(content),
        digest=digest_of(content),
    )


async def save(saves: ModelSaves, weights: WeightUpdate, step: int) -> None:
    """To the end, also in the background."""
    await saves.save(weights, step=step)
    await saves.wait()


OpenSaves = Callable[..., Awaitable[ModelSaves]]


@pytest.fixture
def failures() -> list[str]:
    """What was told of errors that the run survives."""
    return []


@pytest.fixture
async def open_saves(
    disk: Disk, model_folder: Path, failures: list[str]
) -> AsyncIterator[OpenSaves]:
    async with AsyncExitStack() as stack:

        async def make(mode: AsyncMode, on_error: OnError) -> ModelSaves:
            opening = Saver.open(mode=mode, checkpoints_dir=disk.folder, template_dir=model_folder)
            saver = await stack.enter_async_context(await opening)
            policy = SavePolicy("saver", on_error, disk.folder, failures.append)
            return ModelSaves(saver, policy, last_step=LAST_STEP)

        yield make


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", MODES)
async def test_a_failed_save_is_left_behind_and_the_next_one_is_made(
    open_saves: OpenSaves,
    disk: Disk,
    weights: WeightUpdate,
    failures: list[str],
    caplog: pytest.LogCaptureFixture,
    mode: AsyncMode,
) -> None:
    saves = await open_saves(mode, OnError.CONTINUE)
    disk.refuse()
    await saves.save(weights, step=2)
    await saves.settle()
    disk.take()
    await saves.save(weights, step=4)
    await saves.wait()
    assert [folder.name for folder in step_folders(disk.folder)] == ["step-000004"]
    assert latest(disk.folder) == disk.folder / "step-000004"
    verify(disk.folder / "step-000004")
    (why,) = failures
    assert why.startswith(f"step 2: saving {disk.folder}/step-000002 failed")
    (logged,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert logged.startswith(why)
    assert "training goes on without it, as saver.on_error says" in logged


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", MODES)
async def test_the_error_ends_the_run_where_it_shall_with_a_way_out(
    open_saves: OpenSaves, disk: Disk, weights: WeightUpdate, failures: list[str], mode: AsyncMode
) -> None:
    saves = await open_saves(mode, OnError.STOP)
    disk.refuse()
    with pytest.raises(CheckpointError, match="step 2: saving") as caught:
        await save(saves, weights, 2)
    (note,) = caught.value.__notes__
    assert note.startswith(f"{disk.folder} is in the way: it is not a folder")
    assert "saver.on_error=continue trains on without a save that fails" in note
    assert failures == []


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", MODES)
async def test_the_save_of_the_last_step_never_fails_unseen(
    open_saves: OpenSaves, disk: Disk, weights: WeightUpdate, failures: list[str], mode: AsyncMode
) -> None:
    saves = await open_saves(mode, OnError.CONTINUE)
    disk.refuse()
    await saves.save(weights, step=LAST_STEP - 1)
    with pytest.raises(CheckpointError, match=f"step {LAST_STEP}: saving") as caught:
        await save(saves, weights, LAST_STEP)
    assert "without which the training is lost" in caught.value.__notes__[0]
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("writable", "said"),
    [(True, r"is on a file system with [\d.]+ [kMGT]?B free"), (False, "cannot be written to")],
)
def test_the_state_of_the_disk_is_said_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, writable: bool, said: str
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: writable)  # root may write anywhere
    policy = SavePolicy("recover", OnError.STOP, tmp_path / "a" / "b", lambda why: None)
    with pytest.raises(CheckpointError, match="no") as caught, policy.deciding():
        raise CheckpointError("no")
    assert re.match(f"{tmp_path} {said}", caught.value.__notes__[0])


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("on_error", OnError)
async def test_a_failed_snapshot_ends_the_run_or_is_counted(
    disk: Disk, weights: WeightUpdate, on_error: OnError
) -> None:
    failures: list[str] = []
    trainer = TrainerState(tensors=weights, optimizer_steps=1, environment=HERE)
    async with Snapshots(disk.folder, keep=2) as snapshots:
        policy = SavePolicy("recover", on_error, disk.folder, failures.append)
        saves = SnapshotSaves(snapshots, policy)
        disk.refuse()
        await saves.write(RUN, trainer)
        if on_error is OnError.STOP:
            with pytest.raises(CheckpointError, match="step 1: saving"):
                await saves.ready()
            return
        await saves.ready()
        disk.take()
        await saves.write(dataclasses.replace(RUN, step=2), trainer)
        await saves.ready()
    assert [why[:6] for why in failures] == ["step 1"]
    assert [folder.name for folder in step_folders(disk.folder)] == ["step-000002"]


async def test_a_slow_disk_is_warned_of_once_with_what_to_change(
    open_saves: OpenSaves,
    weights: WeightUpdate,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if "training waited" in r.getMessage()]

    saves = await open_saves(AsyncMode.ASYNC, OnError.STOP)
    await saves.save(weights, step=1)
    await saves.save(weights, step=2)
    assert warnings() == []
    monkeypatch.setattr(save_policy, "SLOW_SECONDS", 0.0)
    for step in (3, 4):
        await saves.save(weights, step=step)
    (said,) = warnings()
    assert "was still being written" in said
    assert "saver.freq_steps, saver.freq_secs" in said
