"""Ctrl-C around an event loop: one end, however often it comes, and one that can be hurried."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from offbeat.launch import interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What came to the handler that was there before; put back at the end."""
    numbers: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield numbers
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_not_interrupted_returns_and_leaves_the_handler_as_it_was(
    heard: list[int],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert interrupts.run(asyncio.sleep(0, "slept")) == "slept"
    assert signal.getsignal(signal.SIGINT) is before
    assert heard == []


def test_an_interrupt_cancels_once_and_then_goes_on_to_the_handler_before(
    heard: list[int],
) -> None:
    cancelled = 0

    async def main() -> None:
        nonlocal cancelled
        press()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled += 1
            for _ in range(3):
                press()
                await asyncio.sleep(0.01)  # further ones raise nothing into the clean-up
            cancelled += 1

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(main())
    assert cancelled == 2
    assert heard == [signal.SIGINT]


def test_a_second_interrupt_ends_the_patience_of_a_clean_up(heard: list[int]) -> None:
    waited: list[float] = []

    async def wait() -> None:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with interrupts.patience(60):
                await asyncio.sleep(60)
        waited.append(time.monotonic() - started)

    async def main() -> None:
        press()
        try:
            await asyncio.sleep(60)
        finally:
            asyncio.get_running_loop().call_later(0.02, press)
            await wait()  # begun before the second one
            await wait()  # and after it

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(main())
    assert len(waited) == 2
    assert max(waited) < 10


async def test_patience_without_an_interrupt_is_a_timeout() -> None:
    async with interrupts.patience(60):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with interrupts.patience(0.01):
            await asyncio.sleep(60)


def test_an_interrupt_gets_through_to_code_that_holds_the_event_loop(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "STUCK_SECONDS", 0.05)

    def hold(seconds: float) -> None:
        time.sleep(seconds)

    async def main() -> None:
        press()
        hold(0.1)
        press()
        hold(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(main())
    assert time.monotonic() - started < 10


def test_the_error_of_what_was_interrupted_is_not_lost(heard: list[int]) -> None:
    async def main() -> None:
        press()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("the disk is full") from None

    with pytest.raises(OSError, match="the disk is full"):
        interrupts.run(main())
