"""Many requests per call: the generator's side of what travels between it and the controller.

Owns the requests that were handed in and the answers that wait to be fetched. One call brings all
requests and cancellations of a moment, another waits for whatever has been answered: a call for
each sibling would cost more than the tokens of a small model. Knows no engine and no transport.

A delivery has a number and is kept until the client says that it has come: what was handed out in
a reply that got lost is handed out again, and by its number the client counts it once. As many are
kept as requests were in flight.

Consumes requests; produces ``Delivery``s; waits for the generator that answers them; unblocked by
its answer, its error or a cancellation.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from offbeat.errors import GenerationError, OffbeatError, boundary
from offbeat.generate.client import Delivery
from offbeat.launch.calls import Fault
from offbeat.types import Completion, GenerateRequest, Progress


class Mailbox:
    """Use as an async context manager; leaving it cancels the requests that still run.

    Args:
        answer: writes one completion; cancelling it frees what the request holds.
    """

    def __init__(self, answer: Callable[[GenerateRequest], Awaitable[Completion]]) -> None:
        self._answer = answer
        self._tasks = asyncio.TaskGroup()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)
        self._ready: list[Delivery] = []
        """Not known to have come to the client, in the order of their numbers."""
        self._progress: dict[str, list[Progress]] = {}
        """What streamed requests wrote since the last ``collect``; no more than they may write."""
        self._some = asyncio.Event()

    async def submit(self, requests: Sequence[GenerateRequest], cancelled: Sequence[str]) -> None:
        """Start ``requests`` and end those named in ``cancelled``, which get no delivery.

        A name that comes again stands for the new request only: the cancellation of the one before
        it may have been lost on the way.
        """
        names = {*cancelled, *(r.request_id for r in requests)}
        self._ready = [d for d in self._ready if d.request_id not in names]
        for name in names:
            self._progress.pop(name, None)
        ending = {n: task for n in names if (task := self._running.pop(n, None)) is not None}
        for task in ending.values():
            task.cancel()
        for request in requests:
            work = self._run(request, after=ending.get(request.request_id))
            self._running[request.request_id] = self._tasks.create_task(work)

    def wrote(self, progress: Mapping[str, Progress]) -> None:
        """Keep what streamed requests wrote for the next ``collect``; of the others, nothing."""
        for name, part in progress.items():
            if name in self._running:
                self._progress.setdefault(name, []).append(part)
                self._some.set()

    async def collect(self, received: int, seconds: float) -> list[Delivery]:
        """Everything that was answered and not yet received, in that order; empty after a while.

        Behind it, what streamed requests have written that are not answered yet.

        Args:
            received: number of the last delivery that has come; it and all before are forgotten.
            seconds: how long to wait for the first one.
        """
        self._ready = [d for d in self._ready if d.number > received]
        if not self._ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._some.wait()
        self._some.clear()
        progress, self._progress = self._progress, {}
        for name, parts in progress.items():
            self._hand_out(Delivery(request_id=name, progress=_joined(parts)))
        return list(self._ready)

    def _hand_out(self, delivery: Delivery) -> None:
        self._ready.append(replace(delivery, number=next(self._numbers)))

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
        self._progress.pop(request.request_id, None)  # The completion has all of it.
        self._hand_out(Delivery(request_id=request.request_id, completion=completion, fault=fault))
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


def _joined(parts: Sequence[Progress]) -> Progress:
    return Progress(
        start=parts[0].start,
        token_ids=np.concatenate([p.token_ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
    )
