"""Run many small tasks, a few at a time: ``AsyncTaskRunner``.

Owns the queue, the limit and what becomes of each task: its result or its exception goes to whoever
holds its ``TaskFuture``. Knows nothing of rollouts.

Where tasks run::

    async with AsyncTaskRunner(...)   on the event loop of the block, which waits for them
    without a block                   on an event loop in a thread of the runner's own, which starts
                                      with the first task and ends when there is nothing to do

The second is for scripts and for synchronous code. Each burst of work then has an event loop of its
own: an object that belongs to one (an ``aiohttp`` session, say) must be made inside a task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar, cast, overload

from offbeat.errors import StallError, WorkerError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_QUEUE = 1_000_000
"""Tasks that may wait; more are a loop that submits and never looks."""


_RUNNER: ContextVar[AsyncTaskRunner | None] = ContextVar("runner", default=None)
"""Whose task this is."""


class TaskFuture(Generic[T]):
    """The outcome of one submitted task: ``await`` it, or call ``result`` from synchronous code.

    An exception that nobody asks for is logged when the future goes away.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self._inner.running() else "waiting"
        return f"<TaskFuture {self._name}: {'cancelled' if self.cancelled() else state}>"

    def done(self) -> bool:
        """Whether it returned, raised or was cancelled."""
        return self._inner.done()

    def cancelled(self) -> bool:
        """Whether it was cancelled, before or after it started."""
        return self._inner.cancelled() or (
            self._inner.done() and isinstance(self._inner.exception(), asyncio.CancelledError)
        )

    def cancel(self) -> bool:
        """Cancel it; a running task sees ``asyncio.CancelledError``. False when it is done."""
        if self._inner.cancel():
            return True
        task, loop = self._task, self._loop
        if self._inner.done() or task is None or loop is None:
            return False
        try:
            loop.call_soon_threadsafe(task.cancel)
        except RuntimeError:  # the loop has ended since, and the task with it
            return False
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; for code without an event loop.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            RuntimeError: called on the event loop that runs the task, before it is done.
            StallError: not done within ``timeout``; the task goes on.
            Exception: what the task raised; ``asyncio.CancelledError`` when it was cancelled.
        """
        if not self.done() and self._loop is not None and self._loop is _running_loop():
            raise RuntimeError(
                f"result() of task {self._name} would stop the event loop that runs it; await it"
            )
        self._asked = True
        try:
            return self._inner.result(timeout)
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError(f"task {self._name} was cancelled") from None
        except TimeoutError:
            if self.done():
                raise
            raise StallError(f"task {self._name} is not done after {timeout:g} s") from None

    def _failed(self) -> bool:
        """Of a future that is done: whether it raised or was cancelled."""
        return self._inner.cancelled() or self._inner.exception() is not None

    def __await__(self) -> Generator[object, None, T]:
        self._asked = True
        try:
            return (yield from asyncio.wrap_future(self._inner).__await__())
        except asyncio.CancelledError:
            self.cancel()  # whoever waits was cancelled, or the task itself: the same for both
            raise

    def __del__(self) -> None:
        if not self._asked and self.done() and not self.cancelled():
            error = self._inner.exception()
            if error is not None:
                log.error("task %s failed and nobody asked: %r", self._name, error, exc_info=error)


@dataclass(slots=True, kw_only=True)
class _Job:
    """A call that was not started yet."""

    fn: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    future: TaskFuture[object]
    context: Context

    async def call(self) -> object:
        """Coroutine functions run here, others in a thread, so that they stop nobody."""
        if inspect.iscoroutinefunction(self.fn):
            value: object = self.fn(*self.args, **self.kwargs)
        else:
            value = await asyncio.to_thread(self._call_in_thread)
        return await value if inspect.isawaitable(value) else value

    def _call_in_thread(self) -> object:
        try:
            return self.fn(*self.args, **self.kwargs)
        except StopIteration as exc:  # a future cannot hold it: as in a generator (PEP 479)
            raise RuntimeError(f"task {self.future._name} raised StopIteration") from exc


class AsyncTaskRunner:
    """A queue of tasks of which ``max_concurrency`` run at the same time, in order of submission.

    Args:
        max_concurrency: tasks that run at the same time, >= 1.
        max_queue: tasks that may wait, >= 1; one more is refused.

    Example:
        >>> async with AsyncTaskRunner(max_concurrency=4) as runner:
        ...     @runner.task
        ...     async def square(x):
        ...         return x * x
        ...     futures = [runner.submit(square, i) for i in range(100)]
        ...     results = await runner.wait(*futures)
    """

    def __init__(self, max_concurrency: int, *, max_queue: int = MAX_QUEUE) -> None:
        for name, value in (("max_concurrency", max_concurrency), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._limit = max_concurrency
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: set[TaskFuture[object]] = set()
        self._paused = False
        self._closed = False
        self._group: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._hosting = False
        self._idle_waiters: list[concurrent.futures.Future[None]] = []

    # Submitting

    @overload
    def submit(
        self, fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> TaskFuture[T]: ...

    @overload
    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> TaskFuture[T]: ...

    def submit(
        self, fn: Callable[P, Awaitable[T] | T], *args: P.args, **kwargs: P.kwargs
    ) -> TaskFuture[T]:
        """Put ``fn(*args, **kwargs)`` into the queue; from any thread.

        ``fn`` is a coroutine function, a function (which then runs in a thread), or what ``task``
        made of either. It sees the context variables of this moment.

        Raises:
            WorkerError: the runner is closed, or ``max_queue`` tasks wait already.
        """
        call = fn.__wrapped__ if isinstance(fn, RunnerTask) else fn
        future: TaskFuture[T] = TaskFuture(getattr(call, "__qualname__", repr(call)))
        job = _Job(
            fn=call,
            args=args,
            kwargs=kwargs,
            future=cast("TaskFuture[object]", future),
            context=copy_context(),
        )
        with self._lock:
            self._refuse_when_closed()
            if len(self._waiting) >= self._max_queue:
                raise WorkerError(
                    f"{len(self._waiting)} tasks wait already (max_queue); await some first"
                )
            self._waiting.append(job)
        self._advance()
        return future

    def task(self, fn: Callable[P, Awaitable[T]] | Callable[P, T]) -> RunnerTask[P, T]:
        """Decorator: calling the function submits it, and ``submit`` takes it as well."""
        return RunnerTask(self, fn)

    @property
    def pending(self) -> int:
        """Tasks that wait or run."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    def pause(self) -> None:
        """Start no further task; those that run go on."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Undo ``pause``."""
        with self._lock:
            self._paused = False
        self._advance()

    async def wait(self, *futures: TaskFuture[T], timeout: float | None = None) -> list[T]:
        """The results of ``futures`` in their order; without any, wait until nothing is pending.

        Raises:
            StallError: not done within ``timeout`` seconds; the tasks go on.
            Exception: the first that one of ``futures`` raised.
        """
        try:
            async with asyncio.timeout(timeout):
                if futures:
                    await _until_all_or_one_failed(futures)
                    failed = [f for f in futures if f.done() and f._failed()]
                    return [f.result(0) for f in failed or futures]
                await self._until_idle()
                return []
        except TimeoutError:
            left = [f for f in futures if not f.done()]
            raise StallError(
                f"{len(left) or self.pending} tasks are not done after {timeout} s"
            ) from None

    # Ending

    async def aclose(self) -> None:
        """Cancel what waits and what runs, and wait until it has ended. Twice is fine."""
        self._refuse_from_inside()
        self._cancel_all()
        await self._until_idle()

    def close(self) -> None:
        """``aclose`` for synchronous code."""
        self._refuse_from_inside()
        self._cancel_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    async def __aenter__(self) -> Self:
        with self._lock:
            self._refuse_when_closed()
            if self._group is not None or self._waiting:
                raise WorkerError(
                    "this runner has tasks already; enter the block before submitting"
                )
            self._loop = asyncio.get_running_loop()
            self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        group = self._group
        assert group is not None
        try:
            if exc is None and not self._paused:
                await self._until_idle()
        finally:
            self._cancel_all()
            await group.__aexit__(None, None, None)  # an error of the block goes on as it is
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # Running

    def _advance(self) -> None:
        """Let the event loop of the tasks look at the queue; start one when there is none."""
        with self._lock:
            if self._group is None and not self._hosting and self._startable():
                self._hosting = True
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._serve()), name="AsyncTaskRunner"
                )
                self._thread.start()
            loop = self._loop
        if loop is None:
            return  # nothing to start, or the new thread looks by itself
        if loop is _running_loop():
            self._start_tasks()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended since, with an empty queue
                loop.call_soon_threadsafe(self._start_tasks)

    def _startable(self) -> bool:
        return bool(self._waiting) and not self._paused and len(self._running) < self._limit

    def _start_tasks(self) -> None:
        while True:
            with self._lock:
                group, loop = self._group, self._loop
                if group is None or not self._startable():
                    break
                job = self._waiting.popleft()
                if not job.future._inner.set_running_or_notify_cancel():
                    continue
                self._running.add(job.future)
                job.future._loop = loop
                job.future._task = group.create_task(
                    self._run(job), name=job.future._name, context=job.context
                )
        self._tell_idle()

    async def _run(self, job: _Job) -> None:
        """One task to its end; what it raises belongs to its future, not to the others."""
        inner = job.future._inner
        _RUNNER.set(self)
        try:
            inner.set_result(await job.call())
        except asyncio.CancelledError as exc:
            inner.set_exception(exc)
            raise
        except BaseException as exc:  # SystemExit as well: it must not end the other tasks
            inner.set_exception(exc)
        finally:
            with self._lock:
                self._running.discard(job.future)
            self._start_tasks()

    async def _serve(self) -> None:
        """The life of the runner's own thread: until nothing runs and nothing can be started."""
        async with asyncio.TaskGroup() as group:
            with self._lock:
                self._group, self._loop = group, asyncio.get_running_loop()
            self._start_tasks()
            while not self._leave():
                await self._until_idle()

    def _leave(self) -> bool:
        with self._lock:
            if not self._is_idle():
                return False
            self._group = self._loop = None
            self._hosting = False
            return True

    def _is_idle(self) -> bool:
        return not self._running and not self._startable()

    async def _until_idle(self) -> None:
        with self._lock:
            if self._is_idle():
                return
            waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._idle_waiters.append(waiter)
        await asyncio.wrap_future(waiter)

    def _tell_idle(self) -> None:
        with self._lock:
            if not self._is_idle():
                return
            waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _cancel_all(self) -> None:
        with self._lock:
            self._closed = True
            futures = [*(job.future for job in self._waiting), *self._running]
            self._waiting.clear()
        for future in futures:
            future.cancel()
        self._tell_idle()

    def _refuse_from_inside(self) -> None:
        if _RUNNER.get() is self:
            raise RuntimeError(
                "a task cannot close the runner that runs it; cancel futures instead"
            )

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise WorkerError("this AsyncTaskRunner is closed")


class RunnerTask(Generic[P, T]):
    """A function that belongs to a runner: a call submits it and returns its ``TaskFuture``."""

    def __init__(
        self, runner: AsyncTaskRunner, fn: Callable[P, Awaitable[T]] | Callable[P, T]
    ) -> None:
        self._runner = runner
        self.__wrapped__ = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> TaskFuture[T]:
        return self._runner.submit(self.__wrapped__, *args, **kwargs)


async def _until_all_or_one_failed(futures: Sequence[TaskFuture[T]]) -> None:
    """Wait without owning: whoever stops waiting cancels nothing."""
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()
    left = len(futures)

    def ended(future: TaskFuture[T]) -> None:
        nonlocal left
        left -= 1
        if not settled.done() and (left == 0 or future._failed()):
            settled.set_result(None)

    def told(future: TaskFuture[T], _: concurrent.futures.Future[T]) -> None:
        with suppress(RuntimeError):  # the loop of who waited is closed: nobody waits
            loop.call_soon_threadsafe(ended, future)

    for future in futures:
        future._asked = True
        future._inner.add_done_callback(functools.partial(told, future))
    await settled


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
