"""Workers without processes: the same services, calls and errors inside the controller.

For the debugger and for tests. Owns one task per service, in which its context is entered and left;
arguments and results make the same trip through msgpack as they do between processes, so that a
type that cannot travel fails here too. Threads and environment of a spec belong to processes and
have no meaning here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self, TypeVar, overload

from offbeat.errors import ConnectionLost, OffbeatError, StallError, WorkerError, boundary
from offbeat.launch.calls import Dispatcher, Fault
from offbeat.launch.codec import decode, encode
from offbeat.launch.interrupts import patience
from offbeat.launch.protocols import WorkerSpec
from offbeat.launch.target import open_target

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long a cancelled service may take to end before we say that it cannot be stopped."""


class InlineScheduler:
    """Opens services in this process; leaving the context closes all of them."""

    def __init__(self, *, grace: float = 5.0) -> None:
        self._grace = grace
        self._tasks = asyncio.TaskGroup()
        self._hosts: set[_Host] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            async with asyncio.TaskGroup() as closing:
                for host in self._hosts:
                    closing.create_task(host.stop(self._grace))
        finally:
            # Not told of ``exc``: the services are closed, and the run's error must stay unwrapped.
            await self._tasks.__aexit__(None, None, None)

    async def start(self, spec: WorkerSpec) -> InlineWorker:
        """See ``Scheduler.start``."""
        host = _Host(spec, self._tasks)
        self._hosts.add(host)
        async with AsyncExitStack() as undo:
            undo.callback(self._hosts.discard, host)
            undo.push_async_callback(host.stop, 0.0)
            try:
                async with asyncio.timeout(spec.start_timeout_seconds):
                    dispatcher = await host.opened
            except TimeoutError:
                seconds = f"{spec.start_timeout_seconds:g} s"
                raise StallError(f"{spec.name}: not ready after {seconds}") from None
            undo.pop_all()
        return InlineWorker(host, InlineClient(host, dispatcher))


class InlineWorker:
    """A service open in this process; see ``WorkerHandle``."""

    def __init__(self, host: _Host, client: InlineClient) -> None:
        self._host = host
        self.name = host.name
        self.pid = os.getpid()
        self.client = client

    async def wait(self) -> str:
        """Return when the service has ended, by ``close`` or by its own error, and how."""
        await self._host.ended.wait()
        return f"{self.name} {self._host.reason}"

    async def close(self, grace: float = 5.0) -> None:
        """Fail the calls in flight, leave the service's context, cancel it after ``grace`` s."""
        await self._host.stop(grace)


class InlineClient:
    """Calls to one service of this process; see ``WorkerClient``."""

    def __init__(self, host: _Host, dispatcher: Dispatcher) -> None:
        self.name = host.name
        self._host = host
        self._dispatcher = dispatcher

    @overload
    async def call(
        self, method: str, *args: object, returns: type[T], timeout: float | None
    ) -> T: ...

    @overload
    async def call(
        self, method: str, *args: object, returns: None = None, timeout: float | None
    ) -> None: ...

    async def call(
        self, method: str, *args: object, returns: type[T] | None = None, timeout: float | None
    ) -> T | None:
        """See ``WorkerClient.call``."""
        self._host.check_open(method)
        try:
            async with asyncio.timeout(timeout) as deadline:
                with self._host.registered(deadline):
                    data = await self._dispatcher.invoke(method, encode(args))
        except TimeoutError:
            self._host.check_open(method)
            raise StallError(f"{self.name}: no answer to {method} in {timeout:g} s") from None
        except OffbeatError as exc:
            raise Fault.of(exc).exception(self.name) from exc
        try:
            return decode(data, type(None) if returns is None else returns)
        except WorkerError as exc:
            raise WorkerError(f"{self.name}: answer to {method}: {exc}") from exc

    async def health(self, *, timeout: float) -> None:
        """Raise WorkerError once the service has ended; this process is its event loop."""
        self._host.check_open("health")


class _Host:
    """The task in which one service lives, and the deadlines of the calls into it."""

    def __init__(self, spec: WorkerSpec, tasks: asyncio.TaskGroup) -> None:
        self.name = spec.name
        self.opened: asyncio.Future[Dispatcher] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.reason = "was closed"
        self._stopping = asyncio.Event()
        self._calls: set[asyncio.Timeout] = set()
        self._task = tasks.create_task(self._run(spec))
        self._task.add_done_callback(self._finish)

    async def _run(self, spec: WorkerSpec) -> None:
        try:
            with boundary(WorkerError, f"serving {spec.target}"):
                async with open_target(spec.target, spec.payload) as service:
                    self._open(Dispatcher(service, service.METHODS))
                    await self._stopping.wait()
        except OffbeatError as exc:
            self.reason = f"ended: {exc}"
            if self.opened.done():
                logger.exception("%s ended", self.name)
            else:
                self.opened.set_exception(Fault.of(exc).exception(self.name))

    def _open(self, dispatcher: Dispatcher) -> None:
        if not self.opened.done():  # Done already when the caller of start has given up.
            self.opened.set_result(dispatcher)

    def _finish(self, _task: asyncio.Task[None]) -> None:
        self._stopping.set()
        self._expire()
        if not self.opened.done():
            self.opened.set_exception(WorkerError(f"before it was ready, {self.name} was closed"))
        self.ended.set()

    def check_open(self, method: str) -> None:
        """Raise ConnectionLost once the service is closing."""
        if self._stopping.is_set():
            why = f"the worker {self.reason}"
            raise ConnectionLost(f"{self.name}: connection lost in {method}: {why}")

    @contextmanager
    def registered(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """While inside, the end of the service is also the end of ``deadline``."""
        self._calls.add(deadline)
        try:
            yield
        finally:
            self._calls.discard(deadline)

    def _expire(self) -> None:
        for deadline in self._calls:
            if not deadline.expired():
                deadline.reschedule(0.0)

    async def stop(self, grace: float) -> None:
        """Leave the service's context, cancelling it after ``grace`` seconds."""
        self._stopping.set()
        self._expire()
        if not self.opened.done():
            self._task.cancel()
        try:
            async with patience(grace):
                await self.ended.wait()
        except TimeoutError:
            if grace > 0:
                logger.info("%s did not close within %g s: cancelled", self.name, grace)
        finally:
            self._task.cancel()
            await self._cancelled()

    async def _cancelled(self) -> None:
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.ended.wait()
        except TimeoutError:
            raise WorkerError(f"{self.name} does not end when cancelled") from None
