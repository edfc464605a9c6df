"""The generator process: one engine thread, one event loop, and the calls between them.

Consumes ``GenerateRequest``s and weight updates over RPC; produces ``Completion``s. The engine
thread is the only one that touches the model: between two steps it takes whatever the loop posted
(requests, aborts, a weight swap). ``stats``, ``info`` and ``resume`` answer from the loop and never
wait for a forward pass; ``pause`` and ``abort`` wait at most for the one that is running.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import torch

from offbeat.data.tokens import TextCodec
from offbeat.errors import GenerationError, OffbeatError, boundary
from offbeat.generate.client import Delivery, EngineInfo, GeneratorSpec
from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.selfcheck import compare_paths
from offbeat.generate.mailbox import Mailbox
from offbeat.launch.codec import decode
from offbeat.model.linear import pack_for_inference, use_onednn
from offbeat.model.load import load_model, resolve_device, resolve_dtype
from offbeat.types import Completion, GenerateRequest, GeneratorStats, PolicyVersion, WeightUpdate
from offbeat.weights.memory import MemorySubscriber, Parameters

log = logging.getLogger(__name__)
T = TypeVar("T")


class GeneratorService:
    """Serves one engine. Create with ``open_service``."""

    METHODS = ("submit", "collect", "stage", "commit", "pause", "resume", "abort", "stats", "info")

    def __init__(self, engine: Engine, subscriber: MemorySubscriber, info: EngineInfo) -> None:
        self._engine = engine
        self._subscriber = subscriber
        self._info = info
        self.mailbox = Mailbox(self.generate)
        self._loop = asyncio.get_running_loop()
        self._ids: set[str] = set()
        """Requests with a caller; the loop's."""
        self._callers: dict[str, asyncio.Future[Completion]] = {}
        """Who gets the answer of each request in the engine; the engine thread's."""
        self._streams: dict[str, int] = {}
        """Tokens handed out so far of each streamed request; the engine thread's."""
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._paused = False
        self._closing = False
        self._thread = threading.Thread(target=self._drive, name="engine")
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ``Generator``. Cancelling the call frees the request's slot."""
        if request.request_id in self._ids:
            raise GenerationError(f"request {request.request_id} is already running")
        future: asyncio.Future[Completion] = self._loop.create_future()

        def submit() -> None:
            self._engine.submit(request)
            self._callers[request.request_id] = future
            if request.stream:
                self._streams[request.request_id] = 0

        self._ids.add(request.request_id)
        try:
            await self._on_engine(submit)
            return await future
        except asyncio.CancelledError:
            self._post(lambda: self._deliver(self._engine.abort([request.request_id])))
            raise
        finally:
            self._ids.discard(request.request_id)

    async def submit(self, requests: list[GenerateRequest], cancelled: list[str]) -> None:
        await self.mailbox.submit(requests, cancelled)

    async def collect(self, received: int, seconds: float) -> list[Delivery]:
        return await self.mailbox.collect(received, seconds)

    async def stage(self, update: WeightUpdate) -> None:
        await asyncio.to_thread(self._subscriber.stage, update)

    async def commit(self, version: PolicyVersion) -> float:
        """See ``Generator``. The seconds are those of the swap; what it makes requests compute anew
        comes after it, beside decoding.
        """

        def swap() -> float:
            started = self._loop.time()
            self._engine.swap_weights(lambda: self._subscriber.commit(version), version)
            return self._loop.time() - started

        return await self._on_engine(swap)

    async def pause(self) -> None:
        """Start no further pass; returns when the one that is running has ended."""
        self._paused = True
        await self._on_engine(lambda: None)

    async def resume(self) -> None:
        with self._wake:
            self._paused = False
            self._wake.notify()

    async def abort(self, request_ids: Sequence[str]) -> int:
        def end() -> int:
            ended = self._engine.abort(request_ids)
            self._deliver(ended)
            return len(ended)

        return await self._on_engine(end)

    async def stats(self) -> GeneratorStats:
        engine = self._engine
        return GeneratorStats(
            version=engine.version,
            slots=engine.slots,
            running=engine.running,
            waiting=engine.waiting,
            prefill_tokens=engine.prefill_tokens,
            decode_tokens=engine.decode_tokens,
            finished=engine.finished,
            aborted=engine.aborted,
            paused=self._paused,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            decode_spans=engine.decode_spans.take(),
            prefill_spans=engine.prefill_spans.take(),
        )

    async def info(self) -> EngineInfo:
        return self._info

    async def close(self) -> None:
        """Stop the engine thread; running requests end as cancelled with their callers."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # Between loop and engine thread

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _on_engine(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the engine thread, between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                with boundary(GenerationError, "the engine"):
                    result = work()
            except OffbeatError as exc:
                self._call_loop(_fail, future, exc)
            else:
                self._call_loop(_resolve, future, result)

        self._post(run)
        return await future

    def _call_loop(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _deliver(self, ended: Sequence[tuple[GenerateRequest, Completion]]) -> None:
        """Hand completions to their callers, in one turn of the loop; on the engine thread."""
        answers = [(self._callers.pop(r.request_id), completion) for r, completion in ended]
        for request, _ in ended:
            self._streams.pop(request.request_id, None)

        def resolve() -> None:
            for future, completion in answers:
                _resolve(future, completion)

        self._call_loop(resolve)

    def _drive(self) -> None:
        """The engine thread: commands first, then a step, asleep while there is nothing to do."""
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                commands = list(self._commands)
                self._commands.clear()
            if self._closing:
                return
            for command in commands:
                command()
            if not self._paused and (self._engine.running or self._engine.waiting):
                self._step()

    def _has_work(self) -> bool:
        busy = not self._paused and (self._engine.running or self._engine.waiting)
        return bool(self._commands) or self._closing or bool(busy)

    def _step(self) -> None:
        """One step; when it fails, every request in the engine ends with the reason.

        When a request fails, only that one does.
        """
        try:
            with boundary(GenerationError, "a forward pass"):
                finished = self._engine.step()
        except OffbeatError as exc:
            log.exception("a forward pass failed")
            self._engine.reset()
            for future in self._callers.values():
                self._call_loop(_fail, future, exc)
            self._callers.clear()
            self._streams.clear()
        else:
            for request, error in self._engine.take_failed():
                log.error("%s", error)
                self._streams.pop(request.request_id, None)
                self._call_loop(_fail, self._callers.pop(request.request_id), error)
            if finished:
                self._deliver(finished)
            if self._streams:
                self._report()

    def _report(self) -> None:
        """Hand out what streamed requests wrote; on the engine thread."""
        fresh = self._engine.written(self._streams)
        for name, progress in fresh.items():
            self._streams[name] += len(progress.token_ids)
        if fresh:
            self._call_loop(self.mailbox.wrote, fresh)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _load(spec: GeneratorSpec) -> tuple[Engine, MemorySubscriber, EngineInfo]:
    device = resolve_device(spec.device)
    dtype = resolve_dtype(spec.dtype, device)
    model = load_model(spec.model_path, dtype=dtype, device=device, max_len=spec.max_len)
    codec = TextCodec.open(spec.model_path)
    onednn = use_onednn(spec.onednn_linears, dtype, model)
    live = pack_for_inference(model) if onednn else Parameters(dict(model.named_parameters()))

    def engine(slots: int) -> Engine:
        return Engine(
            model,
            slots=slots,
            max_len=spec.max_len,
            eos_token_ids=codec.eos_token_ids,
            decode=codec.decode,
            recompute_kv=spec.recompute_kv,
        )

    check = compare_paths(model, engine(TEST_SLOTS), max_len=spec.max_len)
    if not check.bitwise:
        log.warning("cached decode and packed forward differ by up to %.1e nats", check.max_error)
    info = EngineInfo(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        bitwise=check.bitwise,
        max_error=check.max_error,
        parameters=sum(t.numel() for t in live.tensors.values()),
        onednn=onednn,
    )
    return engine(spec.slots), MemorySubscriber(live), info


TEST_SLOTS = 4
"""Slots of the start-up comparison."""


@asynccontextmanager
async def open_service(payload: bytes) -> AsyncIterator[GeneratorService]:
    """Load the model and serve it; ``payload`` is an encoded ``GeneratorSpec``."""
    spec = decode(payload, GeneratorSpec)
    engine, subscriber, info = await asyncio.to_thread(_load, spec)
    service = GeneratorService(engine, subscriber, info)
    try:
        async with service.mailbox:
            yield service
    finally:
        await service.close()
