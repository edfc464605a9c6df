"""Waiting for a condition of the one event loop, without polling and without a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Tasks wait until a predicate holds; whoever changes what it reads calls ``notify``.

    ``asyncio.Condition`` needs an await to notify; here a change and its notification happen in one
    turn of the loop.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake every waiter to look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed(self) -> None:
        """Return at the next ``notify``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return when ``predicate()`` is true; it is asked now and after each ``notify``."""
        while not predicate():
            await self.changed()
