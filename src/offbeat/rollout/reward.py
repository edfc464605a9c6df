"""The reward of an answer: a user's functions, called in processes that can be killed.

Owns the functions of a run and the pools that run them, from their start to their end. How a
function is called is signatures.py, what becomes of a group's answers reward_group.py, what is said
of failures reward_failures.py.

Consumes the workflow's calls; produces ``Scored`` or ``Invalid``; waits and is unblocked as
reward_pool.py says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from offbeat.errors import WorkerError
from offbeat.rollout.reward_failures import FailureLog
from offbeat.rollout.reward_group import GroupRewards, Judge, summed, together
from offbeat.rollout.reward_pool import (
    RewardCounters,
    RewardFailure,
    RewardPool,
    RewardWatch,
    Unwatched,
)
from offbeat.rollout.reward_source import RewardPart, RewardSource, load_order
from offbeat.rollout.signatures import RewardInput
from offbeat.types import Reward

STANDARD_ARGUMENTS = 4
"""Prompt and completion, as text and as token ids: by position, the columns by name."""


async def _lifetime(pools: Sequence[RewardPool]) -> AsyncGenerator[None, None]:
    """Ends with its event loop: ``asyncio.run`` closes open generators, and this one the pools."""
    try:
        yield
    finally:
        await together([pool.aclose() for pool in pools])


class _Lease:
    """The pools of one event loop."""

    def __init__(self, judges: Sequence[Judge]):
        self.judges = judges
        self.loop = asyncio.get_running_loop()
        self.lifetime = _lifetime([judge.pool for judge in judges])


def _parts_of(reward_fn: RewardSource | Sequence[RewardPart]) -> tuple[RewardPart, ...]:
    if isinstance(reward_fn, str) or callable(reward_fn):
        return (RewardPart(source=reward_fn),)
    return tuple(reward_fn)


class AsyncRewardWrapper:
    """Makes reward functions, synchronous or not, awaitable, killable and honest about failures.

    A call with four positional arguments (prompt, completion, prompt ids, completion ids) and the
    row's columns by name reaches the function in the form that signatures.py recognizes; with any
    other arguments it is called as it is.

    The function may return a finite number (int, float, bool, numpy scalar) or ``{"reward": number,
    **parts}``; then the outcome is ``Scored``. Anything else (None, NaN, infinity, text, ...), an
    exception, a passed deadline or the death of the process is ``Invalid`` with the reason. The
    function runs in a process of its own: it sees copies of its arguments, and what it changes in
    globals stays there. Several functions are called at the same time; the reward is their sum by
    weight, and one failure makes it ``Invalid``.

    Processes start with the first call and end with ``aclose``, the event loop, or this process,
    whichever is first.

    Args:
        reward_fn: the function, "module:attr" or a URL (reward_http.py), or several of them as
            ``RewardPart``. Lambdas and closures work if what they hold can be pickled.
        timeout_seconds: deadline of one call, from its start in a process, > 0.
        workers: processes for each function; a synchronous one runs on as many completions at a
            time, an asynchronous one on many per process.
        search_dir: folder looked up first for the module of a "module:attr".
        log_path: file for the processes' prints and errors; None: this process's stderr.
        on_call: called after each call (of all functions that get one), in its context, however it
            ended, with its start and end (CLOCK_MONOTONIC seconds; waiting for a free process
            counts).

    Example:
        >>> score = AsyncRewardWrapper(lambda completion, answer: float(answer in completion))
        >>> reward = await score("2+2=", "4", [2, 4], [5], answer="4")   # Scored(value=1.0)
    """

    def __init__(
        self,
        reward_fn: RewardSource | Sequence[RewardPart] | AsyncRewardWrapper,
        *,
        timeout_seconds: float = 15.0,
        workers: int = 2,
        search_dir: str | Path | None = None,
        log_path: str | Path | None = None,
        on_call: Callable[[float, float], None] | None = None,
    ):
        inner = reward_fn.__reward_fn__ if isinstance(reward_fn, AsyncRewardWrapper) else reward_fn
        self.__reward_fn__: RewardSource | Sequence[RewardPart] = inner
        self._parts = _parts_of(inner)
        self._timeout_seconds = timeout_seconds
        self._workers = workers
        self._search_dir = Path(search_dir) if search_dir is not None else None
        self._log_path = Path(log_path) if log_path is not None else None
        self._on_call = on_call
        self._counters = RewardCounters()
        self._failures = FailureLog()
        self._watch: RewardWatch = Unwatched()
        self._lease: _Lease | None = None
        self._closed = False

    @property
    def first_error(self) -> RewardFailure | None:
        """The first failure of any call, with its traceback text; None while there was none."""
        return self._failures.first

    @property
    def counters(self) -> RewardCounters:
        """Calls, time-outs and restarts so far."""
        return self._counters

    async def __call__(self, /, *args: object, **kwargs: object) -> Reward:
        """The reward of one call with these arguments.

        Raises:
            ConfigError: a function cannot be loaded or sent, or has none of the known signatures.
            WorkerError: its processes die while they start, or this wrapper is closed.
        """
        if len(args) == STANDARD_ARGUMENTS:
            prompt, completion, prompt_ids, completion_ids = args
            return await self.score(
                RewardInput(
                    prompt=cast("str", prompt),
                    completion=cast("str", completion),
                    prompt_ids=cast("Sequence[int]", prompt_ids),
                    completion_ids=cast("Sequence[int]", completion_ids),
                    columns=kwargs,
                )
            )
        judges = await self._judges()
        started = time.monotonic()
        try:
            outcomes = await together([judge.call(args, kwargs) for judge in judges])
        finally:
            if self._on_call is not None:
                self._on_call(started, time.monotonic())
        return summed(self._parts, outcomes)

    async def score(self, answer: RewardInput) -> Reward:
        """The reward of one answer. Raises as a call does."""
        group = await self.group()
        await group.add(0, answer)
        return (await group.rewards())[0]

    async def group(self) -> GroupRewards:
        """Where the answers of one group are scored, each as it comes. Raises as a call does."""
        return GroupRewards(await self._judges(), self._on_call)

    def tell(self, watch: RewardWatch) -> None:
        """Have ``watch`` hear of processes and calls that are lost, of functions started after."""
        self._watch = watch

    async def start(self) -> None:
        """Load the functions now instead of at the first call. Raises as ``__call__`` does."""
        await together([judge.pool.start() for judge in await self._judges()])

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

    async def _judges(self) -> Sequence[Judge]:
        """The pools of the running event loop; another loop's pools ended with that loop."""
        if self._closed:
            raise WorkerError("this reward function is closed")
        if self._lease is None or self._lease.loop is not asyncio.get_running_loop():
            self._lease = lease = _Lease([self._judge(part) for part in self._parts])
            await anext(lease.lifetime)
            return lease.judges
        return self._lease.judges

    def _judge(self, part: RewardPart) -> Judge:
        pool = RewardPool(
            load_order(part.source, self._search_dir, part.args, part.key),
            timeout_seconds=self._timeout_seconds,
            workers=self._workers,
            log_path=self._log_path,
            counters=self._counters,
            watch=self._watch,
        )
        return Judge(part=part, pool=pool, failures=self._failures)
