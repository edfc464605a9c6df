"""The controller's side of a generator process; loads no torch.

Owns the start-up specification that crosses to the process, and the typed calls to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn, Self

from offbeat.errors import (
    ConnectionLost,
    GenerationError,
    OffbeatError,
    StallError,
    WorkerError,
    boundary,
)
from offbeat.launch.calls import Fault
from offbeat.launch.codec import encode
from offbeat.launch.protocols import WorkerHandle
from offbeat.types import (
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    Progress,
    WeightUpdate,
)

log = logging.getLogger(__name__)

TARGET = "offbeat.generate.server:open_service"

POLL_SECONDS = 20.0
"""How long ``collect`` waits in the worker for an answer before it says that there is none yet."""

CONTROL_SECONDS = 6 * POLL_SECONDS
"""How long any other call than a completion may take, ``collect`` included."""

UNANSWERED = (StallError, ConnectionLost)
"""How a call ends whose answer did not come, of a worker that may live and may have done it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """What a generator process needs to start.

    ``max_len`` is the most tokens (prompt plus answer) of one request; ``dtype`` null is the
    device's default; ``onednn_linears``: see ``ModelConfig``; ``recompute_kv``: running requests
    have their keys computed anew after a commit, see ``KVOnUpdate``.
    """

    model_path: str
    dtype: str | None
    device: str
    slots: int
    max_len: int
    onednn_linears: bool | None = None
    recompute_kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine found out about itself at start-up.

    ``bitwise``: cached decode and the packed training pass gave equal bits on this machine, with
    these threads; otherwise ``max_error`` is their largest difference in log-prob (nats).
    ``onednn``: linear layers go through oneDNN (``model/linear.py``).
    """

    device: str
    dtype: str
    threads: int
    bitwise: bool
    max_error: float
    parameters: int
    onednn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One of three: the completion of a request, what it failed with, or what it wrote so far.

    ``number`` counts the deliveries of one worker from 1; one that comes again has the same.
    """

    request_id: str
    number: int = 0
    completion: Completion | None = None
    fault: Fault | None = None
    progress: Progress | None = None


class RemoteGenerator:
    """``Generator`` over a worker's endpoint. Use as an async context manager.

    Requests and cancellations of the same moment travel in one call; one other call waits for
    answers (``mailbox``). One of these whose reply is lost is made once more: a request has the
    same answer each time, and a delivery counts once. A call that fails for good fails the requests
    that were waiting for it; they are cancelled in the worker, should it live.

    Args:
        worker: the generator process.
        request_timeout: seconds one completion may take, waiting included; a call that carries
            requests or answers may take half of it, so that it can be made again in time.
        control_timeout: seconds any call may take that is not a completion.
        on_lost_reply: called with why, for each reply that was lost and came the second time.
    """

    def __init__(
        self,
        worker: WorkerHandle,
        *,
        request_timeout: float,
        control_timeout: float = CONTROL_SECONDS,
        on_lost_reply: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.name = worker.name
        self._client = worker.client
        self._request_timeout = request_timeout
        self._control_timeout = control_timeout
        self._carry_timeout = min(control_timeout, request_timeout / 2)
        self._poll_seconds = self._carry_timeout * (POLL_SECONDS / CONTROL_SECONDS)
        self._on_lost_reply = on_lost_reply
        self._tasks = asyncio.TaskGroup()
        self._pumps: list[asyncio.Task[None]] = []
        self._broken = asyncio.Event()
        self._error: OffbeatError = WorkerError(f"{self.name}: not broken")
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        """Requests that have a caller and no answer from the worker."""
        self._listeners: dict[asyncio.Future[Completion], Callable[[Progress], None]] = {}
        """Who hears what those of them wrote that are streamed."""
        self._outbox: dict[str, GenerateRequest] = {}
        """Those of them that are not sent yet."""
        self._cancelled: list[str] = []
        self._received = 0
        """Number of the last delivery that came."""
        self._to_send = asyncio.Event()
        self._to_collect = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        pumps = (self._send, self._collect)
        self._pumps = [self._tasks.create_task(self._pump(pump)) for pump in pumps]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        self._pumps = []
        self._fail(self._waiting.values(), WorkerError(f"{self.name}: closed before it answered"))
        # Not told of ``exc``: it would wrap the run's error in a group.
        await self._tasks.__aexit__(None, None, None)

    async def _pump(self, calls: Callable[[], Coroutine[None, None, NoReturn]]) -> None:
        """Make the calls. Their errors are answers; what ends this, a callback has raised: nobody
        must wait for answers any more.
        """
        try:
            with boundary(WorkerError, f"{self.name}: calls of it"):
                await calls()
        except OffbeatError as exc:
            self._error = exc
            self._broken.set()
            self._fail(self._waiting.values(), exc)

    async def until_broken(self) -> NoReturn:
        """Wait until no call can be made any more, and raise why."""
        await self._broken.wait()
        raise self._error

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ``Generator``. Cancelling the call frees the request's slot."""
        return await self._ask(request, None)

    async def stream(
        self, request: GenerateRequest, wrote: Callable[[Progress], None]
    ) -> Completion:
        """See ``Generator``. Cancelling the call frees the request's slot."""
        return await self._ask(replace(request, stream=True), wrote)

    async def _ask(
        self, request: GenerateRequest, wrote: Callable[[Progress], None] | None
    ) -> Completion:
        name = request.request_id
        if not self._pumps or self._broken.is_set():
            raise WorkerError(f"{self.name}: not open for request {name}")
        if name in self._waiting:
            raise GenerationError(f"{self.name}: request {name} is already running")
        _check_sendable(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        if wrote is not None:
            self._listeners[future] = wrote
        self._outbox[name] = request
        self._to_send.set()
        self._to_collect.set()
        try:
            async with asyncio.timeout(self._request_timeout) as deadline:
                return await future
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise StallError(
                f"{self.name}: no answer to request {name} in {self._request_timeout:g} s "
                "(rollout.request_timeout_seconds)"
            ) from exc
        finally:
            self._listeners.pop(future, None)
            self._forget(name, future)

    def _forget(self, name: str, future: asyncio.Future[Completion]) -> None:
        """The caller is gone; what the worker has but did not answer is cancelled there."""
        if self._waiting.get(name) is not future:
            return  # Answered; the name may be another's by now.
        del self._waiting[name]
        if self._outbox.pop(name, None) is None:
            self._cancelled.append(name)
            self._to_send.set()

    async def _send(self) -> NoReturn:
        """Hand over what has come together since the last call."""
        lost: OffbeatError | None = None
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            sent, self._outbox = self._outbox, {}
            cancelled, self._cancelled = self._cancelled, []
            if not sent and not cancelled:
                continue
            callers = {name: self._waiting[name] for name in sent}
            try:
                await self._client.call(
                    "submit", list(sent.values()), cancelled, timeout=self._carry_timeout
                )
            except OffbeatError as exc:
                # They may not have arrived, so the next call brings them again: a request of the
                # same name starts after its cancellation.
                self._cancelled = [*cancelled, *self._cancelled]
                lost = exc if lost is None and isinstance(exc, UNANSWERED) else None
                if lost is None:
                    self._fail(callers.values(), exc)
                else:
                    self._take_back(sent, callers)
            else:
                self._say_repeated(lost)
                lost = None

    def _take_back(
        self,
        sent: Mapping[str, GenerateRequest],
        callers: Mapping[str, asyncio.Future[Completion]],
    ) -> None:
        """Have the next call bring what is still waited for, and end what the lost one started."""
        waiting = {n: r for n, r in sent.items() if self._waiting.get(n) is callers[n]}
        self._outbox = waiting | self._outbox
        self._cancelled = [*sent, *self._cancelled]
        self._to_send.set()

    async def _collect(self) -> NoReturn:
        """Fetch answers as long as somebody waits for one."""
        lost: OffbeatError | None = None
        while True:
            await self._to_collect.wait()
            try:
                found = await self._client.call(
                    "collect",
                    self._received,
                    self._poll_seconds,
                    returns=list[Delivery],
                    timeout=self._carry_timeout,
                )
            except OffbeatError as exc:
                lost = exc if lost is None and isinstance(exc, UNANSWERED) else None
                if lost is None:
                    self._fail(self._waiting.values(), exc)
                    # Nobody waits now, though callers see their errors only later: asking a dead
                    # worker until they do could spin for ever, as it may refuse without yielding.
                    self._to_collect.clear()
            else:
                self._say_repeated(lost)
                lost = None
                self._deliver(found)
                if not self._waiting:
                    self._to_collect.clear()

    def _say_repeated(self, lost: OffbeatError | None) -> None:
        """A call was answered; ``lost`` is how the same one ended before, if it was made twice."""
        if lost is not None:
            log.warning("%s; asked again, and answered", lost)
            self._on_lost_reply(str(lost))

    def _deliver(self, found: Iterable[Delivery]) -> None:
        for d in found:
            if d.number <= self._received:
                continue  # The reply that brought it comes a second time.
            self._received = d.number
            if d.request_id in self._outbox:
                continue  # The answer to an earlier request of this name, which was cancelled.
            if d.progress is not None:
                self._hear(d.request_id, d.progress)
                continue
            future = self._waiting.pop(d.request_id, None)
            if future is None or future.done():
                continue
            if d.completion is not None:
                future.set_result(d.completion)
            elif d.fault is not None:
                future.set_exception(d.fault.exception(self.name))

    def _hear(self, name: str, progress: Progress) -> None:
        future = self._waiting.get(name)
        listener = self._listeners.get(future) if future is not None else None
        if listener is not None:
            listener(progress)

    def _fail(self, callers: Iterable[asyncio.Future[Completion]], error: OffbeatError) -> None:
        """End what is not done with ``error``, a copy each: raising one marks it."""
        for future in callers:
            if not future.done():
                copy = type(error)(str(error))
                copy.__cause__ = error
                future.set_exception(copy)

    async def stage(self, update: WeightUpdate) -> None:
        await self._client.call("stage", update, timeout=self._control_timeout)

    async def commit(self, version: PolicyVersion) -> float:
        return await self._client.call(
            "commit", version, returns=float, timeout=self._control_timeout
        )

    async def pause(self) -> None:
        await self._client.call("pause", timeout=self._control_timeout)

    async def resume(self) -> None:
        await self._client.call("resume", timeout=self._control_timeout)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return await self._client.call(
            "abort", list(request_ids), returns=int, timeout=self._control_timeout
        )

    async def stats(self) -> GeneratorStats:
        """See ``Generator``; spans of a reply that was lost are not told again."""
        try:
            return await self._stats()
        except ConnectionLost:
            return await self._stats()

    async def _stats(self) -> GeneratorStats:
        return await self._client.call(
            "stats", returns=GeneratorStats, timeout=self._control_timeout
        )

    async def info(self) -> EngineInfo:
        """What the engine found out about itself at start-up."""
        return await self._client.call("info", returns=EngineInfo, timeout=self._control_timeout)


def _check_sendable(request: GenerateRequest) -> None:
    """Refuse alone what would fail the call that it travels in with others."""
    try:
        encode(request)
    except WorkerError as exc:
        raise GenerationError(f"request {request.request_id}: {exc}") from exc
