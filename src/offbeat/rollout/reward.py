"""The reward of one completion: a user's function, called in processes that can be killed.

Owns what a failure means: ``Invalid`` with its reason, never a number; and keeps the first real
error, so that a run that stops because of failures can show it. Knows nothing of prompts or groups:
arguments pass through as given.

Consumes the workflow's call; produces ``Scored`` or ``Invalid``; waits and is unblocked as
reward_pool.py says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from offbeat.errors import WorkerError
from offbeat.rollout.reward_pool import RewardCounters, RewardFailure, RewardPool, RewardSource
from offbeat.types import Invalid, Reward, Scored


async def _lifetime(pool: RewardPool) -> AsyncGenerator[None, None]:
    """Ends with its event loop: ``asyncio.run`` closes open generators, and this one the pool."""
    try:
        yield
    finally:
        await pool.aclose()


class _Lease:
    """A pool and the event loop that it belongs to."""

    def __init__(self, pool: RewardPool):
        self.pool = pool
        self.loop = asyncio.get_running_loop()
        self.lifetime = _lifetime(pool)


class AsyncRewardWrapper:
    """Makes a reward function, synchronous or not, awaitable, killable and honest about failures.

    The function may return a finite number (int, float, bool, numpy scalar) or ``{"reward": number,
    **parts}``; then the outcome is ``Scored``. Anything else (None, NaN, infinity, text, ...), an
    exception, a passed deadline or the death of the process is ``Invalid`` with the reason. The
    function runs in a process of its own: it sees copies of its arguments, and what it changes in
    globals stays there.

    Processes start with the first call and end with ``aclose``, the event loop, or this process,
    whichever is first.

    Args:
        reward_fn: the function, or "module:attr". Lambdas and closures work if what they hold can
            be pickled.
        timeout_seconds: deadline of one call, from its start in a process, > 0.
        workers: processes; a synchronous function runs on as many completions at a time, an
            asynchronous one on up to 64 per process.
        search_dir: folder looked up first for the module of a "module:attr".
        log_path: file for the processes' prints and errors; None: this process's stderr.
        on_call: called after each call, in its context, however it ended, with its start and end
            (CLOCK_MONOTONIC seconds; waiting for a free process counts).

    Example:
        >>> score = AsyncRewardWrapper(lambda prompt, text, **row: float(row["answer"] in text))
        >>> reward = await score("2+2=", "4", answer="4")   # Scored(value=1.0)
    """

    def __init__(
        self,
        reward_fn: RewardSource | AsyncRewardWrapper,
        *,
        timeout_seconds: float = 15.0,
        workers: int = 2,
        search_dir: str | Path | None = None,
        log_path: str | Path | None = None,
        on_call: Callable[[float, float], None] | None = None,
    ):
        inner = reward_fn.__reward_fn__ if isinstance(reward_fn, AsyncRewardWrapper) else reward_fn
        self.__reward_fn__: RewardSource = inner
        self._timeout_seconds = timeout_seconds
        self._workers = workers
        self._search_dir = Path(search_dir) if search_dir is not None else None
        self._log_path = Path(log_path) if log_path is not None else None
        self._on_call = on_call
        self._counters = RewardCounters()
        self._first_error: RewardFailure | None = None
        self._lease: _Lease | None = None
        self._closed = False

    @property
    def first_error(self) -> RewardFailure | None:
        """The first failure of any call, with its traceback text; None while there was none."""
        return self._first_error

    @property
    def counters(self) -> RewardCounters:
        """Calls, time-outs and restarts so far."""
        return self._counters

    async def __call__(self, /, *args: object, **kwargs: object) -> Reward:
        """The reward of one call of the function with these arguments.

        Raises:
            ConfigError: the function cannot be loaded or sent.
            WorkerError: its processes die while they start, or this wrapper is closed.
        """
        pool = await self._pool()
        started = time.monotonic()
        try:
            outcome = await pool.call(*args, **kwargs)
        finally:
            if self._on_call is not None:
                self._on_call(started, time.monotonic())
        if not isinstance(outcome, RewardFailure):
            return Scored(value=outcome.value, parts=outcome.parts)
        if self._first_error is None:
            self._first_error = outcome
        return Invalid(reason=outcome.reason)

    async def start(self) -> None:
        """Load the function now instead of at the first call. Raises as ``__call__`` does."""
        pool = await self._pool()
        await pool.start()

    async def aclose(self) -> None:
        """Kill the processes; calls still open raise WorkerError. Closing twice is fine."""
        self._closed = True
        lease, self._lease = self._lease, None
        if lease is not None and lease.loop is asyncio.get_running_loop():
            await lease.lifetime.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _pool(self) -> RewardPool:
        """The pool of the running event loop; another loop's pool ended with that loop."""
        if self._closed:
            raise WorkerError("this reward function is closed")
        if self._lease is None or self._lease.loop is not asyncio.get_running_loop():
            pool = RewardPool(
                self.__reward_fn__,
                timeout_seconds=self._timeout_seconds,
                workers=self._workers,
                search_dir=self._search_dir,
                log_path=self._log_path,
                counters=self._counters,
            )
            self._lease = lease = _Lease(pool)
            await anext(lease.lifetime)
            return pool
        return self._lease.pool
