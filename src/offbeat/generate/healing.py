"""A generator whose process is replaced when it dies or stops answering.

Owns one replica's succession of processes: it notices the end of one, starts the next, brings it to
the live weights before its first token, and sends the unfinished requests again. A request's tokens
depend on its random stream and the weights only, so an answer that is written twice under the same
weights is the same answer. Knows neither groups nor batches.

A process that lives and does not answer a call, or not the same request in its time, is replaced as
well. What its successor does not answer either ends the run: that is slow, and not lost.

Waits: ``supervise`` for the death of the process (seen at once) and for its heartbeat; requests for
the next process, which comes or ends the run. ``gate`` keeps the trainer from overwriting the
weights while a new process reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from offbeat.errors import WorkerError, true_cause
from offbeat.generate.client import UNANSWERED, EngineInfo, RemoteGenerator
from offbeat.launch.alive import until_silent
from offbeat.launch.protocols import LOG_END, Scheduler, WorkerHandle, WorkerSpec
from offbeat.types import (
    OUTSIDE_GROUP,
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    Progress,
    WeightUpdate,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

KILL_GRACE_SECONDS = 0.0
"""A process that is given up gets no time for its own cleanup: it has nothing to save."""

DEATH_NOTICE_SECONDS = 2.0
"""After a failed call, how long to look for the death that explains it."""


class HealingGenerator:
    """``Generator`` over a succession of processes. Use as an async context manager.

    ``supervise`` must run as long as the generator is used; it raises when the run cannot go on.

    Args:
        worker: the first process.
        spec: what the next ones are started from.
        gate: held by whoever publishes weights, from publication to commit.
        request_timeout: seconds one completion may take, waiting included.
        heartbeat_seconds: how often the process must answer; one that does not for as long again
            is killed and replaced.
        max_restarts: processes that may be lost before the run ends.
        on_restart: called with the generator's name and why its process was lost.
        on_lost_reply: called with its name and why, for each reply that came the second time only.
    """

    def __init__(
        self,
        worker: WorkerHandle,
        spec: WorkerSpec,
        scheduler: Scheduler,
        *,
        gate: asyncio.Lock,
        request_timeout: float,
        heartbeat_seconds: float,
        max_restarts: int,
        on_restart: Callable[[str, str], None] = lambda name, why: None,
        on_lost_reply: Callable[[str, str], None] = lambda name, why: None,
    ) -> None:
        self.name = spec.name
        self.worker = worker
        """The process of the moment."""
        self._spec = spec
        self._scheduler = scheduler
        self._gate = gate
        self._request_timeout = request_timeout
        self._heartbeat = heartbeat_seconds
        self._max_restarts = max_restarts
        self._on_restart = on_restart
        self._on_lost_reply = on_lost_reply
        self.restarts = 0
        self._live: WeightUpdate | None = None
        self._staged: WeightUpdate | None = None
        self._said: GeneratorStats | None = None
        self._lost = asyncio.Event()
        self._why = ""
        self._ready = asyncio.Event()
        self._process = AsyncExitStack()
        self._generator: RemoteGenerator | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        self._ready.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ready.clear()
        await self._process.aclose()

    # Succession

    async def supervise(self) -> NoReturn:
        """Replace the process whenever it is lost.

        Raises:
            WorkerError: it was lost more than ``max_restarts`` times; names the last reason.
            WeightSyncError: the next process could not be brought to the live weights.
        """
        while True:
            why = await self._until_lost()
            while why:
                self._ready.clear()
                self._count_loss(why)
                why = await self._replace()

    def _count_loss(self, why: str) -> None:
        if self.restarts >= self._max_restarts:
            raise WorkerError(
                f"{why}\n{self.name} was restarted {self.restarts} times already "
                "(generator.max_restarts)"
            )
        self.restarts += 1
        how, end, log_lines = why.partition(LOG_END)
        counted = f"({self.restarts} of {self._max_restarts})"
        log.warning("%s; restarting it %s%s", how, counted, end + log_lines)
        self._on_restart(self.name, why)

    async def _replace(self) -> str:
        """End the process and start the next; why that was lost as well, or an empty string."""
        await self.worker.close(KILL_GRACE_SECONDS)
        await self._process.aclose()
        try:
            self.worker = await self._scheduler.start(self._spec)
            await self._open()
            async with self._gate:
                await self._catch_up()
                self._ready.set()
        except WorkerError as exc:
            return str(exc)
        return ""

    async def _open(self) -> None:
        self._lost.clear()
        self._process = AsyncExitStack()
        self._generator = await self._process.enter_async_context(
            RemoteGenerator(
                self.worker,
                request_timeout=self._request_timeout,
                on_lost_reply=partial(self._on_lost_reply, self.name),
            )
        )

    async def _catch_up(self) -> None:
        """Load what is live; a new process has the weights of the model folder."""
        assert self._generator is not None
        if self._live is not None:
            await self._generator.stage(self._live)
            await self._generator.commit(self._live.version)

    async def _until_lost(self) -> str:
        """Why the process of the moment is no good any more.

        Raises:
            OffbeatError: no call can be made of it, for a reason that is not its own.
        """
        assert self._generator is not None
        async with asyncio.TaskGroup() as watching:
            ends = [
                watching.create_task(watch)
                for watch in (
                    self.worker.wait(),
                    self._generator.until_broken(),
                    until_silent(self.worker, self._heartbeat),
                    self._until_told(),
                )
            ]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in ends:
                task.cancel()
        return next(iter(done)).result()

    async def _until_told(self) -> str:
        await self._lost.wait()
        return self._why

    async def _attempt(
        self, call: Callable[[RemoteGenerator], Awaitable[T]], *, may_replace: bool = True
    ) -> T:
        """Make a call of the process of the moment, and again of the next one should it be lost.

        One process is given up for it, in case it does not answer for another reason; none with
        ``may_replace`` false.
        """
        gave_up = not may_replace
        while True:
            await self._ready.wait()
            generator = self._generator
            assert generator is not None
            try:
                return await call(generator)
            except WorkerError as exc:
                if not await self._is_lost(generator):
                    if gave_up or not isinstance(exc, UNANSWERED):
                        raise
                    gave_up = True
                    self._give_up(generator, str(exc))
            while self._generator is generator:
                self._ready.clear()
                await self._ready.wait()

    async def _is_lost(self, generator: RemoteGenerator) -> bool:
        """Whether the process behind a failed call has ended; the call may fail a moment before."""
        if self._generator is not generator or not self._ready.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_SECONDS):
                await self.worker.wait()
                return True
        return False

    def _give_up(self, generator: RemoteGenerator, why: str) -> None:
        """Have the process behind ``generator`` replaced, which lives and does not answer."""
        if self._generator is generator:
            self._why = why
            self._lost.set()

    # Generator

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ``Generator``; outlives the process that began it."""
        return await self._attempt(lambda g: g.generate(request), may_replace=_of_run(request))

    async def stream(
        self, request: GenerateRequest, wrote: Callable[[Progress], None]
    ) -> Completion:
        """See ``Generator``; outlives the process that began it."""
        return await self._attempt(lambda g: g.stream(request, wrote), may_replace=_of_run(request))

    async def stage(self, update: WeightUpdate) -> None:
        """See ``Generator``; a process that is not there yet gets the weights when it is."""
        self._staged = update
        await self._if_there(lambda g: g.stage(update), None)

    async def commit(self, version: PolicyVersion) -> float:
        """See ``Generator``; returns 0.0 when there was no process that could stand still."""
        assert self._staged is not None
        pause = await self._if_there(lambda g: g.commit(version), 0.0)
        self._live = self._staged
        return pause

    async def _if_there(self, call: Callable[[RemoteGenerator], Awaitable[T]], otherwise: T) -> T:
        """A call that the next process does not need; one that is too late for it is replaced."""
        generator = self._generator
        if generator is None or not self._ready.is_set():
            return otherwise
        try:
            return await call(generator)
        except WorkerError as exc:
            if not await self._is_lost(generator):
                if not isinstance(exc, UNANSWERED):
                    raise
                self._give_up(generator, str(exc))
        self._ready.clear()
        return otherwise

    async def pause(self) -> None:
        await self._attempt(lambda g: g.pause())

    async def resume(self) -> None:
        await self._attempt(lambda g: g.resume())

    async def abort(self, request_ids: Sequence[str]) -> int:
        return await self._attempt(lambda g: g.abort(request_ids))

    async def stats(self) -> GeneratorStats:
        """See ``Generator``; while the process is being replaced, what it said last, without spans.

        So nobody who only counts waits for a successor.
        """
        said: GeneratorStats | None = await self._if_there(lambda g: g.stats(), None)
        if said is not None:
            self._said = replace(said, decode_spans=(), prefill_spans=())
            return said
        if self._said is not None:
            return self._said
        return await self._attempt(lambda g: g.stats())

    async def info(self) -> EngineInfo:
        """What the engine of the first process found out about itself."""
        return await self._attempt(lambda g: g.info())


def _of_run(request: GenerateRequest) -> bool:
    """An answer for somebody outside may take longer than the run gives a healthy process."""
    return request.group_id != OUTSIDE_GROUP


@asynccontextmanager
async def while_healing(generators: Sequence[HealingGenerator]) -> AsyncIterator[None]:
    """Supervise ``generators`` during the block, and end it when one cannot be replaced.

    Raises:
        WorkerError, WeightSyncError: as ``HealingGenerator.supervise``.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(g.supervise(), name=g.name) for g in generators]
            yield
            for watch in watches:
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise true_cause(errors) from errors
