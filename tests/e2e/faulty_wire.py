"""A wire between controller and generator that loses, repeats or holds up what goes over it.

Put beside a configuration and named as ``rollout.workflow``, it is loaded by the controller before
any worker starts, and takes its place at the seam where schedulers are chosen: every call to a
generator then goes through an HTTP proxy. ``OFFBEAT_WIRE`` names what the proxy does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from offbeat.launch import scheduler
from offbeat.launch.local import LocalScheduler
from offbeat.rollout.rlvr import RLVRWorkflow

FAULT = os.environ["OFFBEAT_WIRE"]
NO_ANSWERS = b"\x90"
"""An empty array in msgpack: what ``collect`` returns when nothing was answered."""

AFTER = 5
"""Calls of one kind that go through before the one at which something happens."""


class Workflow(RLVRWorkflow):
    """The usual one; this module is here for what it does to the wire."""


class Wire:
    """One generator's calls; what happens once happens to the first process only."""

    passed = 0

    def __init__(self, upstream: str, pid: int, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._pid = pid
        self._session = session
        self._answers = b""
        self._deaf = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward one call, or do to it what ``FAULT`` says."""
        method = request.path.rpartition("/")[2]
        if method == "collect":
            return await self._collect(request)
        if method == "submit" and FAULT == "repeat-requests":
            await self._forward(request)
        if method == "submit" and FAULT == "cut-request" and self._turn():
            return self._cut(request)
        if method == "commit" and FAULT == "stop-at-commit" and self._turn():
            os.kill(self._pid, signal.SIGSTOP)
            (Path(__file__).parent / "stopped").touch()
        return _reply(*await self._forward(request))

    async def _collect(self, request: web.Request) -> web.StreamResponse:
        again, self._answers = self._answers, b""
        if again:
            return _reply(200, again)
        status, body = await self._forward(request)
        if body != NO_ANSWERS and FAULT == "repeat-answers":
            self._answers = body
        if body != NO_ANSWERS and FAULT in ("cut", "swallow", "deaf") and self._turn():
            if FAULT == "swallow":
                await asyncio.Event().wait()
            self._deaf = FAULT == "deaf"
            return self._cut(request)
        return self._cut(request) if self._deaf else _reply(status, body)

    def _cut(self, request: web.Request) -> web.StreamResponse:
        """End the connection instead of the call."""
        assert request.transport is not None
        request.transport.abort()
        return _reply(200, b"")

    def _turn(self) -> bool:
        Wire.passed += 1
        return Wire.passed == AFTER

    async def _forward(self, request: web.Request) -> tuple[int, bytes]:
        url, headers = self._upstream + request.path, dict(request.headers)
        async with self._session.request(
            request.method, url, data=await request.read(), headers=headers
        ) as response:
            return response.status, await response.read()


def _reply(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/msgpack")


class FaultyScheduler(LocalScheduler):
    """Local processes behind such wires."""

    async def __aenter__(self) -> Any:
        self._wires = AsyncExitStack()
        self._session = await self._wires.enter_async_context(aiohttp.ClientSession())
        return await super().__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        await self._wires.aclose()

    async def start(self, spec: Any) -> Any:
        """A worker; a generator's client is pointed at the proxy."""
        worker = await super().start(spec)
        if spec.name.startswith("generator"):
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route(
                "*", "/{path:.*}", Wire(worker.client.url, worker.pid, self._session).handle
            )
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
            )
            await runner.setup()
            self._wires.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            worker.client.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return worker


scheduler.SCHEDULERS["local"] = FaultyScheduler  # type: ignore[index]  # a fault in its place
