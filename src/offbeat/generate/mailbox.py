"""Many requests per call: the generator's side of what travels between it and the controller.

Owns the requests that were handed in and the answers that wait to be fetched. One call brings all
requests and cancellations of a moment, another waits for whatever has been answered: a call for
each sibling would cost more than the tokens of a small model. Knows no engine and no transport.

Consumes requests; produces ``Delivery``s; waits for the generator that answers them; unblocked by
its answer, its error or a cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from offbeat.errors import GenerationError, OffbeatError, boundary
from offbeat.generate.client import Delivery
from offbeat.launch.calls import Fault
from offbeat.types import Completion, GenerateRequest

POLL_SECONDS = 20.0
"""How long ``collect`` waits for an answer before it says that there is none yet."""


class Mailbox:
    """Use as an async context manager; leaving it cancels the requests that still run.

    Args:
        answer: writes one completion; cancelling it frees what the request holds.
    """

    def __init__(self, answer: Callable[[GenerateRequest], Awaitable[Completion]]) -> None:
        self._answer = answer
        self._tasks = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ready: list[Delivery] = []
        self._some = asyncio.Event()

    async def submit(self, requests: Sequence[GenerateRequest], cancelled: Sequence[str]) -> None:
        """Start ``requests`` and end those named in ``cancelled``, which get no delivery.

        A name that comes again stands for the new request only: the cancellation of the one before
        it may have been lost on the way.
        """
        names = {*cancelled, *(r.request_id for r in requests)}
        self._ready = [d for d in self._ready if d.request_id not in names]
        ending = {n: task for n in names if (task := self._running.pop(n, None)) is not None}
        for task in ending.values():
            task.cancel()
        for request in requests:
            work = self._run(request, after=ending.get(request.request_id))
            self._running[request.request_id] = self._tasks.create_task(work)

    async def collect(self) -> list[Delivery]:
        """Everything answered since the last call, in the order it was; empty after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self._some.wait()
        self._some.clear()
        ready, self._ready = self._ready, []
        return ready

    async def _run(self, request: GenerateRequest, after: asyncio.Task[None] | None) -> None:
        """Answer one request; ``after`` is an earlier one of this name that is being cancelled."""
        if after is not None:
            await asyncio.wait([after])
        completion = fault = None
        try:
            with boundary(GenerationError, f"request {request.request_id}"):
                completion = await self._answer(request)
        except OffbeatError as exc:
            fault = Fault.of(exc)
        self._running.pop(request.request_id, None)
        delivery = Delivery(request_id=request.request_id, completion=completion, fault=fault)
        self._ready.append(delivery)
        self._some.set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._running.values():
            task.cancel()
        # Not told of ``exc``: it would come out wrapped in a group.
        await self._tasks.__aexit__(None, None, None)
