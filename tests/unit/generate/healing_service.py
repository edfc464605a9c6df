"""A generator process without a model: its answers say which weights it holds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

from offbeat.errors import WeightSyncError
from offbeat.generate.client import Delivery
from offbeat.generate.mailbox import Mailbox
from offbeat.types import (
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    StopReason,
    WeightUpdate,
)

HOLD = 7
"""A prompt of this token is never answered by the first process of a folder."""
BLOCK = 8
"""A prompt of this token stops the first process of a folder, as SIGSTOP does."""
NEVER = 9
"""A prompt of this token is never answered."""


class Service:
    """``GeneratorService`` as the client sees it."""

    METHODS: ClassVar[tuple[str, ...]] = ("submit", "collect", "stage", "commit", "stats")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = PolicyVersion(0)
        self.staged: PolicyVersion | None = None
        self.mailbox = Mailbox(self.generate)
        self.is_first = not (folder / "seen").exists()
        if (folder / "born-dead").exists():
            (folder / "born-dead").unlink()
            os._exit(9)

    async def generate(self, request: GenerateRequest) -> Completion:
        asked = int(request.prompt_ids[0])
        if asked == NEVER or (asked in (HOLD, BLOCK) and self.is_first):
            (self.folder / "seen").touch()
            if asked == BLOCK:
                os.kill(os.getpid(), signal.SIGSTOP)
            await asyncio.Event().wait()
        n = request.params.max_new_tokens
        return Completion(
            token_ids=np.full(n, request.seed % 100, dtype=np.int64),
            logprobs=np.zeros(n, dtype=np.float32),
            versions=np.full(n, self.version, dtype=np.int64),
            stop_reason=StopReason.LENGTH,
            text="",
        )

    async def submit(self, requests: list[GenerateRequest], cancelled: list[str]) -> None:
        await self.mailbox.submit(requests, cancelled)

    async def collect(self, received: int, seconds: float) -> list[Delivery]:
        return await self.mailbox.collect(received, seconds)

    async def stage(self, update: WeightUpdate) -> None:
        self.staged = update.version

    async def commit(self, version: PolicyVersion) -> float:
        if self.staged != version:
            raise WeightSyncError(f"version {version} is not staged")
        if (self.folder / "die-at-commit").exists():
            (self.folder / "die-at-commit").unlink()
            os._exit(9)
        self.version = version
        return 0.25

    async def stats(self) -> GeneratorStats:
        return GeneratorStats(
            version=self.version,
            slots=1,
            running=0,
            waiting=0,
            prefill_tokens=0,
            decode_tokens=0,
            finished=0,
            aborted=0,
            paused=False,
            peak_rss_bytes=0,
        )


@asynccontextmanager
async def open_service(payload: bytes) -> AsyncIterator[Service]:
    service = Service(Path(payload.decode()))
    async with service.mailbox:
        yield service
