"""A block of work that ends when a worker it depends on ends.

Owns the watch over the workers of one block and whose death explains an error; knows no service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from offbeat.errors import OffbeatError, StallError, WorkerError, true_cause
from offbeat.launch.protocols import WorkerHandle

DEATH_NOTICE_SECONDS = 0.5
"""After a failed call, how long to look for the worker whose death caused it."""


@asynccontextmanager
async def while_alive(
    workers: Sequence[WorkerHandle], *, heartbeat_seconds: float | None = None
) -> AsyncIterator[None]:
    """Cancel the block when a worker ends, also one of which the block asks nothing at the moment.

    With ``heartbeat_seconds`` one that answers nothing for so long is lost as well.

    Raises:
        WorkerError: names each worker that has ended; their deaths explain what the block raised.
        StallError: a worker lives and does not answer.
    """

    async def watch(worker: WorkerHandle) -> None:
        raise WorkerError(await worker.wait())

    async def listen(worker: WorkerHandle, seconds: float) -> None:
        raise StallError(await until_silent(worker, seconds))

    try:
        async with asyncio.TaskGroup() as watching:
            watchers = [watching.create_task(watch(w)) for w in workers]
            if heartbeat_seconds is not None:
                watchers += [watching.create_task(listen(w, heartbeat_seconds)) for w in workers]
            yield
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        cause = true_cause(errors)
        if isinstance(cause, OffbeatError):
            await _blame_the_dead(workers, cause)
        raise cause from errors


async def until_silent(worker: WorkerHandle, seconds: float) -> str:
    """Wait until the worker's event loop has not answered for ``seconds``; asked as often.

    Returns what to say of it. A dead worker is not silent: ``WorkerHandle.wait`` tells more.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await worker.client.health(timeout=seconds)
        except StallError:
            return f"{worker.name} has not answered for {seconds:g} s"
        except WorkerError:
            continue


async def _blame_the_dead(workers: Sequence[WorkerHandle], error: OffbeatError) -> None:
    """Raise WorkerError naming each worker that has ended, if any: that explains ``error``."""

    async def death(worker: WorkerHandle) -> str | None:
        try:
            async with asyncio.timeout(DEATH_NOTICE_SECONDS):
                return await worker.wait()
        except TimeoutError:
            return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(death(w)) for w in workers]
    deaths = [d for t in tasks if (d := t.result()) is not None]
    if deaths:
        raise WorkerError("; ".join(deaths)) from error
