"""RewardPool with real processes: deadlines, cancellation, blame and closing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from offbeat.errors import WorkerError
from offbeat.rollout.reward_pool import RewardFailure, RewardPool
from offbeat.rollout.reward_source import load_order
from offbeat.rollout.reward_wire import Answer

Gone: TypeAlias = Callable[[int, float], bool]


def _value(outcome: Answer | RewardFailure) -> float:
    assert isinstance(outcome, Answer), outcome
    return outcome.value


def _failure(outcome: Answer | RewardFailure) -> RewardFailure:
    assert isinstance(outcome, RewardFailure), outcome
    return outcome


def _fifo(tmp_path: Path) -> Path:
    """A named pipe: whoever reads it waits until a reward function has written to it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.invariant("I13")
async def test_a_hung_reward_is_killed_at_its_deadline_with_all_it_started(
    tmp_path: Path, gone_within: Gone
) -> None:
    def judge(path: str | None) -> float:
        if path is None:
            return 1.0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = subprocess.Popen(["sleep", "1000"])
        Path(path).write_text(f"{os.getpid()} {started.pid}")
        while True:
            pass

    async with RewardPool(load_order(judge), timeout_seconds=0.5, workers=1) as pool:
        begin = time.monotonic()
        outcome = _failure(await pool.call(str(tmp_path / "pids")))
        assert time.monotonic() - begin < 1.5
        assert outcome == RewardFailure(error="RewardTimeout", reason="timed out after 0.5 s")
        worker, grandchild = map(int, (tmp_path / "pids").read_text().split())
        assert gone_within(worker, 1)
        assert gone_within(grandchild, 1)
        assert _value(await pool.call(None)) == 1.0
        assert (pool.counters.calls, pool.counters.timeouts, pool.counters.restarts) == (2, 1, 1)


class Watch:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self.lost: list[str] = []

    def reward_worker_replaced(self, why: str) -> None:
        self.replaced.append(why)

    def reward_lost(self, why: str) -> None:
        self.lost.append(why)


async def test_the_watch_hears_of_each_lost_call_and_of_each_process_that_was_replaced() -> None:
    def judge(how: str) -> float:
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(1000)
        if how == "raise":
            raise KeyError("no")
        return 1.0

    watch = Watch()
    load = load_order(judge)
    async with RewardPool(load, timeout_seconds=0.5, workers=1, watch=watch) as pool:
        for how in ("exit", "raise", "hang", "score"):
            await pool.call(how)
    assert watch.lost == ["reward process died: exit code 7", "timed out after 0.5 s"]
    assert watch.replaced == ["reward process died: exit code 7", "a call took longer than 0.5 s"]


@pytest.mark.invariant("I13")
async def test_what_a_dead_reward_started_dies_too(tmp_path: Path, gone_within: Gone) -> None:
    def judge() -> None:
        started = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(started.pid))
        os._exit(1)

    async with RewardPool(load_order(judge), timeout_seconds=5, workers=1) as pool:
        assert _failure(await pool.call()).error == "WorkerError"
        assert gone_within(int((tmp_path / "pid").read_text()), 1)


async def test_the_deadline_starts_with_the_job_and_not_in_the_queue() -> None:
    def slow() -> float:
        time.sleep(0.25)
        return 1.0

    async with RewardPool(load_order(slow), timeout_seconds=0.6, workers=1) as pool:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.call()) for _ in range(4)]
        assert [_value(task.result()) for task in tasks] == [1.0] * 4


async def test_the_deadline_does_not_count_the_import_of_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "my_slow_module.py").write_text(
        "import time\ntime.sleep(0.5)\ndef reward(): return 1\n"
    )
    source = "my_slow_module:reward"
    load = load_order(source, tmp_path)
    async with RewardPool(load, timeout_seconds=0.3, workers=1) as pool:
        assert _value(await pool.call()) == 1.0


async def test_synchronous_jobs_run_one_per_process_and_side_by_side() -> None:
    def slow() -> float:
        time.sleep(0.3)
        return float(os.getpid())

    async with RewardPool(load_order(slow), timeout_seconds=5, workers=2) as pool:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.call()) for _ in range(2)]
        assert len({_value(task.result()) for task in tasks}) == 2


async def test_asynchronous_jobs_share_a_process() -> None:
    async def nap() -> float:
        await asyncio.sleep(0.2)
        return float(os.getpid())

    async with RewardPool(load_order(nap), timeout_seconds=5, workers=1) as pool:
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.call()) for _ in range(20)]
        assert time.monotonic() - begin < 1
        assert len({_value(task.result()) for task in tasks}) == 1


async def test_a_late_asynchronous_job_is_canceled_and_its_process_lives(tmp_path: Path) -> None:
    async def judge(seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        finally:
            (tmp_path / f"ended-{seconds}").touch()
        return float(os.getpid())

    async with RewardPool(load_order(judge), timeout_seconds=0.3, workers=1) as pool:
        before = _value(await pool.call(0))
        assert _failure(await pool.call(100)).reason == "timed out after 0.3 s"
        assert (tmp_path / "ended-100").exists()
        assert _value(await pool.call(0)) == before
        assert (pool.counters.timeouts, pool.counters.restarts) == (1, 0)


async def test_a_job_that_blocks_the_event_loop_is_killed_and_its_neighbor_scored() -> None:
    async def judge(block: bool) -> float:
        await asyncio.sleep(0.05)
        while block:
            pass
        await asyncio.sleep(0.1)
        return 1.0

    async with RewardPool(load_order(judge), timeout_seconds=0.5, workers=1) as pool:
        async with asyncio.TaskGroup() as group:
            # The innocent job comes first: its deadline passes first, and still it is not blamed.
            tasks = [group.create_task(pool.call(block)) for block in (False, True)]
        assert _value(tasks[0].result()) == 1.0
        assert "timed out" in _failure(tasks[1].result()).reason
        assert pool.counters.restarts == 1


async def test_an_asynchronous_job_that_refuses_its_cancellation_is_killed(
    tmp_path: Path, gone_within: Gone
) -> None:
    async def stubborn() -> float:
        (tmp_path / "pid").write_text(str(os.getpid()))
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                continue

    async with RewardPool(load_order(stubborn), timeout_seconds=0.2, workers=1) as pool:
        assert _failure(await pool.call()).reason == "timed out after 0.2 s"
        assert gone_within(int((tmp_path / "pid").read_text()), 1)


async def test_the_death_of_a_shared_process_costs_only_the_job_that_ran() -> None:
    async def judge(deadly: bool) -> float:
        await asyncio.sleep(0.1)
        if deadly:
            os._exit(3)
        await asyncio.sleep(0.2)
        return 1.0

    async with RewardPool(load_order(judge), timeout_seconds=5, workers=1) as pool:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.call(i == 3)) for i in range(8)]
        outcomes = [task.result() for task in tasks]
        assert _failure(outcomes.pop(3)).reason == "reward process died: exit code 3"
        assert [_value(outcome) for outcome in outcomes] == [1.0] * 7


async def test_a_process_that_dies_between_jobs_costs_nothing(gone_within: Gone) -> None:
    async with RewardPool(load_order(lambda: os.getpid()), timeout_seconds=5, workers=1) as pool:
        first = int(_value(await pool.call()))
        os.kill(first, signal.SIGKILL)
        assert gone_within(first, 1)
        assert int(_value(await pool.call())) != first


async def test_canceling_a_synchronous_call_kills_its_job_without_waiting(
    tmp_path: Path, gone_within: Gone
) -> None:
    fifo = _fifo(tmp_path)

    def judge(hang: bool) -> float:
        if hang:
            fifo.write_text(str(os.getpid()))
        while hang:
            pass
        return 1.0

    async with RewardPool(load_order(judge), timeout_seconds=30, workers=1) as pool:
        task = asyncio.ensure_future(pool.call(True))
        worker = int(await asyncio.to_thread(fifo.read_text))
        begin = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - begin < 0.5
        assert gone_within(worker, 1)
        assert _value(await pool.call(False)) == 1.0


async def test_canceling_an_asynchronous_call_cancels_its_job(tmp_path: Path) -> None:
    fifo = _fifo(tmp_path)

    async def judge(hang: bool) -> float:
        if hang:
            fifo.write_text("started")
            try:
                await asyncio.sleep(100)
            finally:
                fifo.write_text("canceled")
        return float(os.getpid())

    async with RewardPool(load_order(judge), timeout_seconds=30, workers=1) as pool:
        before = _value(await pool.call(False))
        task = asyncio.ensure_future(pool.call(True))
        assert await asyncio.to_thread(fifo.read_text) == "started"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fifo.read_text) == "canceled"
        assert _value(await pool.call(False)) == before


async def test_calls_canceled_in_the_queue_or_during_a_start_lose_no_place() -> None:
    async with RewardPool(load_order(lambda: 1.0), timeout_seconds=5, workers=1) as pool:
        for steps in range(0, 12, 2):
            tasks = [asyncio.ensure_future(pool.call()) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert _value(await pool.call()) == 1.0


@pytest.mark.invariant("I13")
async def test_closing_ends_running_and_queued_calls_within_a_second(
    tmp_path: Path, gone_within: Gone
) -> None:
    fifo = _fifo(tmp_path)

    def hang() -> None:
        fifo.write_text(str(os.getpid()))
        while True:
            pass

    pool = RewardPool(load_order(hang), timeout_seconds=30, workers=1)
    tasks = [asyncio.ensure_future(pool.call()) for _ in range(3)]
    worker = int(await asyncio.to_thread(fifo.read_text))
    begin = time.monotonic()
    await pool.aclose()
    assert time.monotonic() - begin < 1
    assert gone_within(worker, 0)
    await asyncio.wait(tasks, timeout=1)
    for task in tasks:
        with pytest.raises(WorkerError, match="closed"):
            task.result()


async def test_closing_during_a_start_leaves_no_process() -> None:
    for steps in range(0, 8, 2):
        pool = RewardPool(load_order(lambda: 1.0), timeout_seconds=5, workers=1)
        task = asyncio.ensure_future(pool.call())
        for _ in range(steps):
            await asyncio.sleep(0)
        await pool.aclose()
        with pytest.raises(WorkerError, match="closed"):
            await task


async def test_opening_and_closing_leaves_no_descriptor_open() -> None:
    async def once() -> None:
        async with RewardPool(load_order(lambda: 1.0), timeout_seconds=5, workers=2) as pool:
            await pool.call()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    await once()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_large_arguments_arrive() -> None:
    async with RewardPool(load_order(lambda text: len(text)), timeout_seconds=5, workers=1) as pool:
        assert _value(await pool.call("x" * 3_000_000)) == 3_000_000


async def test_a_module_that_never_finishes_loading_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "my_endless_module.py").write_text("while True: pass\n")
    pool = RewardPool(
        load_order("my_endless_module:reward", tmp_path),
        timeout_seconds=5,
        workers=1,
        start_seconds=0.3,
    )
    with pytest.raises(WorkerError, match=r"did not load the reward function within 0\.3 s"):
        await pool.call()
    await pool.aclose()


async def test_functions_of_importable_modules_go_by_name() -> None:
    # A function that is found along sys.path need not be copied: its module is imported there.
    async with RewardPool(load_order(os.path.basename), timeout_seconds=5, workers=1) as pool:
        assert "returned 'b'" in _failure(await pool.call("a/b")).reason


async def test_a_long_text_of_an_exception_does_not_fill_the_screen() -> None:
    def judge() -> float:
        raise ValueError("x" * 10_000)

    async with RewardPool(load_order(judge), timeout_seconds=10, workers=1) as pool:
        reason = _failure(await pool.call()).reason
    assert reason.startswith("ValueError: xxx")
    assert reason.endswith("... (10012 characters)")
    assert len(reason) < 2100
