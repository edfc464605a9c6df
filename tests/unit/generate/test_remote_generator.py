"""What the controller's side of a generator sends, and how every request comes to an end.

The worker's client is a fake that the test answers call by call, or one that leads to a mailbox;
the last tests have a real worker.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import pytest

from offbeat.errors import (
    CheckpointError,
    ConnectionLost,
    GenerationError,
    OffbeatError,
    PromptTooLong,
    StallError,
    WorkerError,
)
from offbeat.generate.client import Delivery, RemoteGenerator
from offbeat.generate.mailbox import Mailbox
from offbeat.launch.calls import Fault
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerSpec
from offbeat.launch.rpc import RpcClient, serve
from offbeat.types import Completion, GenerateRequest, GeneratorStats, PolicyVersion, StopReason

Ask = Callable[..., GenerateRequest]
Result: TypeAlias = "Completion | BaseException"

NAME = "generator-0"
NUMBERS = itertools.count(1)


def answer(text: str) -> Completion:
    none = np.zeros(0, dtype=np.int64)
    return Completion(
        token_ids=none,
        logprobs=none.astype(np.float32),
        versions=none,
        stop_reason=StopReason.STOP,
        text=text,
    )


def delivered(name: str, text: str) -> Delivery:
    return Delivery(request_id=name, number=next(NUMBERS), completion=answer(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that the worker has to answer."""

    args: tuple[object, ...]
    timeout: float | None
    reply: asyncio.Future[object]

    @property
    def requests(self) -> list[str]:
        return [r.request_id for r in self.args[0]]  # type: ignore[attr-defined]  # of a submit

    @property
    def cancelled(self) -> object:
        return self.args[1]


class Client:
    """A worker's client whose calls the test answers; with ``dead``, it refuses all at once."""

    name = NAME

    def __init__(self) -> None:
        self.dead: OffbeatError | None = None
        self.made: defaultdict[str, int] = defaultdict(int)
        self._calls: defaultdict[str, asyncio.Queue[Call]] = defaultdict(asyncio.Queue)

    async def call(
        self, method: str, *args: object, returns: object = None, timeout: float | None
    ) -> object:
        self.made[method] += 1
        assert self.made[method] < 100, f"{method} is called in a busy loop"
        if self.dead is not None:
            raise self.dead
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls[method].put_nowait(Call(args=args, timeout=timeout, reply=reply))
        return await reply

    async def next(self, method: str) -> Call:
        """The next call of ``method``, once it is made."""
        return await self._calls[method].get()

    def pending(self, method: str) -> int:
        """Calls of ``method`` that no ``next`` has taken."""
        return self._calls[method].qsize()

    async def submitted(self) -> Call:
        """The next submit, acknowledged."""
        call = await self.next("submit")
        call.reply.set_result(None)
        return call


@dataclass(frozen=True, slots=True)
class Worker:
    client: object
    name: str = NAME


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
async def remote(client: Client) -> AsyncIterator[RemoteGenerator]:
    async with (
        asyncio.timeout(20),
        RemoteGenerator(Worker(client), request_timeout=15, control_timeout=7) as remote,
    ):
        yield remote


def start(remote: RemoteGenerator, *requests: GenerateRequest) -> list[asyncio.Future[Completion]]:
    return [asyncio.ensure_future(remote.generate(r)) for r in requests]


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def end(*calls: asyncio.Future[Completion]) -> list[Result]:
    """How each call ended."""
    await asyncio.wait(calls)
    return [
        asyncio.CancelledError() if c.cancelled() else (c.exception() or c.result()) for c in calls
    ]


# What travels


async def test_requests_of_one_moment_travel_in_one_call_and_the_next_ones_after_it(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    calls = start(remote, ask(name="a"), ask(name="b"))
    first = await client.next("submit")
    assert (first.requests, first.cancelled, first.timeout) == (["a", "b"], [], 7)
    calls += start(remote, ask(name="c"))
    await settle()
    calls += start(remote, ask(name="d"))
    await settle()
    assert client.pending("submit") == 0
    first.reply.set_result(None)
    assert (await client.submitted()).requests == ["c", "d"]
    collect = await client.next("collect")
    assert (collect.args, collect.timeout) == ((0, pytest.approx(7 / 6)), 7)
    collect.reply.set_result([delivered(n, n.upper()) for n in "dbca"])
    assert [a.text for a in await asyncio.gather(*calls)] == ["A", "B", "C", "D"]


async def test_nothing_is_asked_while_nothing_waits(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    await settle()
    assert not client.made
    for text in ("one", "two"):
        (call,) = start(remote, ask(name="a"))
        await client.submitted()
        (await client.next("collect")).reply.set_result([])
        (await client.next("collect")).reply.set_result([delivered("a", text)])
        assert (await call).text == text
        await settle()
        assert client.pending("collect") == client.pending("submit") == 0
    assert client.made == {"submit": 2, "collect": 4}


async def test_an_answer_may_come_before_its_submission_is_acknowledged(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    (call,) = start(remote, ask(name="a"))
    submit = await client.next("submit")
    (await client.next("collect")).reply.set_result([delivered("a", "fast")])
    assert (await call).text == "fast"
    submit.reply.set_exception(WorkerError("gone since"))
    await settle()
    assert client.pending("submit") == 0


async def test_a_fault_of_one_request_ends_that_one_only(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    bad, good = start(remote, ask(name="a"), ask(name="b"))
    await client.submitted()
    fault = Delivery(
        request_id="a",
        number=next(NUMBERS),
        completion=None,
        fault=Fault.of(PromptTooLong("too long")),
    )
    (await client.next("collect")).reply.set_result([fault])
    with pytest.raises(PromptTooLong, match=r"^generator-0: too long$"):
        await bad
    (await client.next("collect")).reply.set_result([delivered("b", "fine")])
    assert (await good).text == "fine"
    await settle()
    assert client.pending("submit") == 0


@pytest.mark.parametrize("options", [{"top_k": 2**70}, {"stop": ("\ud800",)}])
async def test_a_request_that_cannot_travel_fails_alone_and_its_neighbors_are_sent(
    remote: RemoteGenerator, client: Client, ask: Ask, options: dict[str, object]
) -> None:
    calls = [
        asyncio.ensure_future(remote.generate(request))
        for request in (ask(name="first"), ask(name="odd", **options), ask(name="last"))
    ]
    assert (await client.submitted()).requests == ["first", "last"]
    with pytest.raises(GenerationError, match=r"request odd: .* cannot be sent"):
        await calls[1]
    (await client.next("collect")).reply.set_result([delivered(n, n) for n in ("first", "last")])
    assert [(await calls[i]).text for i in (0, 2)] == ["first", "last"]


async def test_a_name_in_use_is_refused(remote: RemoteGenerator, client: Client, ask: Ask) -> None:
    (call,) = start(remote, ask(name="a"))
    await client.submitted()
    with pytest.raises(GenerationError, match="generator-0: request a is already running"):
        await remote.generate(ask(name="a"))
    (await client.next("collect")).reply.set_result([delivered("a", "first")])
    assert (await call).text == "first"


# Cancellation


async def test_a_request_cancelled_before_it_is_sent_is_never_sent(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    (first,) = start(remote, ask(name="a"))
    submit = await client.next("submit")
    (second,) = start(remote, ask(name="b"))
    await settle()
    second.cancel()
    await settle()
    submit.reply.set_result(None)
    await settle()
    assert second.cancelled()
    assert client.made["submit"] == 1
    first.cancel()


@pytest.mark.parametrize("acknowledged", [False, True], ids=["while", "after"])
async def test_a_request_cancelled_while_or_after_it_is_sent_is_cancelled_in_the_worker(
    remote: RemoteGenerator, client: Client, ask: Ask, acknowledged: bool
) -> None:
    gone, kept = start(remote, ask(name="a"), ask(name="b"))
    submit = await client.next("submit")
    if acknowledged:
        submit.reply.set_result(None)
        await settle()
    gone.cancel()
    await settle()
    assert gone.cancelled()
    if not acknowledged:
        assert client.pending("submit") == 0
        submit.reply.set_result(None)
    second = await client.submitted()
    assert (second.requests, second.cancelled) == ([], ["a"])
    found = [delivered("a", "crossed it"), delivered("b", "fine")]
    (await client.next("collect")).reply.set_result(found)
    assert (await kept).text == "fine"
    await settle()
    assert client.made["submit"] == 2


async def test_an_answered_request_is_not_cancelled_in_the_worker(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    """Not even when its caller is cancelled before it could take the answer."""
    (call,) = start(remote, ask(name="a"))
    await client.submitted()
    (await client.next("collect")).reply.set_result([delivered("a", "too late")])
    await asyncio.sleep(0)
    call.cancel()
    await settle()
    assert call.cancelled()
    assert client.made["submit"] == 1


async def test_a_name_sent_again_travels_with_the_cancellation_of_the_first(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    (first,) = start(remote, ask(name="a"))
    submit, collect = await client.next("submit"), await client.next("collect")
    first.cancel()
    await settle()
    (second,) = start(remote, ask(name="a"))
    await settle()
    # The answer to the first: the second has not left yet.
    collect.reply.set_result([delivered("a", "old")])
    await settle()
    assert not second.done()
    submit.reply.set_result(None)
    both = await client.submitted()
    assert (both.requests, both.cancelled) == (["a"], ["a"])
    (await client.next("collect")).reply.set_result([delivered("a", "new")])
    assert (await second).text == "new"


async def test_a_failed_submission_of_the_first_does_not_end_the_second_of_its_name(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    (first,) = start(remote, ask(name="a"))
    submit = await client.next("submit")
    first.cancel()
    await settle()
    (second,) = start(remote, ask(name="a"))
    await settle()
    submit.reply.set_exception(WorkerError("lost"))
    assert (await client.submitted()).requests == ["a"]
    (await client.next("collect")).reply.set_result([delivered("a", "mine")])
    assert (await second).text == "mine"


async def test_a_request_without_an_answer_stalls_and_is_cancelled_in_the_worker(
    client: Client, ask: Ask
) -> None:
    async with (
        asyncio.timeout(20),
        RemoteGenerator(Worker(client), request_timeout=0.02) as remote,
    ):
        (call,) = start(remote, ask(name="a"))
        await client.submitted()
        with pytest.raises(StallError, match=r"^generator-0: no answer to request a in 0\.02 s \("):
            await call
        assert (await client.submitted()).cancelled == ["a"]


# Replies that are lost


@pytest.fixture
def losses() -> list[str]:
    return []


@pytest.fixture
async def heard(client: Client, losses: list[str]) -> AsyncIterator[RemoteGenerator]:
    async with (
        asyncio.timeout(20),
        RemoteGenerator(Worker(client), request_timeout=15, on_lost_reply=losses.append) as remote,
    ):
        yield remote


@pytest.mark.invariant("I02")
@pytest.mark.parametrize("error", [StallError, ConnectionLost])
async def test_a_lost_reply_is_asked_for_again_and_what_came_before_is_acknowledged(
    heard: RemoteGenerator, client: Client, ask: Ask, losses: list[str], error: type[WorkerError]
) -> None:
    calls = start(heard, ask(name="a"), ask(name="b"))
    await client.submitted()
    one, two = delivered("a", "one"), delivered("b", "two")
    (await client.next("collect")).reply.set_result([one])
    lost = await client.next("collect")
    lost.reply.set_exception(error("generator-0: gone on its way"))
    again = await client.next("collect")
    assert lost.args[0] == again.args[0] == one.number
    assert losses == []
    again.reply.set_result([two])
    assert [(await call).text for call in calls] == ["one", "two"]
    assert losses == ["generator-0: gone on its way"]


@pytest.mark.invariant("I02")
async def test_a_delivery_that_comes_again_is_not_the_answer_to_a_later_request_of_its_name(
    heard: RemoteGenerator, client: Client, ask: Ask
) -> None:
    (first,) = start(heard, ask(name="a"))
    await client.submitted()
    old = delivered("a", "old")
    (await client.next("collect")).reply.set_result([old])
    assert (await first).text == "old"
    (second,) = start(heard, ask(name="a"))
    await client.submitted()
    (await client.next("collect")).reply.set_result([old])
    (await client.next("collect")).reply.set_result([delivered("a", "new")])
    assert (await second).text == "new"


async def test_a_lost_submission_is_made_again_for_who_still_waits_and_ends_what_it_began(
    heard: RemoteGenerator, client: Client, ask: Ask, losses: list[str]
) -> None:
    gone, kept = start(heard, ask(name="a"), ask(name="b"))
    lost = await client.next("submit")
    gone.cancel()
    await settle()
    later = start(heard, ask(name="c"))
    await settle()
    lost.reply.set_exception(ConnectionLost("lost"))
    again = await client.submitted()
    assert again.requests == ["b", "c"]
    assert set(again.cancelled) == {"a", "b"}
    (await client.next("collect")).reply.set_result([delivered(n, n) for n in "bc"])
    assert [(await call).text for call in (kept, *later)] == ["b", "c"]
    assert losses == ["lost"]


async def test_a_call_that_is_lost_twice_in_a_row_ends_what_waits(
    heard: RemoteGenerator, client: Client, ask: Ask, losses: list[str]
) -> None:
    calls = start(heard, ask(name="a"))
    for _ in range(2):
        (await client.next("submit")).reply.set_exception(ConnectionLost("lost"))
    assert [type(e) for e in await end(*calls)] == [ConnectionLost]
    assert losses == []
    await client.submitted()  # the cancellations


async def test_calls_that_carry_answers_have_half_of_the_time_of_a_request(
    client: Client, ask: Ask
) -> None:
    async with asyncio.timeout(20), RemoteGenerator(Worker(client), request_timeout=6) as remote:
        (call,) = start(remote, ask(name="a"))
        assert (await client.next("submit")).timeout == 3
        collect = await client.next("collect")
        assert collect.timeout == 3
        assert collect.args[1] == pytest.approx(0.5)
        call.cancel()


# Calls that fail


async def test_a_failed_collect_ends_all_that_wait_and_the_next_request_asks_again(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    """A stopped worker looks like this; when it goes on, it must not keep their slots."""
    calls = start(remote, ask(name="a"), ask(name="b"))
    await client.submitted()
    stall = StallError("generator-0: no answer to collect in 7 s")
    (await client.next("collect")).reply.set_exception(StallError("the first time"))
    (await client.next("collect")).reply.set_exception(stall)
    ended = await end(*calls)
    assert [type(e) for e in ended] == [StallError] * 2
    assert {str(e) for e in ended} == {str(stall)}
    assert len({id(e) for e in [stall, *ended]}) == 3, "one error is raised in several tasks"
    assert (await client.submitted()).cancelled == ["a", "b"]
    await settle()
    assert client.pending("collect") == 0
    (again,) = start(remote, ask(name="a"))
    await client.submitted()
    (await client.next("collect")).reply.set_result([delivered("a", "alive")])
    assert (await again).text == "alive"


async def test_a_failed_submission_ends_what_it_carried_and_the_rest_goes_on(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    """It may have arrived for all that, and with it what it cancelled: both are cancelled again."""
    kept, gone = start(remote, ask(name="a"), ask(name="b"))
    await client.submitted()
    gone.cancel()
    lost = start(remote, ask(name="c"), ask(name="d"))
    submit = await client.next("submit")
    assert (submit.requests, submit.cancelled) == (["c", "d"], ["b"])
    submit.reply.set_exception(WorkerError("generator-0: connection lost in submit"))
    ended = await end(*lost)
    assert [type(e) for e in ended] == [WorkerError] * 2
    again = await client.submitted()
    assert (again.requests, again.cancelled) == ([], ["b", "c", "d"])
    (await client.next("collect")).reply.set_result([delivered("a", "here")])
    assert (await kept).text == "here"


async def test_a_dead_worker_is_asked_a_few_times_only(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    """It refuses without giving up the loop: asking until every caller has left would never end."""
    calls = start(remote, ask(name="a"), ask(name="b"))
    await client.submitted()
    collect = await client.next("collect")
    client.dead = WorkerError("generator-0: connection lost in collect: the worker was closed")
    collect.reply.set_exception(client.dead)
    ended = await end(*calls)
    assert [type(e) for e in ended] == [WorkerError] * 2
    await settle()
    assert client.made["collect"] == 1
    assert client.made["submit"] == 2
    with pytest.raises(WorkerError, match="connection lost"):
        await remote.generate(ask(name="c"))
    await settle()
    assert client.made["collect"] <= 2
    assert client.made["submit"] <= 4


async def test_no_error_is_left_unseen_when_its_caller_is_cancelled_as_it_comes(
    remote: RemoteGenerator, client: Client, ask: Ask
) -> None:
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    for turns in range(6):
        calls = start(remote, ask(name="a"), ask(name="b"))
        await client.submitted()
        fault = Delivery(
            request_id="b",
            number=next(NUMBERS),
            completion=None,
            fault=Fault.of(GenerationError("no")),
        )
        (await client.next("collect")).reply.set_result([fault])
        (await client.next("collect")).reply.set_exception(WorkerError("lost"))
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await end(*calls)
        await settle()
        while client.pending("submit"):
            await client.submitted()
    del calls, call, fault
    gc.collect()
    assert unseen == []


# Opening and closing


async def test_closing_ends_the_requests_in_flight_and_both_calls(client: Client, ask: Ask) -> None:
    async with asyncio.timeout(20), RemoteGenerator(Worker(client), request_timeout=15) as remote:
        calls = start(remote, ask(name="a"))
        submit, collect = await client.next("submit"), await client.next("collect")
        calls += start(remote, ask(name="b"))
        await settle()
    assert submit.reply.cancelled()
    assert collect.reply.cancelled()
    for error in await end(*calls):
        assert isinstance(error, WorkerError)
        assert str(error) == "generator-0: closed before it answered"
    with pytest.raises(WorkerError, match="generator-0: not open for request c"):
        await remote.generate(ask(name="c"))


async def test_a_generator_that_is_not_open_yet_refuses(client: Client, ask: Ask) -> None:
    remote = RemoteGenerator(Worker(client), request_timeout=15)
    with pytest.raises(WorkerError, match="not open"):
        await remote.generate(ask(name="a"))


async def test_an_error_of_the_block_leaves_it_as_it_is(client: Client, ask: Ask) -> None:
    error = WorkerError("the run's own")

    async def run() -> None:
        async with RemoteGenerator(Worker(client), request_timeout=15) as remote:
            start(remote, ask(name="a"))[0].cancel()
            raise error

    with pytest.raises(WorkerError) as caught:
        await run()
    assert caught.value is error


# Both sides together


class Line:
    """A client that leads to a mailbox and loses calls before or after they were made."""

    name = NAME

    def __init__(self, mailbox: Mailbox, chance: random.Random) -> None:
        self._mailbox, self._chance = mailbox, chance
        self._error = chance.choice((WorkerError, ConnectionLost))
        self.loses = 0.0

    async def call(
        self, method: str, *args: object, returns: object = None, timeout: float | None
    ) -> object:
        await self._pass(method)
        result = await getattr(self._mailbox, method)(*args)
        await self._pass(method)
        return result

    async def _pass(self, method: str) -> None:
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)
        if self._chance.random() < self.loses:
            raise self._error(f"{NAME}: connection lost in {method}")


@pytest.mark.parametrize("seed", range(20))
async def test_every_request_ends_and_none_stays_in_the_worker_whatever_is_cancelled_or_lost(
    ask: Ask, seed: int
) -> None:
    chance = random.Random(seed)
    running: list[str] = []

    async def write(request: GenerateRequest) -> Completion:
        assert request.request_id not in running, "two of one name"
        running.append(request.request_id)
        try:
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                raise GenerationError(f"no luck with {request.request_id}")
            return answer(request.request_id)
        finally:
            running.remove(request.request_id)

    async def use(remote: RemoteGenerator, name: str) -> str:
        for _ in range(chance.randrange(10)):
            await asyncio.sleep(0)
        for _ in range(4):
            call = asyncio.ensure_future(remote.generate(ask(name=name)))
            if chance.random() < 0.3:
                for _ in range(chance.randrange(14)):
                    await asyncio.sleep(0)
                call.cancel()
            await asyncio.wait([call])
            if not call.cancelled() and call.exception() is None:
                assert call.result().text == name
            elif not call.cancelled():
                assert isinstance(call.exception(), GenerationError | WorkerError)
        return name

    async with asyncio.timeout(20), Mailbox(write) as mailbox:
        line = Line(mailbox, chance)
        async with RemoteGenerator(Worker(line), request_timeout=15) as remote:
            line.loses = 0.0 if seed % 2 else 0.1
            names = [f"r{i}" for i in range(12)]
            users = [asyncio.ensure_future(use(remote, name)) for name in names]
            assert [await user for user in users] == names
            line.loses = 0.0
            last = start(remote, ask(name="last"))  # brings what cancellations are left
            await end(*last)
            await settle()
            await settle()
            assert running == []


class Slow:
    """A worker that answers when it is resumed.

    Its ``prefill_tokens`` are the seed of the request that it began last.
    """

    METHODS: ClassVar[tuple[str, ...]] = ("submit", "collect", "stats", "resume")

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running = self.newest = 0
        self.mailbox = Mailbox(self._answer)

    async def _answer(self, request: GenerateRequest) -> Completion:
        self.running, self.newest = self.running + 1, request.seed
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        return answer(f"{request.request_id} of {request.seed}")

    async def submit(self, requests: list[GenerateRequest], cancelled: list[str]) -> None:
        await self.mailbox.submit(requests, cancelled)

    async def collect(self, received: int, seconds: float) -> list[Delivery]:
        return await self.mailbox.collect(received, seconds)

    async def resume(self) -> None:
        self.gate.set()

    async def stats(self) -> GeneratorStats:
        return GeneratorStats(
            version=PolicyVersion(0),
            slots=4,
            running=self.running,
            waiting=0,
            prefill_tokens=self.newest,
            decode_tokens=0,
            finished=0,
            aborted=0,
            paused=False,
            peak_rss_bytes=0,
            decode_spans=(),
            prefill_spans=(),
        )


@asynccontextmanager
async def open_slow(_: bytes) -> AsyncIterator[Slow]:
    slow = Slow()
    async with slow.mailbox:
        yield slow


async def until(remote: RemoteGenerator, true: Callable[[GeneratorStats], bool]) -> None:
    """Return when ``true`` holds of what the worker says."""
    while not true(await remote.stats()):  # noqa: ASYNC110  # nothing but its answer tells
        await asyncio.sleep(0)


@asynccontextmanager
async def over_http() -> AsyncIterator[tuple[RemoteGenerator, AsyncExitStack]]:
    """A generator over ``Slow`` behind a server in this process, and what closes that server."""
    async with asyncio.timeout(20), open_slow(b"") as slow, AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(slow, Slow.METHODS, token="t"))
        client = RpcClient(server.url, "t", NAME)
        async with RemoteGenerator(Worker(client), request_timeout=15) as remote:
            yield remote, stack
            await client.close()


async def test_answers_and_cancellations_cross_the_wire(ask: Ask) -> None:
    async with over_http() as (remote, _):
        gone, *kept = start(remote, *(ask(name=n, seed=i) for i, n in enumerate("abc")))
        await until(remote, lambda stats: stats.running == 3)
        gone.cancel()
        await until(remote, lambda stats: stats.running == 2)
        await remote.resume()
        assert [a.text for a in await asyncio.gather(*kept)] == ["b of 1", "c of 2"]


async def test_a_server_that_goes_away_ends_what_waits(ask: Ask) -> None:
    async with over_http() as (remote, server):
        calls = start(remote, ask(name="a"), ask(name="b"))
        await until(remote, lambda stats: stats.running == 2)
        await server.aclose()
        for error in await end(*calls):
            assert isinstance(error, WorkerError)
            assert "connection lost in collect" in str(error)
        with pytest.raises(WorkerError, match="connection lost in"):
            await remote.generate(ask(name="c"))


async def test_a_closed_client_refuses_at_once(ask: Ask) -> None:
    async with over_http() as (remote, _):
        calls = start(remote, ask(name="a"))
        await until(remote, lambda stats: stats.running == 1)
        await remote._client.close()
        assert [type(e) for e in await end(*calls)] == [WorkerError]
        with pytest.raises(WorkerError, match="after the worker was closed"):
            await remote.generate(ask(name="c"))


@asynccontextmanager
async def process(logs: Path, control_timeout: float) -> AsyncIterator[tuple[RemoteGenerator, int]]:
    """A generator over ``Slow`` in its own process, and the number of that process."""
    here = Path(__file__)
    spec = WorkerSpec(
        name=NAME, target=f"{here.stem}:open_slow", env={"PYTHONPATH": str(here.parent)}
    )
    async with asyncio.timeout(30), LocalScheduler(logs) as scheduler:
        worker = await scheduler.start(spec)
        async with RemoteGenerator(
            worker, request_timeout=15, control_timeout=control_timeout
        ) as remote:
            yield remote, worker.pid


async def test_a_killed_worker_ends_what_waits(ask: Ask, tmp_path: Path) -> None:
    async with process(tmp_path, 10) as (remote, pid):
        calls = start(remote, ask(name="a"), ask(name="b"))
        await until(remote, lambda stats: stats.running == 2)
        os.kill(pid, signal.SIGKILL)
        ended = await end(*calls)
        assert [type(e) for e in ended] == [ConnectionLost] * 2
        with pytest.raises(WorkerError, match="connection lost"):
            await remote.generate(ask(name="a"))


async def test_a_stopped_worker_stalls_what_waits_and_serves_again_when_it_goes_on(
    ask: Ask, tmp_path: Path
) -> None:
    async with process(tmp_path, 1.0) as (remote, pid):
        calls = start(remote, ask(name="a", seed=1))
        await until(remote, lambda stats: stats.running == 1)
        os.kill(pid, signal.SIGSTOP)
        calls += start(remote, ask(name="b", seed=2))
        ended = await end(*calls)
        assert [type(e) for e in ended] == [StallError] * 2
        os.kill(pid, signal.SIGCONT)
        again = start(remote, ask(name="a", seed=3))
        await until(remote, lambda stats: (stats.prefill_tokens, stats.running) == (3, 1))
        await remote.resume()
        assert [a.text for a in await asyncio.gather(*again)] == ["a of 3"]


@pytest.mark.invariant("I12")
async def test_a_loss_that_cannot_be_recorded_ends_what_waits_and_says_why(
    client: Client, ask: Ask
) -> None:
    def full_disk(_: str) -> None:
        raise CheckpointError("run.db: No space left on device")

    async with (
        asyncio.timeout(20),
        RemoteGenerator(Worker(client), request_timeout=15, on_lost_reply=full_disk) as remote,
    ):
        calls = start(remote, ask(name="a"))
        await client.submitted()
        (await client.next("collect")).reply.set_exception(ConnectionLost("lost"))
        (await client.next("collect")).reply.set_result([])
        assert [str(e) for e in await end(*calls)] == ["run.db: No space left on device"]
        with pytest.raises(CheckpointError, match="No space left"):
            await remote.until_broken()
        with pytest.raises(WorkerError, match="not open for request b"):
            await remote.generate(ask(name="b"))
