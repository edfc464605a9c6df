"""Saving in the background: same content, errors raised, nothing torn, nothing left running."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.checkpoint import manager
from offbeat.checkpoint.folders import latest, step_folder, step_folders
from offbeat.checkpoint.manifest import is_good, verify
from offbeat.checkpoint.saver import Saver, SaveSchedule
from offbeat.config import AsyncMode
from offbeat.errors import CheckpointError
from offbeat.types import WeightUpdate

MakeWeights = Callable[..., WeightUpdate]


async def opened(tmp_path: Path, mode: AsyncMode = AsyncMode.ASYNC, **options: object) -> Saver:
    defaults = {"checkpoints_dir": tmp_path / "checkpoints", "template_dir": tmp_path / "template"}
    return await Saver.open(mode=mode, **{"deadline_seconds": 20.0, **defaults, **options})


def gate(template: Path) -> Path:
    """A named pipe in the template: the writer stops there, in mid-folder, until it is fed."""
    path = template / "merges.txt"
    os.mkfifo(path)
    return path


async def feed(path: Path) -> None:
    """Let the writer pass the gate; returns when it has."""
    await asyncio.to_thread(path.write_text, "merges")


async def standing_at(path: Path) -> int:
    """Returns when the writer has opened the gate; it stays there until the result is closed."""
    return await asyncio.to_thread(os.open, path, os.O_WRONLY)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- schedule


def test_each_frequency_fires_by_its_own_timer() -> None:
    schedule = SaveSchedule(freq_steps=3, freq_epochs=2, freq_secs=10.0, now=100.0)
    asked = [(1, 0, 101), (2, 0, 110), (3, 0, 111), (4, 1, 112), (5, 2, 113), (6, 2, 120)]
    assert [schedule.due(*ask) for ask in asked] == [False, True, True, False, True, True]


@pytest.mark.parametrize("off", [0, None])
def test_zero_and_null_are_off(off: int | None) -> None:
    schedule = SaveSchedule(freq_steps=off, freq_epochs=off, freq_secs=off, now=0.0)
    assert schedule.is_off
    assert not any(schedule.due(step, step, 1e9 * step) for step in range(1, 100))


def test_one_step_is_due_once() -> None:
    schedule = SaveSchedule(freq_steps=2, now=0.0)
    assert [schedule.due(2, 0, 0.0) for _ in range(3)] == [True, False, False]


def test_resumed_schedule_fires_at_the_steps_of_the_uninterrupted_one() -> None:
    whole, stopped = SaveSchedule(freq_steps=5, now=0.0), SaveSchedule(freq_steps=5, now=0.0)
    fired = [step for step in range(1, 21) if whole.due(step, 0, 0.0)]
    assert fired == [5, 10, 15, 20]
    before = [step for step in range(1, 8) if stopped.due(step, 0, 0.0)]
    resumed = SaveSchedule(freq_steps=5, now=0.0, since=stopped.state(0.0))
    assert before + [step for step in range(8, 21) if resumed.due(step, 0, 0.0)] == fired


def test_resumed_timer_does_not_count_the_time_between_two_attempts() -> None:
    stopped = SaveSchedule(freq_secs=10.0, now=100.0)
    resumed = SaveSchedule(freq_secs=10.0, now=5000.0, since=stopped.state(104.0))
    assert [resumed.due(0, 0, now) for now in (5005.0, 5006.0, 5007.0)] == [False, True, False]


def test_slow_steps_do_not_make_a_burst_of_timed_saves() -> None:
    schedule = SaveSchedule(freq_secs=10.0, now=0.0)
    assert [schedule.due(0, 0, now) for now in (35.0, 36.0, 44.0, 45.0)] == [
        True,
        False,
        False,
        True,
    ]


def test_negative_frequency_is_refused() -> None:
    with pytest.raises(ValueError, match="freq_secs must not be negative, got -1"):
        SaveSchedule(freq_secs=-1, now=0.0)


# --- content


@pytest.mark.invariant("I11")
async def test_sync_and_async_saves_are_equal_byte_for_byte(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    update = make_weights(10)
    folders = {}
    for mode in (AsyncMode.SYNC, AsyncMode.ASYNC):
        there = tmp_path / mode
        async with await opened(tmp_path, mode, checkpoints_dir=there) as saver:
            await saver.save(update, step=10, config_digest="abc")
        folders[mode] = content(step_folder(there, 10))
    assert folders[AsyncMode.SYNC] == folders[AsyncMode.ASYNC]
    assert verify(step_folder(tmp_path / "sync", 10)).save.config_digest == "abc"


async def test_sync_save_is_on_disk_when_it_returns(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with await opened(tmp_path, AsyncMode.SYNC) as saver:
        await saver.save(make_weights(1), step=1)
        assert latest(tmp_path / "checkpoints") == step_folder(tmp_path / "checkpoints", 1)
        (report,) = saver.take_reports()
    assert report.step == 1
    assert report.blocked_seconds >= report.background_seconds > 0


async def test_source_may_be_overwritten_as_soon_as_it_is_staged(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    held = gate(template)
    async with await opened(tmp_path) as saver:
        update = make_weights(1)
        await saver.save(update, step=1)
        await saver.maybe_wait_for_staging()
        overwritten = make_weights(2)
        assert saver.take_reports() == ()
        await feed(held)
        await saver.wait()
        (report,) = saver.take_reports()
    manifest = verify(step_folder(tmp_path / "checkpoints", 1))
    assert manifest.files["model.safetensors"].digest == update.digest != overwritten.digest
    assert report.nbytes == sum(entry.nbytes for entry in manifest.files.values())
    assert report.mode is AsyncMode.ASYNC


async def test_next_save_waits_for_the_one_before(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    held = gate(template)
    async with asyncio.timeout(20), await opened(tmp_path) as saver:
        await saver.save(make_weights(1), step=1)
        await saver.maybe_wait_for_staging()
        second = asyncio.ensure_future(saver.save(make_weights(2), step=2))
        await asyncio.wait([second], timeout=0.05)
        assert not second.done()
        await feed(held)
        held.unlink()
        await second
        assert [report.step for report in saver.take_reports()] == [1]
    assert [is_good(folder) for folder in step_folders(tmp_path / "checkpoints")] == [True, True]


async def test_old_folders_are_pruned(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with await opened(tmp_path, keep_last=2) as saver:
        for step in (1, 2, 3, 4):
            await saver.save(make_weights(step), step=step)
            await saver.maybe_wait_for_staging()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000003", "step-000004"]
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-000004"


async def test_auto_is_async_where_weights_are_readable_through_proc(
    tmp_path: Path, template: Path
) -> None:
    async with await opened(tmp_path, AsyncMode.AUTO) as saver:
        assert saver.mode is (AsyncMode.ASYNC if sys.platform == "linux" else AsyncMode.SYNC)


# --- failures


async def save_and_wait(saver: Saver, update: WeightUpdate, *, step: int) -> None:
    """The error of a sync save is raised by the first line, that of an async one by the second."""
    await saver.save(update, step=step)
    await saver.wait()


async def test_error_of_staging_is_raised_by_the_next_save(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    announced = make_weights(1)
    make_weights(2)
    async with await opened(tmp_path) as saver:
        await saver.save(announced, step=1)
        await saver.maybe_wait_for_staging()
        await saver.settle()
        with pytest.raises(CheckpointError, match=r"step 1: saving .*step-000001 failed: .*torn"):
            await saver.save(make_weights(2), step=2)
        assert saver.take_reports() == ()
        await saver.save(make_weights(3), step=3)
    assert [folder.name for folder in step_folders(tmp_path / "checkpoints")] == ["step-000003"]


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", [AsyncMode.SYNC, AsyncMode.ASYNC])
async def test_full_disk_is_raised_and_leaves_the_previous_save(
    tmp_path: Path, template: Path, make_weights: MakeWeights, mode: AsyncMode
) -> None:
    there = tmp_path / "checkpoints"
    async with await opened(tmp_path, mode) as saver:
        await saver.save(make_weights(1), step=1)
        await saver.wait()
        unlimited = resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, -1))
        with pytest.raises(CheckpointError, match=r"step 2: .*step-000002 .*File too large"):
            await save_and_wait(saver, make_weights(2), step=2)
        assert sorted(path.name for path in there.iterdir()) == ["latest", "step-000001"]
        assert latest(there) == step_folder(there, 1)
        resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, unlimited)
        await saver.save(make_weights(4), step=4)
    assert latest(there) == step_folder(there, 4)


async def test_error_of_the_last_save_is_raised_at_close(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    saver = await opened(tmp_path)
    resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, -1))
    await saver.save(make_weights(2), step=2)
    with pytest.raises(CheckpointError, match=r"step 2: .*File too large"):
        await saver.close()
    assert not is_running(saver.writer_pid)


async def test_folder_that_cannot_be_written_is_raised(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    # Root ignores permission bits, so that it needs a file system that refuses it.
    there = Path("/proc/self") if os.geteuid() == 0 else tmp_path / "read-only"
    await asyncio.to_thread(there.mkdir, mode=0o500, exist_ok=True)
    saver = await opened(tmp_path, checkpoints_dir=there / "checkpoints")
    await saver.save(make_weights(1), step=1)
    with pytest.raises(CheckpointError, match=r"step 1: .*(Permission|No such file|permitted)"):
        await saver.close()


async def test_error_of_the_body_goes_on_with_the_saves_failure_as_its_note(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async def body() -> None:
        async with await opened(tmp_path) as saver:
            resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, -1))
            await saver.save(make_weights(2), step=2)
            raise KeyError("body")

    with pytest.raises(KeyError) as caught:
        await body()
    assert "step 2" in caught.value.__notes__[0]


@pytest.mark.invariant("I11")
async def test_kill_in_the_middle_of_a_folder_is_raised_and_the_previous_save_stays(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    there = tmp_path / "checkpoints"
    async with await opened(tmp_path) as saver:
        await saver.save(make_weights(1), step=1)
        await saver.wait()
        held = gate(template)
        await saver.save(make_weights(2), step=2)
        holding = await standing_at(held)
        assert list(there.glob(".step-000002.tmp-*/config.json"))
        os.kill(saver.writer_pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"step 2: .*died with exit code -9"):
            await saver.save(make_weights(3), step=3)
        os.close(holding)
        assert step_folders(there) == [step_folder(there, 1)]
        assert latest(there) == step_folder(there, 1)
        held.unlink()
        await saver.save(make_weights(4), step=4)
    assert latest(there) == step_folder(there, 4)
    assert not list(there.glob(".*")), "the torn folder of the killed writer is still there"


async def test_kill_before_the_copy_ends_the_wait_for_it_and_is_raised_by_the_next_save(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with asyncio.timeout(20), await opened(tmp_path) as saver:
        os.kill(saver.writer_pid, signal.SIGSTOP)
        await saver.save(make_weights(1), step=1)
        staging = asyncio.ensure_future(saver.maybe_wait_for_staging())
        await asyncio.wait([staging], timeout=0.05)
        assert not staging.done()
        os.kill(saver.writer_pid, signal.SIGKILL)
        await staging
        with pytest.raises(CheckpointError, match=r"step 1: .*died with exit code -9"):
            await saver.save(make_weights(2), step=2)
    assert step_folders(tmp_path / "checkpoints") == []


async def killed(pid: int) -> None:
    """Kill a child and return when it is dead, though maybe not yet reaped."""
    watch = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(select.select, [watch], [], [], 5.0)
    os.close(watch)


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", [AsyncMode.SYNC, AsyncMode.ASYNC])
async def test_a_writer_that_was_killed_with_nothing_to_do_is_replaced_by_the_next_save(
    tmp_path: Path,
    template: Path,
    make_weights: MakeWeights,
    caplog: pytest.LogCaptureFixture,
    mode: AsyncMode,
) -> None:
    there = tmp_path / "checkpoints"
    async with asyncio.timeout(20), await opened(tmp_path, mode) as saver:
        await save_and_wait(saver, make_weights(1), step=1)
        first = saver.writer_pid
        assert saver.restarts == 0
        await killed(first)
        await save_and_wait(saver, make_weights(2), step=2)
        assert saver.restarts == 1
        assert saver.writer_pid != first
        assert not is_running(first)
        await save_and_wait(saver, make_weights(3), step=3)
        assert saver.restarts == 1
        assert [report.step for report in saver.take_reports()] == [1, 2, 3]
    assert [is_good(step_folder(there, step)) for step in (1, 2, 3)] == [True] * 3
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith(f"{first} died with exit code -9 with nothing to do; starting another")


async def test_death_of_an_idle_writer_is_said_at_close_and_fails_nothing(
    tmp_path: Path, template: Path, make_weights: MakeWeights, caplog: pytest.LogCaptureFixture
) -> None:
    saver = await opened(tmp_path)
    await save_and_wait(saver, make_weights(1), step=1)
    os.kill(saver.writer_pid, signal.SIGKILL)
    await saver.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.endswith("died with exit code -9 with nothing to do")
    assert is_good(step_folder(tmp_path / "checkpoints", 1))


@pytest.mark.invariant("I12")
async def test_a_writer_that_does_not_even_take_its_job_is_killed_at_the_deadline(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    saver = await opened(tmp_path, deadline_seconds=0.2)
    os.kill(saver.writer_pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        await saver.save(make_weights(1), step=1, config_digest="x" * 1_000_000)
        with pytest.raises(CheckpointError, match=r"step 1: .*did not end within 0\.2 s"):
            await saver.close()


@pytest.mark.invariant("I13")
async def test_the_error_of_a_run_is_said_before_a_save_is_waited_for(
    tmp_path: Path,
    template: Path,
    make_weights: MakeWeights,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "_FAILED_SECONDS", 0.1)

    async def body() -> int:
        async with await opened(tmp_path) as saver:
            os.kill(saver.writer_pid, signal.SIGSTOP)
            await saver.save(make_weights(1), step=1)
            raise KeyError(saver.writer_pid)

    with pytest.raises(KeyError) as caught:
        await body()
    assert "its writer was killed" in caught.value.__notes__[0]
    assert "the save of step 1 ends first" in caplog.records[0].getMessage()
    assert not is_running(caught.value.args[0])


@pytest.mark.invariant("I13")
async def test_a_save_that_failed_unheard_leaves_no_writer_when_the_run_is_canceled(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    pids = []

    async def body() -> None:
        async with await opened(tmp_path) as saver:
            pids.append(saver.writer_pid)
            resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, -1))
            await saver.save(make_weights(1), step=1)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await body()
    assert not is_running(pids[0])


@pytest.mark.invariant("I12")
async def test_stopped_writer_is_killed_at_the_deadline(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with asyncio.timeout(10), await opened(tmp_path, deadline_seconds=0.2) as saver:
        pid = saver.writer_pid
        os.kill(pid, signal.SIGSTOP)
        await saver.save(make_weights(1), step=1)
        await saver.maybe_wait_for_staging()
        with pytest.raises(CheckpointError, match=r"step 1: .*did not end within 0\.2 s"):
            await saver.wait()
        assert not is_running(pid)


async def test_canceled_save_is_finished_by_close(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    saver = await opened(tmp_path, AsyncMode.SYNC)
    os.kill(saver.writer_pid, signal.SIGSTOP)
    save = asyncio.ensure_future(saver.save(make_weights(1), step=1))
    await asyncio.wait([save], timeout=0.05)
    save.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    os.kill(saver.writer_pid, signal.SIGCONT)
    await saver.close()
    assert is_good(step_folder(tmp_path / "checkpoints", 1))
    assert not is_running(saver.writer_pid)


async def test_two_tasks_may_wait_for_the_same_save(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    held = gate(template)
    async with asyncio.timeout(20), await opened(tmp_path) as saver:
        await saver.save(make_weights(1), step=1)
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(saver.settle()) for _ in range(2)]
            await saver.maybe_wait_for_staging()
            assert not any(wait.done() for wait in waits)
            await feed(held)
        assert [report.step for report in saver.take_reports()] == [1]


async def test_time_that_training_waits_is_what_is_reported(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with await opened(tmp_path) as saver:
        os.kill(saver.writer_pid, signal.SIGSTOP)
        await saver.save(make_weights(1), step=1)
        staging = asyncio.ensure_future(saver.maybe_wait_for_staging())
        await asyncio.wait([staging], timeout=0.1)
        os.kill(saver.writer_pid, signal.SIGCONT)
        await staging
        await saver.wait()
        (report,) = saver.take_reports()
    assert report.blocked_seconds >= 0.1


PARENT = """
import asyncio, sys
from pathlib import Path
from offbeat.checkpoint.saver import Saver
from offbeat.config import AsyncMode
async def main():
    here = Path(sys.argv[1])
    saver = await Saver.open(mode=AsyncMode.ASYNC, checkpoints_dir=here, template_dir=here)
    print(saver.writer_pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.invariant("I13")
async def test_writer_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    watch = os.pidfd_open(pid)
    parent.kill()
    await parent.wait()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch, gone.set)
    async with asyncio.timeout(5):
        await gone.wait()
    asyncio.get_running_loop().remove_reader(watch)
    os.close(watch)


async def test_weights_that_grow_from_save_to_save_are_copied_whole(
    tmp_path: Path, template: Path, make_weights: MakeWeights
) -> None:
    async with await opened(tmp_path) as saver:
        for step, elements in ((1, 10), (2, 3_000_001)):
            await saver.save(make_weights(step, elements=elements), step=step)
            await saver.maybe_wait_for_staging()
    for step, nbytes in ((1, 40), (2, 12_000_004)):
        manifest = verify(step_folder(tmp_path / "checkpoints", step))
        assert nbytes < manifest.files["model.safetensors"].nbytes < nbytes + 300
