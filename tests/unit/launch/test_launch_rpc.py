"""The HTTP side alone: limits, and servers that are not there."""

import asyncio

import numpy as np
import pytest
from launch_services import Echo

from offbeat.errors import WorkerError
from offbeat.launch.rpc import RpcClient, serve


async def test_a_request_over_the_limit_is_refused_and_the_server_lives() -> None:
    async with serve(Echo(), ["add", "total"], token="t", max_bytes=10_000) as server:
        client = RpcClient(server.url, "t", "w-0")
        with pytest.raises(WorkerError, match="w-0: total was refused with HTTP status 413"):
            await client.call("total", np.zeros(20_000, int), [], returns=float, timeout=5)
        assert await client.call("add", 1, returns=int, timeout=5) == 11
        with pytest.raises(WorkerError, match="no method 'nothing'"):
            await client.call("nothing", timeout=5)
        await client.close()


async def test_what_is_no_http_request_is_a_400_that_says_nothing_and_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serve(Echo(), ["add"], token="t") as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.url[len("http://") :].split(":"))
        writer.write(b"POST /rpc/add HTTP/1.1\r\nContent-Length: many\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        client = RpcClient(server.url, "t", "w-0")
        assert await client.call("add", 1, returns=int, timeout=5) == 11
        await client.close()
    assert head.split()[1] == b"400"
    assert b"aiohttp" not in head
    assert body == b""
    assert caplog.messages == []


async def test_a_refused_connection_is_a_worker_error_with_its_name() -> None:
    async with serve(Echo(), ["add"], token="t") as server:
        client = RpcClient(server.url, "t", "w-0")
    with pytest.raises(WorkerError, match=r"^w-0: connection lost in add: ClientConnectorError"):
        await client.call("add", 1, returns=int, timeout=5)
    await client.close()


async def test_a_client_with_another_token_is_told_so() -> None:
    async with serve(Echo(), ["add"], token="t") as server:
        client = RpcClient(server.url, "u", "w-0")
        with pytest.raises(WorkerError, match="w-0: add was refused with HTTP status 401"):
            await client.call("add", 1, returns=int, timeout=5)
        await client.close()


class KeywordOnly:
    async def f(self, *, a: int) -> int:
        return a


class Bare:
    async def f(self, a) -> int:  # type: ignore[no-untyped-def]  # what the test is about
        return 1


@pytest.mark.parametrize(
    ("service", "message"),
    [(KeywordOnly(), "'a' is not positional"), (Bare(), "no annotation for a"),
     (object(), "object.f is not an async method")],
)  # fmt: skip
async def test_a_method_that_cannot_be_offered_is_refused_at_the_start(
    service: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        async with serve(service, ["f"], token="t"):
            pass
