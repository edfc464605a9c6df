"""From ``"module:attr"`` to a service that can be called, the same way in every kind of worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from offbeat.config.plugins import resolve
from offbeat.errors import WorkerError, boundary
from offbeat.launch.protocols import Service, ServiceFactory


@asynccontextmanager
async def open_target(target: str, payload: bytes) -> AsyncIterator[Service]:
    """The service that ``target`` opens from ``payload``, until the context ends.

    Raises:
        ConfigError: ``target`` cannot be resolved.
        OffbeatError: what the factory raised; anything foreign as ``WorkerError``.
    """
    async with AsyncExitStack() as stack:
        with boundary(WorkerError, f"opening {target}"):
            factory = cast(ServiceFactory, resolve(target, None, "worker target"))
            service = await stack.enter_async_context(factory(payload))
        yield service
