"""AsyncTaskRunner: the limit, the order, and what becomes of every task."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from contextvars import ContextVar

import pytest

from offbeat.errors import StallError, WorkerError
from offbeat.pipeline.task_runner import AsyncTaskRunner, TaskFuture


class Gauge:
    """Counts what is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def fail(x: int) -> int:
    raise ValueError(f"no {x}")


async def test_results_come_back_in_the_order_of_the_futures() -> None:
    async with AsyncTaskRunner(3) as runner:
        futures = [runner.submit(double, i) for i in range(50)]
        assert await runner.wait(*futures) == [2 * i for i in range(50)]


async def test_never_more_than_max_concurrency_run_and_the_limit_is_used() -> None:
    gauge, together = Gauge(), asyncio.Barrier(4)

    async def held() -> None:
        with gauge:
            await together.wait()  # four at a time, or nobody leaves

    async with AsyncTaskRunner(4) as runner:
        await runner.wait(*(runner.submit(held) for _ in range(20)), timeout=30)
    assert gauge.most == 4


async def test_tasks_start_in_the_order_of_submission() -> None:
    started: list[int] = []

    async def note(i: int) -> None:
        started.append(i)
        await asyncio.sleep(0)

    async with AsyncTaskRunner(2) as runner:
        for i in range(20):
            runner.submit(note, i)
    assert started == list(range(20))


async def test_an_exception_reaches_the_one_who_awaits_and_stops_nobody_else() -> None:
    async with AsyncTaskRunner(2) as runner:
        bad, good = runner.submit(fail, 3), runner.submit(double, 4)
        with pytest.raises(ValueError, match="no 3"):
            await bad
        assert await good == 8


async def test_wait_raises_the_exception_of_its_futures() -> None:
    async with AsyncTaskRunner(2) as runner:
        futures = [runner.submit(double, 1), runner.submit(fail, 2)]
        with pytest.raises(ValueError, match="no 2"):
            await runner.wait(*futures)


async def test_an_exception_that_nobody_asks_for_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncTaskRunner(1) as runner:
        runner.submit(fail, 7)
    gc.collect()
    assert "nobody asked" in caplog.text
    assert "no 7" in caplog.text


async def test_pause_lets_running_tasks_end_and_starts_none() -> None:
    started: list[int] = []

    async def note(i: int) -> None:
        started.append(i)

    async with AsyncTaskRunner(1) as runner:
        runner.pause()
        futures = [runner.submit(note, i) for i in range(3)]
        await runner.wait()  # nothing runs and nothing can start
        assert started == []
        assert runner.pending == 3
        runner.resume()
        await runner.wait(*futures)
    assert started == [0, 1, 2]


async def test_a_paused_runner_ends_and_cancels_what_waits() -> None:
    async with AsyncTaskRunner(1) as runner:
        runner.pause()
        future = runner.submit(double, 1)
    assert future.cancelled()


async def test_a_running_task_can_be_cancelled_without_the_others() -> None:
    seen: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async with AsyncTaskRunner(2) as runner:
        victim, other = runner.submit(forever), runner.submit(double, 2)
        assert await other == 4
        assert victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert victim.cancelled()
        assert await runner.submit(double, 5) == 10
    assert seen == ["cancelled"]


async def test_a_waiting_task_can_be_cancelled_and_never_starts() -> None:
    gate, started = asyncio.Event(), []

    async def note() -> None:
        started.append(1)

    async with AsyncTaskRunner(1) as runner:
        first = runner.submit(gate.wait)
        second = runner.submit(note)
        assert second.cancel()
        gate.set()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
    assert started == []


async def test_an_error_in_the_block_cancels_its_tasks() -> None:
    forever: list[TaskFuture[bool]] = []

    async def block() -> None:
        async with AsyncTaskRunner(2) as runner:
            forever.extend(runner.submit(asyncio.Event().wait) for _ in range(5))
            await asyncio.sleep(0)
            raise KeyError("x")

    with pytest.raises(KeyError):
        await block()
    assert [f.cancelled() for f in forever] == [True] * 5


async def test_a_wait_that_takes_too_long_says_how_many_are_left() -> None:
    async with AsyncTaskRunner(1) as runner:
        future = runner.submit(asyncio.Event().wait)
        with pytest.raises(StallError, match=r"1 tasks are not done after 0\.01 s"):
            await runner.wait(timeout=0.01)
        future.cancel()


async def test_who_stops_waiting_cancels_nothing() -> None:
    gate = asyncio.Event()

    async def held(x: int) -> int:
        await gate.wait()
        return x

    async with AsyncTaskRunner(1) as runner:
        futures = [runner.submit(held, i) for i in range(3)]
        with pytest.raises(StallError, match="3 tasks"):
            await runner.wait(*futures, timeout=0.01)
        gate.set()
        assert await runner.wait(*futures) == [0, 1, 2]


def leave() -> None:
    sys.exit(3)


def stop() -> None:
    raise StopIteration


def test_a_task_that_exits_ends_itself_only() -> None:
    with AsyncTaskRunner(1) as runner:
        bad, good = runner.submit(leave), runner.submit(double, 2)
        with pytest.raises(SystemExit):
            bad.result(10)
        assert good.result(10) == 4
        assert runner.submit(double, 3).result(10) == 6


def test_a_stop_iteration_reaches_the_caller_as_a_runtime_error() -> None:
    with AsyncTaskRunner(1) as runner:
        bad, good = runner.submit(stop), runner.submit(double, 2)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            bad.result(10)
        assert good.result(10) == 4


def test_a_task_cannot_close_its_own_runner() -> None:
    with AsyncTaskRunner(1) as runner:
        with pytest.raises(RuntimeError, match="cannot close the runner that runs it"):
            runner.submit(runner.close).result(10)
        assert runner.submit(double, 2).result(10) == 4


async def test_a_closed_runner_refuses_tasks() -> None:
    runner = AsyncTaskRunner(1)
    await runner.aclose()
    with pytest.raises(WorkerError, match="closed"):
        runner.submit(double, 1)


async def test_a_full_queue_refuses_tasks() -> None:
    async with AsyncTaskRunner(1, max_queue=2) as runner:
        runner.pause()
        runner.submit(double, 1)
        runner.submit(double, 2)
        with pytest.raises(WorkerError, match="2 tasks wait already"):
            runner.submit(double, 3)
        runner.resume()


async def test_a_decorated_function_submits_itself() -> None:
    async with AsyncTaskRunner(2) as runner:

        @runner.task
        async def triple(x: int) -> int:
            """Three times."""
            return 3 * x

        assert triple.__doc__ == "Three times."
        assert await triple(2) == 6
        assert await runner.submit(triple, 3) == 9


async def test_a_task_sees_the_context_of_its_submission_and_not_that_of_another_task() -> None:
    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def say(name: str | None) -> str:
        seen = who.get()
        if name is not None:
            who.set(name)
        await asyncio.sleep(0)
        return seen

    async with AsyncTaskRunner(1) as runner:
        futures = [runner.submit(say, "one"), runner.submit(say, "two")]
        who.set("submitter")
        futures.append(runner.submit(say, None))
        assert await runner.wait(*futures) == ["nobody", "nobody", "submitter"]


async def test_a_synchronous_function_runs_in_a_thread() -> None:
    async with AsyncTaskRunner(2) as runner:
        assert await runner.submit(threading.get_ident) != threading.get_ident()


async def test_without_a_block_tasks_run_beside_the_event_loop_and_can_be_gathered() -> None:
    runner = AsyncTaskRunner(max_concurrency=4)
    futures = [runner.submit(double, i) for i in range(10)]
    assert await asyncio.gather(*futures) == [2 * i for i in range(10)]
    await runner.aclose()


def test_synchronous_code_gets_results_and_leaves_no_thread() -> None:
    with AsyncTaskRunner(max_concurrency=2) as runner:
        for burst in range(3):  # each burst has an event loop of its own
            futures = [runner.submit(double, i + burst) for i in range(5)]
            assert [f.result(10) for f in futures] == [2 * (i + burst) for i in range(5)]
        with pytest.raises(ValueError, match="no 1"):
            runner.submit(fail, 1).result(10)
    assert not [t for t in threading.enumerate() if t.name == "AsyncTaskRunner"]


def test_close_cancels_what_runs_in_the_thread() -> None:
    started = threading.Event()

    async def forever() -> None:
        started.set()
        await asyncio.Event().wait()

    with AsyncTaskRunner(1) as runner:
        running, waiting = runner.submit(forever), runner.submit(forever)
        assert started.wait(10)
    assert running.cancelled()
    assert waiting.cancelled()


def test_result_in_time_or_a_stall_that_names_the_task() -> None:
    gate = threading.Event()
    with AsyncTaskRunner(1) as runner:
        future = runner.submit(gate.wait)
        with pytest.raises(StallError, match=r"wait is not done after 0\.01 s"):
            future.result(0.01)
        gate.set()
        assert future.result(10) is True


async def test_result_on_the_loop_of_the_tasks_is_refused() -> None:
    async with AsyncTaskRunner(1) as runner:
        future = runner.submit(double, 1)
        with pytest.raises(RuntimeError, match="await it"):
            future.result()
        assert await future == 2
        assert future.result() == 2


@pytest.mark.parametrize("kwargs", [{"max_concurrency": 0}, {"max_concurrency": 1, "max_queue": 0}])
def test_limits_below_one_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        AsyncTaskRunner(**kwargs)


async def test_ten_thousand_tasks_leave_nothing_behind() -> None:
    async with AsyncTaskRunner(8) as runner:
        futures = [runner.submit(double, i) for i in range(10_000)]
        await runner.wait()
        assert runner.pending == 0
    assert sum(f.result() for f in futures) == 10_000 * 9_999
