"""Reward processes that are killed on time: who calls where, until when, and what comes after.

Owns the places (one process each, started when a job first needs it and again after its death), the
queue of free places and the deadlines; knows nothing of prompts or rewards. A synchronous job holds
a whole place; up to ``JOBS_PER_PROCESS`` asynchronous ones share one. A deadline starts when its
job starts, never while it is queued or its process starts. At the deadline a synchronous job's
whole process group is killed; an asynchronous job is canceled, and its process killed only if it
does not acknowledge within ``GRACE_SECONDS``. Jobs that a process takes down without being the one
that ran are issued once more elsewhere.

Consumes calls; produces one outcome per call; waits for a free place, then for the job; unblocked
by a reply, a deadline, a death or ``aclose``. The pool has no task of its own: a place restarts in
the call that needs it, so canceling a call never waits for a restart and there is nothing to
supervise.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import cloudpickle

from offbeat.errors import ConfigError, OffbeatError, RewardError, WorkerError, boundary
from offbeat.rollout.reward_process import GRACE_SECONDS, Ending, Lost, RewardProcess
from offbeat.rollout.reward_wire import Answer, Answers, Canceled, Failed, Load, Loaded
from offbeat.rollout.signatures import Arguments, Request, RewardInput

JOBS_PER_PROCESS = 512
"""Asynchronous jobs that share one process: waiting ones cost little, and all answers of all groups
that may be open should be able to wait at the same time."""

MAX_FAILED_STARTS = 3
"""Processes in a row that may die before their function is loaded."""

START_SECONDS = 60.0
"""How long a process may take to start and to import the user's module."""

CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Why a call has no reward: error class, one line, and the traceback if it raised."""

    error: str
    reason: str
    traceback: str = ""


@dataclass(slots=True, kw_only=True)
class RewardCounters:
    """Totals: jobs started, jobs ended by their deadline, processes started in place of another."""

    calls: int = 0
    timeouts: int = 0
    restarts: int = 0


class RewardWatch(Protocol):
    """Hears what a run has to remember of its reward processes."""

    def reward_worker_replaced(self, why: str) -> None:
        """A process was started in place of another, which ended because of ``why``."""

    def reward_lost(self, why: str) -> None:
        """A call has no reward because of the clock or of a dead process: next time it may."""


class Unwatched:
    """A `RewardWatch` of who remembers nothing."""

    def reward_worker_replaced(self, why: str) -> None: ...

    def reward_lost(self, why: str) -> None: ...


class _Place:
    """Room for one process: empty, or holding one that may be dead by now."""

    def __init__(self) -> None:
        self.starting = asyncio.Lock()
        self.process: RewardProcess | None = None
        self.shared = False

    @property
    def running(self) -> RewardProcess | None:
        return self.process if self.process is not None and self.process.alive else None


def _failure(failed: Failed) -> RewardFailure:
    return RewardFailure(error=failed.error, reason=failed.reason, traceback=failed.traceback)


class RewardPool:
    """Calls one function in killable processes; see the module's docstring for the rules.

    Args:
        load: how a process gets the function, synchronous or asynchronous (``load_order``).
        timeout_seconds: deadline of one call, from its start, > 0.
        workers: processes at most, >= 1.
        log_path: file to which the processes' prints and errors are appended; None: this process's
            stderr.
        start_seconds: how long a process may take to import the function.
        counters: totals to go on counting in.
        watch: told of processes and calls that are lost.

    Raises:
        ConfigError: an argument out of range.
    """

    def __init__(
        self,
        load: Load,
        *,
        timeout_seconds: float,
        workers: int = 2,
        log_path: Path | None = None,
        start_seconds: float = START_SECONDS,
        counters: RewardCounters | None = None,
        watch: RewardWatch | None = None,
    ):
        if not timeout_seconds > 0:
            raise ConfigError(f"rollout.reward_timeout_seconds: {timeout_seconds} must be > 0")
        if workers < 1:
            raise ConfigError(f"reward workers: {workers} must be at least 1")
        self.counters = counters if counters is not None else RewardCounters()
        self._watch = watch if watch is not None else Unwatched()
        self._load = load
        self._loaded: Loaded | None = None
        self._timeout_seconds = timeout_seconds
        self._start_seconds = start_seconds
        self._log_path = log_path
        self._places = [_Place() for _ in range(workers)]
        self._free: asyncio.Queue[_Place] = asyncio.Queue()
        for place in self._places:
            self._free.put_nowait(place)
        self._unreaped: set[RewardProcess] = set()
        self._jobs = itertools.count(1)
        self._failed_starts = 0
        self._broken: OffbeatError | None = None
        self._closed = False

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

    async def start(self) -> None:
        """Start the first process: a function that cannot be loaded fails now."""
        await self._ready(self._places[0])

    async def is_batched(self) -> bool:
        """Whether one call takes all answers of a group. Raises as ``call`` does."""
        return (await self._ready_once()).batched

    async def call(self, *args: object, **kwargs: object) -> Answer | RewardFailure:
        """Call the function once in a process; what goes wrong is a ``RewardFailure``.

        Raises:
            ConfigError: the function cannot be loaded.
            WorkerError: processes die at their start, or the pool is closed.
        """
        outcome = await self._issue(Arguments(args=args, kwargs=kwargs))
        assert not isinstance(outcome, Answers), outcome
        return outcome

    async def score(self, answers: Sequence[RewardInput]) -> list[Answer | RewardFailure]:
        """One outcome for each answer, by one call: one answer, or more for a batched function.

        Raises:
            ConfigError: the function cannot be loaded, or has none of the known signatures.
            WorkerError: as ``call``.
        """
        complaint = (await self._ready_once()).complaint
        if complaint:
            raise ConfigError(f"{self._load.key}: {complaint}")
        outcome = await self._issue(tuple(answers))
        if isinstance(outcome, Answers):
            return [each if isinstance(each, Answer) else _failure(each) for each in outcome.each]
        return [outcome] * len(answers)

    async def _ready_once(self) -> Loaded:
        """What the first process said of the function."""
        if self._loaded is None:
            await self.start()
        assert self._loaded is not None
        return self._loaded

    async def _issue(self, request: Request) -> Answer | Answers | RewardFailure:
        try:
            with boundary(RewardError, "the arguments cannot be sent to the reward process"):
                pickled = cloudpickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        except RewardError as exc:
            return RewardFailure(error="RewardError", reason=str(exc))
        outcome = await self._attempt(pickled)
        if isinstance(outcome, Lost):
            outcome = await self._attempt(pickled)
        if isinstance(outcome, Lost):
            why = f"lost twice with processes that ended because of other jobs: {outcome.reason}"
            return self._lost("WorkerError", why)
        return outcome

    async def aclose(self) -> None:
        """Kill every process and wait until it is reaped; calls still open raise WorkerError."""
        self._closed = True
        for process in self._unreaped:
            process.kill("the pool was closed")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._settle()
        except TimeoutError as exc:
            pids = ", ".join(str(process.pid) for process in self._unreaped)
            what = f"reward processes {pids} are still there {CLOSE_SECONDS:g} s after SIGKILL"
            raise WorkerError(what) from exc

    async def _settle(self) -> None:
        """Wait until no start is under way and every process is reaped."""
        for place in self._places:
            async with place.starting:
                pass
        while self._unreaped:
            process = next(iter(self._unreaped))
            await process.gone()
            self._unreaped.discard(process)

    def _check_usable(self) -> None:
        if self._closed:
            raise WorkerError("the reward pool is closed")
        if self._broken is not None:
            again = type(self._broken)(str(self._broken))
            for note in getattr(self._broken, "__notes__", ()):
                again.add_note(note)
            raise again

    async def _attempt(self, request: bytes) -> Answer | Answers | RewardFailure | Lost:
        """One issue of a job: wait for a free place, then for its process, then for the job."""
        self._check_usable()
        place = await self._free.get()
        try:
            process = await self._ready(place)
            return await self._run(process, request)
        finally:
            self._free.put_nowait(place)

    async def _ready(self, place: _Place) -> RewardProcess:
        async with place.starting:
            while (process := place.running) is None:
                self._check_usable()
                await self._start(place)
            return process

    async def _start(self, place: _Place) -> None:
        """Put a new process into ``place``; a death counts towards ``MAX_FAILED_STARTS``."""
        self._unreaped = {process for process in self._unreaped if not process.reaped}
        if place.process is not None:
            self.counters.restarts += 1
            self._watch.reward_worker_replaced(place.process.ended_by or "it closed its socket")
        with boundary(WorkerError, "starting a reward process"):
            process = await RewardProcess.spawn(self._load, self._log_path)
        place.process = process
        self._unreaped.add(process)
        try:
            self._check_usable()  # closed while it was spawned
            await process.ready(self._start_seconds)
        except ConfigError as exc:
            self._broken = exc
            raise
        except WorkerError as exc:
            process.kill("it could not start")
            self._note_failed_start(exc)
        except asyncio.CancelledError:
            process.kill("its start was cancelled")
            raise
        else:
            self._failed_starts = 0
            self._share(place, process)

    def _note_failed_start(self, exc: WorkerError) -> None:
        self._failed_starts += 1
        if self._failed_starts < MAX_FAILED_STARTS or self._closed:
            return
        self._broken = WorkerError(f"{self._failed_starts} reward processes in a row failed: {exc}")
        raise self._broken from exc

    def _share(self, place: _Place, process: RewardProcess) -> None:
        """A loaded function tells that it is asynchronous: offer the rest of its place then."""
        self._loaded = process.loaded
        if process.concurrent and not place.shared:
            place.shared = True
            for _ in range(JOBS_PER_PROCESS - 1):
                self._free.put_nowait(place)

    async def _run(
        self, process: RewardProcess, request: bytes
    ) -> Answer | Answers | RewardFailure | Lost:
        """Run one job to its end or its deadline; canceling this ends the job without waiting."""
        self.counters.calls += 1
        job = next(self._jobs)
        ending = process.submit(job, request)
        try:
            # asyncio.wait leaves the future alone at the deadline, its ending is still needed then.
            await asyncio.wait((ending,), timeout=self._timeout_seconds)
            if ending.done():
                return self._outcome(ending.result())
            return await self._expire(process, job, ending)
        except asyncio.CancelledError:
            process.abandon(job)
            raise

    async def _expire(
        self, process: RewardProcess, job: int, ending: asyncio.Future[Ending]
    ) -> RewardFailure | Lost:
        """The deadline of ``job`` has passed: kill it, or cancel it and see whether it obeys."""
        if process.concurrent:
            process.cancel(job)
            await asyncio.wait((ending,), timeout=GRACE_SECONDS)
            process.kill_blocked(job)
            last = ending.result()
            if isinstance(last, Lost) and not last.blamed:
                return last  # another job held the event loop: this one was never given its time
        else:
            process.kill(f"a call took longer than {self._timeout_seconds:g} s")
        self.counters.timeouts += 1
        return self._lost("RewardTimeout", f"timed out after {self._timeout_seconds:g} s")

    def _outcome(self, ending: Ending) -> Answer | Answers | RewardFailure | Lost:
        if isinstance(ending, Answer | Answers):
            return ending
        if isinstance(ending, Failed):
            return _failure(ending)
        if isinstance(ending, Canceled):
            return RewardFailure(
                error="CancelledError", reason="the reward function canceled itself"
            )
        return self._lost("WorkerError", ending.reason) if ending.blamed else ending

    def _lost(self, error: str, reason: str) -> RewardFailure:
        self._watch.reward_lost(reason)
        return RewardFailure(error=error, reason=reason)
