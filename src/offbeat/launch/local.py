"""Workers as child processes of this one, on this machine.

Owns every process it started: environment, log file, birth, death and the last signal. Knows no
service. Each worker is its own session, so that Ctrl-C reaches the controller only and one signal
ends a worker together with whatever it started; each dies with the controller (see ``worker``).

The kernel ties a worker's life to the *thread* that started it: use this from the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from offbeat.errors import StallError, WorkerError, boundary
from offbeat.launch.calls import Fault
from offbeat.launch.codec import decode
from offbeat.launch.frames import LENGTH, Birth, WorkerStart, frame
from offbeat.launch.interrupts import patience
from offbeat.launch.protocols import LOG_END, WorkerSpec
from offbeat.launch.rpc import RpcClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

TAIL_LINES = 20
TAIL_BYTES = 16384

KILL_SECONDS = 5.0
"""How long a process may take to disappear after SIGKILL before we say that it cannot be killed."""

LOOPBACK = "127.0.0.1"


class LocalScheduler:
    """Starts workers on this machine; leaving the context ends all of them.

    Args:
        log_dir: folder for ``<worker>.log``, made if missing; a restarted worker appends.
        grace: seconds a worker has for its own cleanup when the context ends.
    """

    def __init__(self, log_dir: Path, *, grace: float = 2.0) -> None:
        self._log_dir = log_dir
        self._grace = grace
        self._token = secrets.token_hex(32)
        self._watchers = asyncio.TaskGroup()
        self._children: set[_Child] = set()
        self._clients: set[RpcClient] = set()

    async def __aenter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        await self._watchers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            async with asyncio.TaskGroup() as closing:
                for child in self._children:
                    closing.create_task(child.stop(self._grace))
        finally:
            for client in self._clients:
                await client.close()
            # Not told of ``exc``: it would cancel the watchers and wrap the run's error in a group.
            await self._watchers.__aexit__(None, None, None)

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        """See ``Scheduler.start``."""
        async with AsyncExitStack() as undo:
            with boundary(WorkerError, f"starting the process {spec.name}"):
                child = await _spawn(spec, self._log_dir / f"{spec.name}.log")
            self._children.add(child)
            self._watchers.create_task(self._watch(child))
            undo.push_async_callback(child.kill)
            url = await _deliver(child, spec, self._token)
            client = RpcClient(url, self._token, spec.name)
            self._clients.add(client)
            undo.pop_all()
        return LocalWorker(child, client, self._clients.discard)

    async def async_call_engine(
        self,
        worker: str,
        method: str,
        *args: object,
        returns: type[T] | None = None,
        timeout: float | None = None,
    ) -> T | None:
        """Call a method of the worker of that name; for who has the scheduler and no handle.

        Args:
            returns: type of the answer; None for a method that answers nothing.
            timeout: seconds; None for as long as the worker lives.

        Raises:
            WorkerError: no worker of that name was started; otherwise as ``WorkerClient.call``.
        """
        clients = {client.name: client for client in self._clients}
        if worker not in clients:
            known = ", ".join(sorted(clients)) or "none"
            raise WorkerError(f"there is no worker {worker!r}; started: {known}")
        if returns is None:
            await clients[worker].call(method, *args, timeout=timeout)
            return None
        return await clients[worker].call(method, *args, returns=returns, timeout=timeout)

    async def _watch(self, child: _Child) -> None:
        await child.watch()
        self._children.discard(child)


class LocalWorker:
    """A ready worker process; see ``WorkerHandle``."""

    def __init__(
        self, child: _Child, client: RpcClient, on_close: Callable[[RpcClient], None]
    ) -> None:
        self._child = child
        self._on_close = on_close
        self.name = child.name
        self.pid = child.pid
        self.client = client

    async def wait(self) -> str:
        """Return when the process has ended: how, and the last lines of its log."""
        await self._child.ended.wait()
        return self._child.describe()

    async def close(self, grace: float = 5.0) -> None:
        """SIGTERM to its group, SIGKILL after ``grace`` seconds; nothing once it has ended."""
        try:
            await self._child.stop(grace)
        finally:
            await self.client.close()
            self._on_close(self.client)


async def _deliver(child: _Child, spec: WorkerSpec, token: str) -> str:
    """Tell the newborn what to serve and return its url."""
    start = WorkerStart(
        name=spec.name, target=spec.target, payload=spec.payload, token=token, host=LOOPBACK
    )
    seconds = spec.start_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            answer = await child.exchange(start)
    except TimeoutError:
        raise StallError(f"{spec.name}: not ready after {seconds:g} s{child.tail()}") from None
    except (OSError, EOFError):
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await child.ended.wait()
        raise WorkerError(f"before it was ready, {child.describe()}") from None
    if isinstance(answer, Fault):
        raise answer.exception(spec.name)
    return answer.url


async def _spawn(spec: WorkerSpec, log_path: Path) -> _Child:
    with ExitStack() as undo:
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs, log_path.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "offbeat.launch.worker", str(os.getpid()), spec.name),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=_environment(spec),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        undo.pop_all()
    return _Child(spec.name, process, reader, writer, log_path, log_start)


_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN keeps a kernel for each shape it has met, torch once more: 1024 in each, which batches of
ever new lengths fill within the hour, to a gigabyte. A pass over a model meets a dozen shapes.
"""


def _environment(spec: WorkerSpec) -> dict[str, str]:
    threads = str(spec.threads)
    return {
        **_KERNEL_CACHES,
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **spec.env,
    }


class _Child:
    """One process and its control connection. ``ended`` is set once, after it has been reaped."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_path: Path,
        log_start: int,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.ended = asyncio.Event()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log_path = log_path
        self._log_start = log_start

    async def watch(self) -> None:
        """Wait for the end, then sweep what the process leaves behind in its group.

        At once, because later the number may belong to somebody else. Whoever waits may do this: an
        event loop that is torn down cancels the task that was made for it.
        """
        await self._process.wait()
        if self.ended.is_set():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._writer.close()
        self.ended.set()

    async def exchange(self, start: WorkerStart) -> Birth:
        """Send ``start``, receive the answer; EOFError or OSError when the process is gone."""
        self._writer.write(frame(start))
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        body = await self._reader.readexactly(length)
        return decode(body, cast("type[Birth]", Birth))

    async def stop(self, grace: float) -> None:
        """Ask the group to end, wait ``grace`` seconds or until somebody hurries, then kill it."""
        asked = time.monotonic()
        self._signal(signal.SIGTERM)
        self._writer.close()
        try:
            async with patience(grace):
                await self.watch()
        except TimeoutError:
            waited = time.monotonic() - asked
            if grace > 0:
                logger.warning(
                    "%s did not stop within %.1f s of SIGTERM: killed", self.name, waited
                )
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the group without asking; returns when the process has been reaped."""
        self._signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self.watch()
        except TimeoutError:
            raise WorkerError(f"{self.name} (pid {self.pid}) survives SIGKILL") from None

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def describe(self) -> str:
        """How the process ended, with the end of its log."""
        code = self._process.returncode
        if code is None:
            how = "left its control connection"
        elif code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-code).name}{hint}"
        else:
            how = f"exited with code {code}"
        return f"{self.name} (pid {self.pid}) {how}{self.tail()}"

    def tail(self) -> str:
        """The last lines this process wrote to its log, introduced by its path; may be empty."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"{LOG_END}{self._log_path}:\n" + "\n".join(lines) if lines else ""
