"""Waiting for a condition of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from offbeat.pipeline.signal import Signal


async def spin(turns: int = 10) -> None:
    """Let everything that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_predicate_that_holds_is_not_waited_for() -> None:
    async with asyncio.timeout(1):
        await Signal().wait_for(lambda: True)


async def test_every_waiter_looks_again_at_each_notification_and_only_then() -> None:
    signal, value, done = Signal(), 0, []

    async def wait(wanted: int) -> None:
        await signal.wait_for(lambda: value >= wanted)
        done.append(wanted)

    async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
        for wanted in (2, 1, 2):
            tasks.create_task(wait(wanted))
        await spin()
        value = 1
        await spin()
        assert done == []
        signal.notify()
        await spin()
        assert done == [1]
        value = 2
        signal.notify()
    assert sorted(done) == [1, 2, 2]


async def test_a_change_between_two_notifications_of_one_turn_is_seen() -> None:
    signal, value = Signal(), 0

    async def wait() -> None:
        await signal.wait_for(lambda: value == 1)

    async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        await spin()
        signal.notify()
        value = 1
        signal.notify()


async def test_a_canceled_waiter_is_forgotten_and_does_not_disturb_the_others() -> None:
    signal = Signal()
    gone = asyncio.create_task(signal.changed())
    stays = asyncio.create_task(signal.changed())
    await spin()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(signal._waiters) == 1
    signal.notify()
    async with asyncio.timeout(1):
        await stays
    assert not signal._waiters
