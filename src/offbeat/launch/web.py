"""An aiohttp application at a socket, as strangers may see it.

Owns the life of the server, and what becomes of bytes that are no HTTP request: one answer and one
debug message, where aiohttp logs a traceback and tells its version. Knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.2
"""What a request may still take when the server closes; then it is cancelled."""

Refuse = Callable[[str], web.Response]
"""The answer to what is no HTTP request, given what is wrong with it."""


@asynccontextmanager
async def serve_application(
    app: web.Application, at: socket.socket, refuse: Refuse
) -> AsyncIterator[None]:
    """Answer at the listening socket ``at``, which is closed with the context.

    A request whose client hangs up is cancelled.
    """
    app.on_response_prepare.append(_hide_server)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS
    )
    loop = asyncio.get_running_loop()
    try:
        await runner.setup()
        manager = runner.server
        assert manager is not None, "setup has made it"
        listening = await loop.create_server(
            lambda: _Connection(manager, loop=loop, refuse=refuse), sock=at
        )
        try:
            yield
        finally:
            listening.close()
    finally:
        await runner.cleanup()


class _Connection(web.RequestHandler):
    """One client."""

    def __init__(
        self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, refuse: Refuse
    ) -> None:
        # None is how aiohttp is told to write no log of accesses.
        super().__init__(manager, loop=loop, access_log=None)  # type: ignore[arg-type]  # see above
        self._refuse = refuse

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self.log_exception("what came from %s is no HTTP request", request.remote, exc_info=exc)
        response = self._refuse(f"not an HTTP request: {' '.join(exc.message.split())}")
        # There is no route whose signal could take it away; empty, aiohttp does not fill it in.
        response.headers["Server"] = ""
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A client's mistake is no error of this process."""
        if isinstance(kw.get("exc_info"), (HttpProcessingError, web.RequestPayloadError)):
            log.debug(*args, **kw)
        else:
            super().log_exception(*args, **kw)


async def _hide_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Leave out which server of which version answers; a signal handler of an application."""
    response.headers.pop("Server", None)
