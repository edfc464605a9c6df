"""A block of work ends with the workers that it depends on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from offbeat.errors import StallError, WorkerError
from offbeat.launch.alive import while_alive
from offbeat.launch.local import LocalScheduler, LocalWorker
from offbeat.launch.protocols import WorkerSpec


@pytest.fixture
async def worker(
    tmp_path: Path, make_spec: Callable[..., WorkerSpec]
) -> AsyncIterator[LocalWorker]:
    async with asyncio.timeout(20), LocalScheduler(tmp_path, grace=0.1) as scheduler:
        yield await scheduler.start(make_spec())


async def depend_on(worker: LocalWorker, number: signal.Signals, **options: float) -> None:
    """Signal the worker in a block that asks nothing of it and has no end."""
    async with asyncio.timeout(10), while_alive([worker], **options):
        os.kill(worker.pid, number)
        await asyncio.Event().wait()


@pytest.mark.invariant("I13")
async def test_the_death_of_a_worker_that_is_asked_nothing_ends_the_block(
    worker: LocalWorker,
) -> None:
    with pytest.raises(WorkerError, match=r"^echo-0 \(pid \d+\) was killed by SIGKILL"):
        await depend_on(worker, signal.SIGKILL)


@pytest.mark.invariant("I12")
async def test_a_worker_that_misses_its_heartbeat_ends_the_block(worker: LocalWorker) -> None:
    with pytest.raises(StallError, match=r"^echo-0 has not answered for 0\.3 s"):
        await depend_on(worker, signal.SIGSTOP, heartbeat_seconds=0.3)


@pytest.mark.invariant("I13")
async def test_an_error_that_a_death_explains_is_that_death(worker: LocalWorker) -> None:
    async def fail() -> None:
        async with asyncio.timeout(10), while_alive([worker]):
            os.kill(worker.pid, signal.SIGKILL)
            raise StallError("no answer")

    with pytest.raises(WorkerError, match=r"^echo-0 \(pid \d+\) was killed by SIGKILL"):
        await fail()
