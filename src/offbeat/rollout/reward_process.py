"""One reward process as the controller sees it: start it, give it jobs, kill it.

Owns a child process, its process group and its end of the socketpair; knows no deadlines, no queue
and no rewards. There is no task in here: replies and the child's end arrive as event-loop callbacks
and resolve futures, so whoever awaits a job may be canceled at any moment without leaving anything
behind.

Consumes the messages of reward_wire.py; produces one ending per job; waits for the child; unblocked
by its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from offbeat.errors import ConfigError, WorkerError
from offbeat.rollout.reward_wire import (
    CELL,
    LENGTH,
    Answer,
    Answers,
    Call,
    Cancel,
    Canceled,
    Failed,
    FromWorker,
    Load,
    Loaded,
    LoadFailed,
    ToWorker,
    frame,
    read_reply,
)

GRACE_SECONDS = 0.5
"""How long an asynchronous job may take to acknowledge a cancellation; then its process dies."""

LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The process ended before the job did. ``blamed``: it was this job that ran at that moment."""

    reason: str
    blamed: bool


Ending: TypeAlias = Answer | Answers | Failed | Canceled | Lost


class _Board:
    """Who waits for what of one process: written by its callbacks, read by the jobs."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded | LoadFailed] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.unlinked: asyncio.Future[None] = loop.create_future()
        self.jobs: dict[int, asyncio.Future[Ending]] = {}

    def deliver(self, message: FromWorker) -> None:
        if isinstance(message, Loaded | LoadFailed):
            if not self.loaded.done():
                self.loaded.set_result(message)
            return
        future = self.jobs.pop(message.job, None)
        if future is not None and not future.done():
            future.set_result(message)

    def lose_all(self, blame: int, reason: str) -> None:
        for job, future in self.jobs.items():
            if not future.done():
                future.set_result(Lost(reason=reason, blamed=job == blame))
        self.jobs.clear()


class _Link(asyncio.Protocol):
    """Cuts the child's bytes into messages."""

    def __init__(self, board: _Board):
        self._board = board
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + size
            if len(self._received) < end:
                return
            payload = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            self._board.deliver(read_reply(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._board.unlinked.done():
            self._board.unlinked.set_result(None)


class _Watch(asyncio.SubprocessProtocol):
    """Learns of the child's end."""

    def __init__(self, board: _Board):
        self._board = board
        self._transport: asyncio.SubprocessTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def process_exited(self) -> None:
        if not self._board.exited.done():
            code = self._transport.get_returncode()
            self._board.exited.set_result(-signal.SIGKILL if code is None else code)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = next((s.name for s in signal.Signals if s == -code), "signal")
    hint = "; out of memory?" if code == -signal.SIGKILL else ""
    return f"exit code {code} ({name}{hint})"


def _environment() -> dict[str, str]:
    """One thread per process: the workers run beside each other and beside the trainer."""
    one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(one, "1"), "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def _output(log_path: Path | None) -> Iterator[int]:
    """Where a child's prints and errors go: the end of ``log_path``, or this process's stderr."""
    if log_path is None:
        yield 2
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _tail(log_path: Path | None) -> str:
    if log_path is None:
        return "its output went to this process's stderr"
    with contextlib.suppress(OSError):
        text = log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"end of {log_path}:\n{text}"
    return f"{log_path} cannot be read"


def _shared_cell() -> tuple[int, mmap.mmap]:
    """Eight bytes that this process and its child share, and the descriptor to hand on."""
    descriptor = os.memfd_create("offbeat-reward")
    os.ftruncate(descriptor, CELL.size)
    return descriptor, mmap.mmap(descriptor, CELL.size)


class RewardProcess:
    """A running child and its function; ``alive`` until killed or found dead."""

    def __init__(
        self,
        board: _Board,
        link: asyncio.WriteTransport,
        transport: asyncio.SubprocessTransport,
        cell: mmap.mmap,
        log_path: Path | None,
    ):
        self._board = board
        self._link = link
        self._transport = transport
        self._cell = cell
        self._log_path = log_path
        self.pid = transport.get_pid()
        self.alive = True
        self.ended_by = ""
        """Why it is not alive any more."""
        self.loaded: Loaded | None = None
        board.exited.add_done_callback(self._on_exit)
        board.unlinked.add_done_callback(self._on_unlinked)

    @classmethod
    async def spawn(cls, load: Load, log_path: Path | None) -> RewardProcess:
        """Start a child and send it its function; ``ready`` tells whether it could load it."""
        loop = asyncio.get_running_loop()
        board = _Board()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed_on:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            handed_on.callback(theirs.close)
            descriptor, cell = _shared_cell()
            handed_on.callback(os.close, descriptor)
            output = handed_on.enter_context(_output(log_path))
            link, _ = await loop.create_unix_connection(lambda: _Link(board), sock=ours)
            undo.callback(link.abort)
            command = [sys.executable, "-P", "-m", "offbeat.rollout.reward_worker"]
            numbers = [str(n) for n in (theirs.fileno(), descriptor, os.getpid())]
            transport, _ = await loop.subprocess_exec(
                lambda: _Watch(board),
                *command,
                *numbers,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(theirs.fileno(), descriptor),
                env=_environment(),
            )
            undo.pop_all()
        process = cls(board, link, transport, cell, log_path)
        process._send(load)
        return process

    async def ready(self, seconds: float) -> None:
        """Wait until the function is loaded.

        Raises:
            ConfigError: the function cannot be loaded.
            WorkerError: the process died or did not load it within ``seconds``.
        """
        first = (self._board.loaded, self._board.exited)
        await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._board.loaded.done():
            message = self._board.loaded.result()
            if isinstance(message, Loaded):
                self.loaded = message
                return
            self.kill("it could not load the reward function")
            error = ConfigError(message.reason)
            if message.traceback:
                error.add_note(f"in the reward process:\n{message.traceback.rstrip()}")
            raise error
        if self._board.exited.done():
            what = f"died: {_exit_text(self._board.exited.result())}"
        else:
            what = f"did not load the reward function within {seconds:g} s"
        self.kill(what)
        raise WorkerError(f"reward process {self.pid} {what}; {_tail(self._log_path)}")

    @property
    def concurrent(self) -> bool:
        """Whether its function takes many jobs at a time."""
        return self.loaded is not None and self.loaded.concurrent

    def submit(self, job: int, request: bytes) -> asyncio.Future[Ending]:
        """Give the child a job; the future always resolves, to ``Lost`` if the child ends first."""
        future: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        if self.alive:
            self._board.jobs[job] = future
            self._send(Call(job=job, request=request))
        else:
            future.set_result(Lost(reason="the reward process had ended", blamed=False))
        return future

    def cancel(self, job: int) -> None:
        """Ask the child to cancel an asynchronous job."""
        if self.alive:
            self._send(Cancel(job=job))

    def abandon(self, job: int) -> None:
        """End a job that nobody waits for any more, without waiting: now, or after the grace."""
        if not self.concurrent:
            self.kill("its call was cancelled")
            return
        self.cancel(job)
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self.kill_blocked, job)

    def kill_blocked(self, job: int) -> None:
        """Kill the child if ``job`` is unanswered; blame who holds its loop, or this job."""
        if job not in self._board.jobs:
            return
        (running,) = CELL.unpack_from(self._cell)
        blame = running if running in self._board.jobs else job
        reason = f"blocked the event loop of its reward process for more than {GRACE_SECONDS:g} s"
        self._board.lose_all(blame, f"{reason}; make it a plain (not async) function")
        self.kill(reason)

    def kill(self, why: str) -> None:
        """Kill the whole process group now; jobs still open are lost and nobody is blamed."""
        self._end(why)
        self._board.lose_all(0, "the reward process was killed")
        if not self._board.exited.done():
            self._kill_group()

    async def gone(self) -> None:
        """Wait until the child is reaped and the socket closed."""
        await asyncio.wait((self._board.exited, self._board.unlinked))

    @property
    def reaped(self) -> bool:
        return self._board.exited.done() and self._board.unlinked.done()

    def _end(self, why: str) -> None:
        self.alive = False
        self.ended_by = self.ended_by or why

    def _send(self, message: ToWorker) -> None:
        self._link.write(frame(message))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _on_exit(self, exited: asyncio.Future[int]) -> None:
        died = f"reward process died: {_exit_text(exited.result())}"
        self._end(died)
        self._kill_group()  # what the function started outlives its leader otherwise
        (running,) = CELL.unpack_from(self._cell)
        self._board.lose_all(running, died)
        self._cell.close()
        self._link.abort()
        self._transport.close()

    def _on_unlinked(self, _: asyncio.Future[None]) -> None:
        # A child without its socket is on its way out; the delay lets it report its own exit code.
        self.alive = False
        if not self._board.exited.done():
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self.kill, "it closed its socket")
