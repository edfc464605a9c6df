"""Ctrl-C around an event loop: the first ends the main task in order, each further one hurries it.

Owns SIGINT while `run` goes on, and the waits of a clean-up that a second Ctrl-C cuts short
(`patience`). Raises nothing into running code, unless that keeps the event loop from turning. Knows
no workers.

Why not ``asyncio.run``: its second Ctrl-C raises ``KeyboardInterrupt`` inside the loop, which then
cancels every task at once, also those that the clean-up of the first one waits for.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

STUCK_SECONDS = 2.0
"""After an event loop has not turned for this long, Ctrl-C interrupts whatever holds it."""


class _Interrupts:
    """The handler of SIGINT of one event loop; ``asked`` once there was one, ``hurried`` twice."""

    def __init__(self) -> None:
        self.asked = False
        self.hurried = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._deadlines: set[asyncio.Timeout] = set()
        self._unheard_since: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Tell the loop, which acts on it in its next turn."""
        react = self._hurry if self.asked else self._end
        self.asked = True
        if self.loop is None or self.loop.is_closed():
            return
        now = time.monotonic()
        if self._unheard_since is None:
            self._unheard_since = now
        if now - self._unheard_since > STUCK_SECONDS:
            raise KeyboardInterrupt
        self.loop.call_soon_threadsafe(react)

    async def over(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` as what an interrupt cancels."""
        self._main = asyncio.current_task()
        if self.asked:
            main.close()
            raise asyncio.CancelledError
        _current.set(self)
        return await main

    @contextmanager
    def shortens(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Move ``deadline`` to now when an interrupt hurries the block."""
        self._deadlines.add(deadline)
        try:
            yield
        finally:
            self._deadlines.discard(deadline)

    def _end(self) -> None:
        self._unheard_since = None
        if self._main is not None:
            self._main.cancel()

    def _hurry(self) -> None:
        self._unheard_since = None
        self.hurried = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())


_current: ContextVar[_Interrupts | None] = ContextVar("interrupts", default=None)


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, where the first Ctrl-C cancels ``main`` and no other one disturbs its end.

    The interrupt then goes on to the handler that was there before, which by default raises
    ``KeyboardInterrupt``. In a thread, and where Ctrl-C is ignored, this is ``asyncio.run``.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        return asyncio.run(main)
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    try:
        with asyncio.Runner() as runner:
            interrupts.loop = runner.get_loop()
            return runner.run(interrupts.over(main))
    except asyncio.CancelledError as cancelled:
        signal.signal(signal.SIGINT, previous)
        if interrupts.asked:
            previous(signal.SIGINT, None)
            raise KeyboardInterrupt from cancelled
        raise
    finally:
        signal.signal(signal.SIGINT, previous)


def interrupted() -> bool:
    """Whether Ctrl-C has asked what `run` runs to end."""
    interrupts = _current.get()
    return interrupts is not None and interrupts.asked


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """``asyncio.timeout`` for the waits of a clean-up: it expires at once when Ctrl-C comes again.

    Raises:
        TimeoutError: the block took longer.
    """
    interrupts = _current.get()
    hurried = interrupts is not None and interrupts.hurried
    async with asyncio.timeout(0.0 if hurried else seconds) as deadline:
        if interrupts is None:
            yield
            return
        with interrupts.shortens(deadline):
            yield
