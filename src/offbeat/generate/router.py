"""Several generators as one: requests of a group stick to one replica, control calls go to all.

Owns the choice of replica; knows no weights and no tokens. Stickiness lets siblings share their
prompt's prefill; the choice is a function of the group id alone, so a run sends the same request to
the same replica every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

from offbeat.errors import true_cause
from offbeat.protocols import Generator
from offbeat.types import (
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    Progress,
    WeightUpdate,
)

T = TypeVar("T")


class Router:
    """A ``Generator`` made of ``replicas`` (at least one)."""

    def __init__(self, replicas: Sequence[Generator]) -> None:
        if not replicas:
            raise ValueError("a Router needs at least one replica")
        self._replicas = tuple(replicas)
        self._evaluation = 0
        self.version = PolicyVersion(0)
        """The weights that every replica has at least."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._choose(request).generate(request)

    async def stream(
        self, request: GenerateRequest, wrote: Callable[[Progress], None]
    ) -> Completion:
        return await self._choose(request).stream(request, wrote)

    def _choose(self, request: GenerateRequest) -> Generator:
        if request.group_id >= 0:
            return self._replicas[request.group_id % len(self._replicas)]
        # Evaluation requests share the id -1 and no prompt: take turns.
        self._evaluation += 1
        return self._replicas[self._evaluation % len(self._replicas)]

    async def stage(self, update: WeightUpdate) -> None:
        await self._all(lambda g: g.stage(update))

    async def commit(self, version: PolicyVersion) -> float:
        """Commit on every replica; returns the longest pause."""
        pause = max(await self._all(lambda g: g.commit(version)))
        self.version = version
        return pause

    async def pause(self) -> None:
        await self._all(lambda g: g.pause())

    async def resume(self) -> None:
        await self._all(lambda g: g.resume())

    async def abort(self, request_ids: Sequence[str]) -> int:
        return sum(await self._all(lambda g: g.abort(request_ids)))

    async def stats(self) -> GeneratorStats:
        """Counters summed over the replicas, spans of all of them; ``version`` is the oldest."""
        return _combine(await self._all(lambda g: g.stats()))

    async def _all(self, call: Callable[[Generator], Awaitable[T]]) -> list[T]:
        async def one(generator: Generator) -> T:
            return await call(generator)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(g)) for g in self._replicas]
        except BaseExceptionGroup as errors:
            # The caller asked one generator: it gets that one's error, not a group of them.
            raise true_cause(errors) from errors
        return [t.result() for t in tasks]


def _combine(parts: Sequence[GeneratorStats]) -> GeneratorStats:
    return GeneratorStats(
        version=min(p.version for p in parts),
        slots=sum(p.slots for p in parts),
        running=sum(p.running for p in parts),
        waiting=sum(p.waiting for p in parts),
        prefill_tokens=sum(p.prefill_tokens for p in parts),
        decode_tokens=sum(p.decode_tokens for p in parts),
        finished=sum(p.finished for p in parts),
        aborted=sum(p.aborted for p in parts),
        paused=any(p.paused for p in parts),
        peak_rss_bytes=sum(p.peak_rss_bytes for p in parts),
        decode_spans=tuple(sorted(chain.from_iterable(p.decode_spans for p in parts))),
        prefill_spans=tuple(sorted(chain.from_iterable(p.prefill_spans for p in parts))),
    )
