"""Small services for the tests of launch; importable by name in a worker process too."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from offbeat.errors import ModelError, NonFiniteLoss
from offbeat.types import (
    Completion,
    GenerateRequest,
    IntArray,
    PolicyVersion,
    StepReport,
    StopReason,
    WeightUpdate,
)


class Echo:
    """Methods of every shape that a real service has."""

    METHODS: ClassVar[tuple[str, ...]] = (
        "add", "generate", "update", "nothing", "total", "nonfinite", "unexpected", "hang", "seen",
        "wrong_type", "threads", "modules", "spawn_child", "gather", "crash_later", "print_line",
        "block",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.arrived = 0
        self.all_arrived = asyncio.Event()
        self.crash = asyncio.Event()

    async def add(self, a: int, b: int = 10) -> int:
        return a + b

    async def generate(self, request: GenerateRequest) -> Completion:
        assert isinstance(request, GenerateRequest)
        n = len(request.prompt_ids)
        return Completion(
            token_ids=request.prompt_ids[::-1],
            logprobs=-request.prompt_ids.astype("float32"),
            versions=request.prompt_ids * 0 + 7,
            stop_reason=StopReason.LENGTH if n else StopReason.ABORTED,
            text=request.request_id,
        )

    async def update(self, update: WeightUpdate, produce: PolicyVersion) -> StepReport:
        return StepReport(
            version=produce, tokens=update.nbytes, rows=1, started=0.5, ended=1, metrics={"a/b": 2}
        )

    async def nothing(self) -> None:
        return None

    async def total(self, values: IntArray, ids: Sequence[str]) -> float:
        return float(values.sum()) + len(ids)

    async def nonfinite(self) -> None:
        raise NonFiniteLoss("loss is nan at step 3")

    async def unexpected(self) -> None:
        raise KeyError("surprise")

    async def hang(self, key: str) -> None:
        self.events[f"{key}/began"].set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events[f"{key}/cancelled"].set()
            raise

    async def seen(self, what: str) -> None:
        """Return when the ``hang`` with this key ``began``, or was ``cancelled``: ``key/began``."""
        await self.events[what].wait()

    async def block(self) -> None:
        time.sleep(600)  # noqa: ASYNC251

    async def wrong_type(self) -> int:
        return "not a number"  # type: ignore[return-value]  # what the test is about

    async def threads(self) -> list[str]:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "EXTRA")
        return [os.environ.get(name, "") for name in names]

    async def modules(self) -> tuple[list[str], int]:
        """Heavy modules loaded, and resident kilobytes."""
        return [m for m in ("torch", "transformers") if m in sys.modules], _rss_kilobytes()

    async def spawn_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid  # noqa: ASYNC220

    async def gather(self, parties: int) -> int:
        """Return when ``parties`` calls are inside at once."""
        self.arrived += 1
        if self.arrived == parties:
            self.all_arrived.set()
        await self.all_arrived.wait()
        return self.arrived

    async def crash_later(self) -> None:
        self.crash.set()

    async def print_line(self, text: str) -> None:
        print(text)  # noqa: T201


def _rss_kilobytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _mark(path: bytes) -> None:
    Path(path.decode()).write_text("closed", encoding="utf-8")


@asynccontextmanager
async def open_echo(payload: bytes) -> AsyncIterator[Echo]:
    """An ``Echo`` whose background task fails when ``crash_later`` is called."""
    echo = Echo()

    async def background() -> None:
        await echo.crash.wait()
        raise RuntimeError("background task failed")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(background())
        yield echo
        task.cancel()
    if payload:
        _mark(payload)


@asynccontextmanager
async def open_model_error(payload: bytes) -> AsyncIterator[Echo]:
    raise ModelError(f"no config.json in {payload.decode()}")
    yield Echo()


@asynccontextmanager
async def open_zero_division(payload: bytes) -> AsyncIterator[Echo]:
    _ = 1 // len(payload)
    yield Echo()


@asynccontextmanager
async def open_exit(payload: bytes) -> AsyncIterator[Echo]:
    print("last words")  # noqa: T201
    os._exit(3)
    yield Echo()


@asynccontextmanager
async def open_never(payload: bytes) -> AsyncIterator[Echo]:
    await asyncio.Event().wait()
    yield Echo()


@asynccontextmanager
async def open_deaf(payload: bytes) -> AsyncIterator[Echo]:
    """Ignores SIGTERM in the kernel; with ``block`` it hears nothing at all."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 1)
    yield Echo()


class Sync:
    METHODS: ClassVar[tuple[str, ...]] = ("plain",)

    def plain(self) -> int:
        return 1


@asynccontextmanager
async def open_sync(payload: bytes) -> AsyncIterator[Sync]:
    yield Sync()
