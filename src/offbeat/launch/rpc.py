"""Typed calls over HTTP: ``serve`` a service, call it with an ``RpcClient``.

Owns the transport: routes, the token, size limits, and what a broken connection or a passed
deadline is called. Knows neither what the methods do (``calls`` does) nor who started the process.

    POST /rpc/<method>   msgpack array of arguments in, msgpack result out; 500 carries a Fault
    GET  /health         answered by the event loop itself, without touching the service

Every request carries the run's token; without it any path is answered with 401, also one that does
not exist, before the body is read. Cancelling a call closes its connection, and the server then
cancels the method.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

from offbeat.errors import ConnectionLost, OffbeatError, StallError, WorkerError
from offbeat.launch.calls import Dispatcher, Fault
from offbeat.launch.codec import decode, encode

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 30
LARGE_BODY_BYTES = 1 << 20
"""Above this aiohttp wants a file object, so that it can write in pieces between other events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcServer:
    """A listening server; ``url`` holds the port that was really bound."""

    url: str


@asynccontextmanager
async def serve(
    service: object,
    methods: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str,
    max_bytes: int = MAX_REQUEST_BYTES,
) -> AsyncIterator[RpcServer]:
    """Offer ``methods`` of ``service`` until the context ends; calls still running are cancelled.

    Raises:
        TypeError: a method cannot be offered; see ``Dispatcher``.
        OSError: the address cannot be bound.
    """
    from aiohttp import web

    from offbeat.launch.web import serve_application

    app = web.Application(client_max_size=max_bytes, middlewares=[_only_with(token)])
    endpoint = _Endpoint(Dispatcher(service, methods))
    app.router.add_post("/rpc/{method}", endpoint.call)
    app.router.add_get("/health", endpoint.health)
    with socket.create_server((host, port)) as at:
        url = f"http://{host}:{at.getsockname()[1]}"
        async with serve_application(app, at, lambda _problem: web.Response(status=400)):
            yield RpcServer(url=url)


def _only_with(token: str) -> Middleware:
    """Lets in who has the token; what there is behind it is nobody else's business."""
    from aiohttp import web

    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized
        return await handler(request)

    return guard


class _Endpoint:
    """The two request handlers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def call(self, request: web.Request) -> web.Response:
        try:
            return _reply(200, await self._dispatcher.invoke(*await _parts(request)))
        except OffbeatError as exc:
            fault = Fault.of(exc)
            if fault.trace:
                logger.error("%s", fault.trace)
            return _reply(500, encode(fault))

    async def health(self, _request: web.Request) -> web.Response:
        return _reply(200, b"")


async def _parts(request: web.Request) -> tuple[str, bytes]:
    return request.match_info["method"], await request.read()


def _reply(status: int, body: bytes) -> web.Response:
    from aiohttp import web

    return web.Response(status=status, body=_body(body), content_type="application/msgpack")


def _body(data: bytes) -> bytes | io.BytesIO:
    return io.BytesIO(data) if len(data) > LARGE_BODY_BYTES else data


class RpcClient:
    """Calls one worker. Make it inside a running event loop; ``close`` it there too.

    Args:
        url: where ``serve`` listens.
        token: the run's token.
        name: the worker's name, put in front of every error.
    """

    def __init__(self, url: str, token: str, name: str) -> None:
        import aiohttp

        self.url = url
        self.name = name
        self._session = aiohttp.ClientSession(
            # No limit here: admission bounds the calls, and a hidden queue would look like a stall.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {token}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @overload
    async def call(
        self, method: str, *args: object, returns: type[T], timeout: float | None
    ) -> T: ...

    @overload
    async def call(
        self, method: str, *args: object, returns: None = None, timeout: float | None
    ) -> None: ...

    async def call(
        self, method: str, *args: object, returns: type[T] | None = None, timeout: float | None
    ) -> T | None:
        """Call ``method`` and wait for its result.

        Args:
            method: one of the service's ``METHODS``.
            args: positional arguments.
            returns: type of the result.
            timeout: seconds; None waits until the worker answers or its connection breaks.

        Raises:
            StallError: no answer within ``timeout``; the method is cancelled.
            ConnectionLost: the connection broke; the worker may be gone.
            WorkerError: the worker answered with something unexpected, or was closed.
            OffbeatError: what the method raised, as the same class.
        """
        status, data = await self._request("POST", f"/rpc/{method}", encode(args), method, timeout)
        if status == 200:
            return self._decode(method, data, type(None) if returns is None else returns)
        if status == 500:
            raise self._decode(method, data, Fault).exception(self.name)
        raise WorkerError(f"{self.name}: {method} was refused with HTTP status {status}")

    async def health(self, *, timeout: float) -> None:
        """Return when the worker's event loop answers; raises StallError or WorkerError."""
        status, _ = await self._request("GET", "/health", b"", "health", timeout)
        if status != 200:
            raise WorkerError(f"{self.name}: health was refused with HTTP status {status}")

    def _decode(self, method: str, data: bytes, target: type[T]) -> T:
        try:
            return decode(data, target)
        except WorkerError as exc:
            raise WorkerError(f"{self.name}: answer to {method}: {exc}") from exc

    async def _request(
        self, verb: str, path: str, body: bytes, method: str, timeout: float | None
    ) -> tuple[int, bytes]:
        import aiohttp

        if self._session.closed:
            raise WorkerError(f"{self.name}: {method} was called after the worker was closed")
        try:
            async with (
                asyncio.timeout(timeout) as deadline,
                self._session.request(
                    verb, self.url + path, data=_body(body), allow_redirects=False
                ) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as exc:
            if deadline.expired():
                raise StallError(f"{self.name}: no answer to {method} in {timeout:g} s") from None
            raise ConnectionLost(f"{self.name}: connection lost in {method}: {exc!r}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ConnectionLost(f"{self.name}: connection lost in {method}: {exc!r}") from exc

    async def close(self) -> None:
        """Close every connection; calls still waiting end with WorkerError."""
        await self._session.close()
