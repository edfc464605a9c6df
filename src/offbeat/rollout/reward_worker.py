"""One reward process: ``python -m offbeat.rollout.reward_worker SOCKET CELL PARENT``.

Owns the user's reward function and calls it: synchronous functions one at a time in the main thread
(libraries that set ``signal.alarm`` need it), asynchronous ones many at a time on its event loop.
Knows no deadline: the controller kills the whole process group when a job is late. Imports neither
torch, transformers nor aiohttp by itself.

SOCKET and CELL are inherited descriptors: the socketpair of reward_wire.py, and 8 bytes of shared
memory that name the job running at this moment, so that a process that dies or blocks takes down
that job only.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import mmap
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import cast

from offbeat.config.plugins import resolve
from offbeat.errors import ConfigError, OffbeatError, RewardError, boundary
from offbeat.rollout.reward_value import reward_of
from offbeat.rollout.reward_wire import (
    CELL,
    LENGTH,
    Answer,
    Answers,
    Call,
    Cancel,
    Canceled,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    LoadNamed,
    LoadPickled,
    ToWorker,
    frame,
    read_order,
)
from offbeat.rollout.signatures import Arguments, Request, RewardFn, RewardFunction

PR_SET_PDEATHSIG = 1
MAX_TEXT = 20_000
"""Characters of a traceback that are kept, from its end."""

MAX_REASON = 2_000
"""Characters of an exception's text that are kept, from its beginning."""

_CALLING = "the reward function raised"


def _plain(text: str) -> str:
    """``text`` as it can be encoded: lone surrogates replaced, the end kept when it is long."""
    return text[-MAX_TEXT:].encode("utf-8", "replace").decode()


def _reason(text: str) -> str:
    """``text`` for one message, which it does not fill by itself."""
    more = f"... ({len(text)} characters)" if len(text) > MAX_REASON else ""
    return _plain(text[:MAX_REASON] + more)


def _own_cause(exc: BaseException) -> BaseException:
    """The user's exception, without the wrapper that ``boundary`` put around it."""
    if type(exc) in (RewardError, ConfigError) and exc.__cause__ is not None:
        return exc.__cause__
    return exc


def _trace(exc: BaseException) -> str:
    return _plain("".join(traceback.format_exception(exc)))


def _failed(job: int, exc: BaseException) -> Failed:
    wrapped = type(exc) is RewardError and str(exc).startswith(_CALLING)
    cause = _own_cause(exc) if wrapped else exc
    text = str(cause)
    name = type(cause).__name__
    if isinstance(cause, OffbeatError):  # written for the user as it is
        return Failed(job=job, error=name, reason=_reason(text), traceback="")
    return Failed(
        job=job,
        error=name,
        reason=_reason(f"{name}: {text}" if text else name),
        traceback=_trace(cause),
    )


def _answer(job: int, returned: object) -> Answer | Failed:
    try:
        value, parts = reward_of(returned)
    except RewardError as exc:
        return _failed(job, exc)
    return Answer(job=job, value=value, parts=parts)


def _reply(
    reward: RewardFunction, job: int, request: Request, returned: object
) -> Answer | Answers | Failed:
    """What the function returned, checked: one number, or one for each answer."""
    if isinstance(request, Arguments):
        return _answer(job, returned)
    values = reward.values(request, returned)
    return Answers(job=job, each=[_answer(job, value) for value in values])


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _run_sync(reward: RewardFunction, call: Call) -> Answer | Answers | Failed:
    """Call the function; ``sys.exit`` and Ctrl-C raised by it are failures like any other."""
    try:
        with boundary(RewardError, _CALLING):
            request = pickle.loads(call.request)
            returned = reward.call(request)
            if inspect.isawaitable(returned):  # e.g. a lambda around a coroutine function
                returned = asyncio.run(_awaited(returned))
            return _reply(reward, call.job, request, returned)
    except (OffbeatError, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as exc:
        return _failed(call.job, exc)


class _Steps(Generator[object, object, object]):
    """Drives a coroutine and names its job in ``cell`` while the event loop runs a step of it."""

    def __init__(self, coroutine: Coroutine[object, object, object], job: int, cell: mmap.mmap):
        self._coroutine = coroutine
        self._job = job
        self._cell = cell

    def __await__(self) -> Generator[object, object, object]:
        return self

    def send(self, value: object) -> object:
        CELL.pack_into(self._cell, 0, self._job)
        try:
            return self._coroutine.send(value)
        finally:
            CELL.pack_into(self._cell, 0, 0)

    def throw(self, error: BaseException) -> object:  # type: ignore[override]  # await passes one argument
        CELL.pack_into(self._cell, 0, self._job)
        try:
            return self._coroutine.throw(error)
        finally:
            CELL.pack_into(self._cell, 0, 0)


async def _run_async(
    reward: RewardFunction, call: Call, cell: mmap.mmap
) -> Answer | Answers | Failed:
    """Await the function; cancellation passes, ``sys.exit`` must not end the event loop."""
    try:
        with boundary(RewardError, _CALLING):
            request = pickle.loads(call.request)
            coroutine = cast("Coroutine[object, object, object]", reward.call(request))
            returned = await _Steps(coroutine, call.job, cell)
            return _reply(reward, call.job, request, returned)
    except (OffbeatError, SystemExit, KeyboardInterrupt) as exc:
        return _failed(call.job, exc)


def _receive(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes, or fewer when the controller closed its end."""
    received = bytearray()
    while len(received) < size:
        chunk = sock.recv(size - len(received))
        if not chunk:
            break
        received += chunk
    return bytes(received)


def _read(sock: socket.socket) -> ToWorker | None:
    """The next message; None when the controller closed its end."""
    header = _receive(sock, LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    payload = _receive(sock, size)
    return read_order(payload) if len(payload) == size else None


def _serve_sync(reward: RewardFunction, sock: socket.socket, cell: mmap.mmap) -> None:
    while (message := _read(sock)) is not None:
        assert isinstance(message, Call), message  # a late synchronous job is killed, not canceled
        CELL.pack_into(cell, 0, message.job)
        sock.sendall(frame(_run_sync(reward, message)))
        CELL.pack_into(cell, 0, 0)


async def _next(reader: asyncio.StreamReader) -> ToWorker | None:
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return read_order(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _serve_async(reward: RewardFunction, sock: socket.socket, cell: mmap.mmap) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    running: dict[int, asyncio.Task[Answer | Answers | Failed]] = {}

    def reply(job: int, task: asyncio.Task[Answer | Answers | Failed]) -> None:
        # A done callback: a job canceled before its first step runs no code that could answer.
        del running[job]
        writer.write(frame(Canceled(job=job) if task.cancelled() else task.result()))

    async with asyncio.TaskGroup() as jobs:
        while (message := await _next(reader)) is not None:
            if isinstance(message, Call):
                task = jobs.create_task(_run_async(reward, message, cell))
                running[message.job] = task
                task.add_done_callback(partial(reply, message.job))
            elif isinstance(message, Cancel) and message.job in running:
                running[message.job].cancel()
        for task in running.values():
            task.cancel()


def _is_async(fn: RewardFn) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _load(order: Load) -> RewardFunction:
    """The function that ``order`` names, with its fixed arguments. Raises ConfigError."""
    args: dict[str, object] = pickle.loads(order.args)
    target = _resolved(order)
    if isinstance(target, type):
        with boundary(ConfigError, f"{order.key}: making a {target.__name__}"):
            target, args = target(**args), {}
    if not callable(target):
        raise ConfigError(f"{order.key}: {target!r} is not callable")
    return RewardFunction.of(target, args, order.key)


def _resolved(order: Load) -> object:
    """The object that ``order`` names or holds. Raises ConfigError."""
    known = set(sys.path)
    sys.path.extend(entry for entry in order.sys_path if entry not in known)
    target: object
    if isinstance(order, LoadNamed):
        search_dir = Path(order.search_dir) if order.search_dir else None
        target = resolve(order.spec, search_dir, order.key)
    else:
        with boundary(ConfigError, f"{order.key}: cannot be rebuilt in the reward process"):
            target = pickle.loads(order.pickled)
    # A wrapped reward function that is named by a spec stands for the function inside.
    target = getattr(target, "__reward_fn__", target)
    if isinstance(target, str):
        folder = order.search_dir if isinstance(order, LoadNamed) else None
        return _resolved(
            LoadNamed(spec=target, search_dir=folder, sys_path=[], args=order.args, key=order.key)
        )
    return target


def _load_and_report(order: ToWorker, sock: socket.socket) -> RewardFunction | None:
    """Load the function and tell the controller; None when it cannot be loaded."""
    assert isinstance(order, LoadNamed | LoadPickled), order  # the first message is always a load
    try:
        reward = _load(order)
    except (ConfigError, SystemExit) as exc:
        cause = _own_cause(exc)
        exited = f"{order.key}: its module called sys.exit"
        reason = str(exc) if isinstance(exc, ConfigError) else exited
        trace = "" if isinstance(cause, ConfigError) else _trace(cause)
        sock.sendall(frame(LoadFailed(reason=_reason(reason), traceback=trace)))
        return None
    loaded = Loaded(
        concurrent=_is_async(reward.fn), batched=reward.is_batched, complaint=reward.complaint
    )
    sock.sendall(frame(loaded))
    return reward


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def main(argv: list[str]) -> None:
    """Serve until the controller closes its end."""
    descriptor, cell_descriptor, parent = (int(word) for word in argv)
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the controller
    faulthandler.enable()
    for inherited in (descriptor, cell_descriptor):
        os.set_inheritable(inherited, False)
    sock = socket.socket(fileno=descriptor)
    cell = mmap.mmap(cell_descriptor, CELL.size)
    order = _read(sock)
    reward = None if order is None else _load_and_report(order, sock)
    if reward is None:
        return
    if _is_async(reward.fn):
        asyncio.run(_serve_async(reward, sock, cell))
    else:
        _serve_sync(reward, sock, cell)


if __name__ == "__main__":
    main(sys.argv[1:])
