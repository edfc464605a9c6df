"""What the mailbox starts, ends and hands out, over answers that a test gives by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import numpy as np
import pytest

from offbeat.errors import GenerationError, PromptTooLong
from offbeat.generate.client import Delivery
from offbeat.generate.mailbox import Mailbox
from offbeat.types import Completion, GenerateRequest, Progress, StopReason

Ask = Callable[..., GenerateRequest]


def answer(text: str) -> Completion:
    none = np.zeros(0, dtype=np.int64)
    return Completion(
        token_ids=none,
        logprobs=none.astype(np.float32),
        versions=none,
        stop_reason=StopReason.STOP,
        text=text,
    )


def wrote(*ids: int) -> Progress:
    return Progress(start=0, token_ids=np.array(ids), logprobs=-np.array(ids, dtype=np.float32))


class Desk:
    """Writes an answer when the test says so; ``calls`` are in the order in which they began."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Completion]] = []
        self.names: list[str] = []
        self.begun = asyncio.Semaphore(0)
        self.ended: list[str] = []
        self.cleanup = asyncio.Event()
        self.cleanup.set()

    async def __call__(self, request: GenerateRequest) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.calls.append(future)
        self.names.append(request.request_id)
        self.begun.release()
        try:
            return await future
        finally:
            await self.cleanup.wait()
            self.ended.append(request.request_id)

    async def begin(self, n: int = 1) -> None:
        """Return when ``n`` more requests have been started."""
        for _ in range(n):
            await self.begun.acquire()

    def close(self) -> None:
        """Let every call end, however the test went."""
        self.cleanup.set()
        for call in self.calls:
            call.cancel()


class Reading(Mailbox):
    """A mailbox whose client receives everything that it fetches."""

    received = 0

    async def fetch(self, seconds: float = 15.0) -> list[Delivery]:
        found = await self.collect(self.received, seconds)
        self.received = max([self.received, *(d.number for d in found)])
        return found


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def mailbox(desk: Desk) -> AsyncIterator[Reading]:
    async with asyncio.timeout(20), Reading(desk) as mailbox:
        yield mailbox
        desk.close()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def texts(mailbox: Reading) -> list[tuple[str, str]]:
    found = await mailbox.fetch()
    assert all(d.completion is not None and d.fault is None for d in found)
    return [(d.request_id, d.completion.text) for d in found if d.completion is not None]


async def test_requests_of_one_call_run_together_and_are_handed_out_in_order_of_answer(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name=n) for n in "abc"], [])
    await desk.begin(3)
    assert desk.names == ["a", "b", "c"]
    for i in (2, 0):
        desk.calls[i].set_result(answer(str(i)))
        await settle()
    assert await texts(mailbox) == [("c", "2"), ("a", "0")]
    desk.calls[1].set_result(answer("1"))
    assert await texts(mailbox) == [("b", "1")]


async def test_collect_waits_for_the_first_answer(mailbox: Reading, desk: Desk, ask: Ask) -> None:
    async with asyncio.TaskGroup() as group:
        collect = group.create_task(texts(mailbox))
        await mailbox.submit([ask(name="a")], [])
        await desk.begin()
        await settle()
        assert not collect.done()
        desk.calls[0].set_result(answer("here"))
    assert collect.result() == [("a", "here")]


async def test_collect_says_after_a_while_that_there_is_nothing(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name="a")], [])
    await desk.begin()
    assert await mailbox.fetch(seconds=0.01) == []
    desk.calls[0].set_result(answer("later"))
    assert await texts(mailbox) == [("a", "later")]


@pytest.mark.parametrize("turns", range(6))
async def test_a_collect_that_is_cancelled_loses_no_answer(
    mailbox: Reading, desk: Desk, ask: Ask, turns: int
) -> None:
    """Cancelled ``turns`` turns of the loop after the answer: before or after it was seen."""
    await mailbox.submit([ask(name="a")], [])
    await desk.begin()
    collect = asyncio.ensure_future(texts(mailbox))
    await settle()
    desk.calls[0].set_result(answer("here"))
    for _ in range(turns):
        await asyncio.sleep(0)
    collect.cancel()
    try:
        found = await collect
    except asyncio.CancelledError:
        found = await texts(mailbox)
    assert found == [("a", "here")]


async def test_what_was_handed_out_comes_again_with_its_number_until_it_was_received(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    """The reply that held it may have been lost on its way."""
    await mailbox.submit([ask(name=n) for n in "abc"], [])
    await desk.begin(3)
    desk.calls[0].set_result(answer("first"))
    mailbox.wrote({"b": wrote(1)})
    await settle()
    lost = await mailbox.collect(0, 15.0)
    desk.calls[1].set_result(answer("second"))
    await settle()
    again = await mailbox.collect(0, 15.0)
    assert [(d.number, d.request_id) for d in lost] == [(1, "a"), (2, "b")]
    assert [(d.number, d.request_id) for d in again] == [(1, "a"), (2, "b"), (3, "b")]
    assert (again[0], again[1]) == (lost[0], lost[1])
    assert await mailbox.collect(2, 15.0) == again[2:]
    assert await mailbox.collect(3, 0.01) == []


async def test_two_collects_at_a_time_hand_out_the_same(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    """The client gave one of them up, which goes on in the worker."""
    async with asyncio.TaskGroup() as group:
        collects = [group.create_task(mailbox.collect(0, 15.0)) for _ in range(2)]
        await mailbox.submit([ask(name="a")], [])
        await desk.begin()
        desk.calls[0].set_result(answer("once"))
    assert [d.number for d in collects[0].result()] == [1]
    assert collects[0].result() == collects[1].result()


async def test_a_fault_of_one_request_leaves_the_others_alone(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name=n) for n in "abc"], [])
    await desk.begin(3)
    desk.calls[0].set_exception(PromptTooLong("too long"))
    desk.calls[1].set_exception(ZeroDivisionError("by nothing"))
    await settle()
    refused, broken = await mailbox.fetch()
    assert refused.completion is None
    assert refused.fault is not None
    assert (refused.fault.error, refused.fault.message) == ("PromptTooLong", "too long")
    assert broken.fault is not None
    error = broken.fault.exception("generator-0")
    assert type(error) is GenerationError
    assert str(error) == "generator-0: request b: ZeroDivisionError: by nothing"
    assert "ZeroDivisionError" in error.__notes__[0]
    desk.calls[2].set_result(answer("fine"))
    assert await texts(mailbox) == [("c", "fine")]


async def test_a_cancelled_request_ends_and_gets_no_delivery(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name="a"), ask(name="b")], [])
    await desk.begin(2)
    await mailbox.submit([], ["a", "unknown"])
    await settle()
    assert desk.ended == ["a"]
    assert desk.calls[0].cancelled()
    desk.calls[1].set_result(answer("mine"))
    assert await texts(mailbox) == [("b", "mine")]


async def test_a_request_cancelled_before_it_began_never_begins(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name="a")], [])
    await mailbox.submit([], ["a"])
    await settle()
    assert desk.names == []


async def test_an_answer_that_nobody_fetched_is_dropped_when_its_request_is_cancelled(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    """Else the next request of that name would be given it."""
    await mailbox.submit([ask(name="a"), ask(name="b")], [])
    await desk.begin(2)
    for i in range(2):
        desk.calls[i].set_result(answer(f"old {i}"))
    await settle()
    await mailbox.submit([ask(name="a")], ["a"])
    assert await texts(mailbox) == [("b", "old 1")]
    await desk.begin()
    desk.calls[2].set_result(answer("new"))
    assert await texts(mailbox) == [("a", "new")]


async def test_an_answer_written_as_its_request_is_cancelled_is_dropped(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name="a")], [])
    await desk.begin()
    desk.calls[0].set_result(answer("old"))
    await mailbox.submit([ask(name="a")], ["a"])
    await desk.begin()
    desk.calls[1].set_result(answer("new"))
    assert await texts(mailbox) == [("a", "new")]
    assert desk.ended == ["a", "a"]


@pytest.mark.invariant("I02")
@pytest.mark.parametrize("cancelled", [["a"], []], ids=["cancelled", "cancellation lost"])
async def test_a_request_sent_again_begins_when_the_one_of_its_name_has_ended(
    mailbox: Reading, desk: Desk, ask: Ask, cancelled: list[str]
) -> None:
    await mailbox.submit([ask(name="a")], [])
    await desk.begin()
    desk.cleanup.clear()
    await mailbox.submit([ask(name="a")], cancelled)
    await settle()
    assert desk.calls[0].cancelled()
    assert (len(desk.calls), desk.ended) == (1, [])
    desk.cleanup.set()
    await desk.begin()
    assert desk.ended == ["a"]
    desk.calls[1].set_result(answer("second"))
    assert await texts(mailbox) == [("a", "second")]
    await mailbox.submit([ask(name="a")], [])
    await desk.begin()
    desk.calls[2].set_result(answer("third"))
    assert await texts(mailbox) == [("a", "third")]


async def test_a_request_sent_again_can_be_cancelled(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    for cancelled in ([], ["a"], []):
        await mailbox.submit([ask(name="a")], cancelled)
        await desk.begin()
    await mailbox.submit([], ["a"])
    await settle()
    assert desk.ended == ["a"] * 3
    assert all(call.cancelled() for call in desk.calls)


async def test_leaving_ends_every_request(desk: Desk, ask: Ask) -> None:
    async with asyncio.timeout(20), Mailbox(desk) as mailbox:
        await mailbox.submit([ask(name="a"), ask(name="b")], [])
        await mailbox.submit([ask(name="a")], [])
        await desk.begin(2)
    assert sorted(desk.ended) == ["a", "b"]


async def test_an_error_of_the_block_leaves_it_as_it_is(desk: Desk, ask: Ask) -> None:
    error = GenerationError("the block's own")

    async def serve() -> None:
        async with asyncio.timeout(20), Mailbox(desk) as mailbox:
            await mailbox.submit([ask(name="a")], [])
            await desk.begin()
            raise error

    with pytest.raises(GenerationError) as caught:
        await serve()
    assert caught.value is error
    assert desk.ended == ["a"]


async def test_leaving_by_cancellation_ends_every_request(desk: Desk, ask: Ask) -> None:
    async def serve() -> None:
        async with Mailbox(desk) as mailbox:
            await mailbox.submit([ask(name="a")], [])
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(serve())
    await desk.begin()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert desk.ended == ["a"]


async def test_what_a_request_wrote_between_two_calls_is_handed_out_as_one(
    mailbox: Reading, desk: Desk, ask: Ask
) -> None:
    await mailbox.submit([ask(name="a"), ask(name="b")], [])
    await desk.begin(2)
    mailbox.wrote({"a": wrote(1), "b": wrote(5)})
    mailbox.wrote({"a": wrote(2, 3)})
    found = {d.request_id: d.progress for d in await mailbox.fetch()}
    assert {n: p.token_ids.tolist() for n, p in found.items() if p} == {"a": [1, 2, 3], "b": [5]}
    assert found["a"] is not None
    assert found["a"].logprobs.tolist() == [-1.0, -2.0, -3.0]
    mailbox.wrote({"a": wrote(4)})
    (later,) = await mailbox.fetch()
    assert later.progress is not None
    assert later.progress.token_ids.tolist() == [4]


@pytest.mark.parametrize("ends", ["answered", "cancelled", "unknown"])
async def test_nothing_is_handed_out_of_a_request_that_does_not_run(
    mailbox: Reading, desk: Desk, ask: Ask, ends: str
) -> None:
    await mailbox.submit([ask(name="a"), ask(name="b")], [])
    await desk.begin(2)
    if ends != "unknown":
        mailbox.wrote({"a": wrote(1)})
    if ends == "answered":
        desk.calls[0].set_result(answer("whole"))
        await settle()
    elif ends == "cancelled":
        await mailbox.submit([], ["a"])
    mailbox.wrote({"a" if ends != "unknown" else "c": wrote(2)})
    desk.calls[1].set_result(answer("b"))
    await settle()
    found = await mailbox.fetch()
    assert [d.request_id for d in found if d.progress is not None] == []
    assert [d.request_id for d in found] == (["a", "b"] if ends == "answered" else ["b"])
