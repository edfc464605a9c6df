"""Saves in the background: one process that writes folders, and the controller's side of it.

Owns the process, the one save in flight, and the moment at which its error is raised. Knows no
content: a job says where everything lies. Knows no torch.

    save(job)                  returns at once           … the writer copies the source …
    maybe_wait_for_staging()   the source may change     … training goes on, the writer writes …
    next save(), wait() or finalize() waits for the end, and raises what went wrong

At most one save is in flight; nobody has to poll for its end. A process that dies during a save
fails that save; one that dies with nothing to do is replaced by the next save, and counted.

The names are those of trainers that save through ``torch.distributed.checkpoint``. Here no
collective is needed, hence no process groups: what a rank stages lies in shared memory that any
process of its machine can read, and the one controller decides when a save is complete. Why not
``async_save``: see ``docs/checkpoints.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.checkpoint.writer import Copied, Done, Failed, Job, Reply
from offbeat.config import AsyncMode
from offbeat.errors import CheckpointError, OffbeatError, boundary, by_name, true_cause
from offbeat.launch.interrupts import patience

log = logging.getLogger(__name__)

_WRITER_MODULE = "offbeat.checkpoint.writer"
_BACKGROUND_NICE = 10
_EXIT_SECONDS = 5.0

_FAILED_SECONDS = 60.0
"""How long a save that is under way may take when the run has failed."""

DEADLINE_SECONDS = 600.0
"""Bound of every wait for the writer."""


def resolve(mode: AsyncMode) -> AsyncMode:
    """``mode`` with ``AUTO`` decided: ``ASYNC`` where weights can be read through /proc."""
    if mode is not AsyncMode.AUTO:
        return mode
    shared = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
    return AsyncMode.ASYNC if shared else AsyncMode.SYNC


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One finished save.

    ``blocked_seconds`` is what its caller spent in waiting for it: for its beginning, for the copy
    of its source, and for its end where somebody asked for that. ``background_seconds`` are the
    writer's, from the job's arrival to the folder in place.
    """

    step: int
    path: Path
    mode: AsyncMode
    nbytes: int
    blocked_seconds: float
    background_seconds: float


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """The save that goes on; ``staged``: its source was copied."""

    step: int
    path: Path
    staged: bool = False
    blocked_seconds: float = 0.0

    def error(self, what: str, kind: type[OffbeatError] = CheckpointError) -> OffbeatError:
        return kind(f"step {self.step}: saving {self.path} {what}")


class _WriterProcess:
    """The child and its two pipes. ``mourned``: its death was already raised."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._jobs, self._replies = process.stdin, process.stdout
        self.mourned = False

    @classmethod
    async def start(cls, nice: int) -> _WriterProcess:
        # -P: the working folder's files must not shadow modules of the standard library.
        argv = [sys.executable, "-P", "-m", _WRITER_MODULE, str(os.getpid()), str(nice)]
        pipe = asyncio.subprocess.PIPE
        with boundary(CheckpointError, "start the checkpoint writer process"):
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, start_new_session=True
            )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        """Asks the kernel: the event loop learns of a death some turns later."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped a moment ago
            return True

    async def send(self, job: Job) -> None:
        # A broken pipe is not an error here: the reply that never comes tells more.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._jobs.write(msgspec.json.encode(job) + b"\n")
            await self._jobs.drain()

    async def reply(self) -> Reply:
        line = await self._replies.readline()
        if not line.endswith(b"\n"):
            raise await self.death()
        return msgspec.json.decode(line, type=Reply)

    async def death(self) -> CheckpointError:
        """Bury it; the error names its exit code (negative: the signal)."""
        self.mourned = True
        code = await self.kill() if self._process.returncode is None else self._process.returncode
        return CheckpointError(
            f"the checkpoint writer process {self.pid} died with exit code {code}"
        )

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._jobs.close()
        return await self._process.wait()

    async def stop(self) -> int:
        """Ask it to end by closing its stdin, kill it after a grace period; its exit code."""
        try:
            async with patience(_EXIT_SECONDS):
                self._jobs.close()
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()
        finally:
            if self._process.returncode is None:
                await self.kill()


class AsyncCheckpointManager:
    """Saves through one process, one at a time; an async context manager.

    The process starts with the first save, or with ``start``; from the main thread: a child dies
    with the thread that started it.

    Args:
        mode: what ``save`` waits for; in the background the process yields the CPU to training.
        deadline_seconds: bound of every wait for it.
    """

    def __init__(self, *, mode: AsyncMode, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._mode = resolve(mode)
        self._deadline = deadline_seconds
        self._process: _WriterProcess | None = None
        self._in_flight: _InFlight | None = None
        self._failure: OffbeatError | None = None
        # Two tasks may wait for the same save; one of them reads what the writer says.
        self._reading = asyncio.Lock()
        self._reports: list[SaveReport] = []
        self._restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the writer; None before there is one."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        """How many writers were started after the first one."""
        return self._restarts

    async def start(self) -> None:
        """Start the process now, so that the first save does not wait for it."""
        await self._living()

    async def save(self, job: Job, *, step: int, path: Path) -> None:
        """Begin a save; in ``SYNC`` mode also end it.

        Waits for the save before this one and raises its error; this one is then not started.

        Args:
            job: writes the folder ``path`` of ``step``. Its source must stay as it is until
                ``maybe_wait_for_staging`` returns, or ``wait`` where nothing else copies it.

        Raises:
            CheckpointError: names the step, the path and what went wrong.
        """
        started = time.monotonic()
        await self.wait()
        process = await self._living()
        flight = self._in_flight = _InFlight(step=step, path=path)
        await self._send(process, job, flight)
        flight.blocked_seconds = time.monotonic() - started
        if self._mode is AsyncMode.SYNC:
            await self.wait()

    async def maybe_wait_for_staging(self) -> None:
        """Return when the source of the save in flight, if any, was copied or is not needed.

        Raises nothing: an error of staging is the save's, see ``wait``.
        """
        flight = self._in_flight
        while flight is not None and flight is self._in_flight and not flight.staged:
            await self._hear_of(flight)

    async def settle(self) -> None:
        """Return when no save is in flight. Raises nothing: its error is kept for ``wait``."""
        while (flight := self._in_flight) is not None:
            await self._hear_of(flight)

    async def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its CheckpointError, once."""
        await self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def take_reports(self) -> tuple[SaveReport, ...]:
        """Reports of the saves known to be finished since the last call.

        One in the background is known to be finished after the next ``save``, ``settle``, ``wait``
        or ``finalize``.
        """
        reports, self._reports = tuple(self._reports), []
        return reports

    async def finalize(self) -> None:
        """Wait for the save in flight and end the process. Raises the save's CheckpointError."""
        process = self._process
        if process is None:
            return
        try:
            await self.wait()
        finally:
            code = await process.stop()
            if code != 0 and not process.mourned:
                log.warning("%s with nothing to do", await process.death())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await (self.finalize() if exc is None else self._close_after(exc))
        except CheckpointError as failure:
            if exc is None:
                raise
            # The body's error goes on, a cancellation above all; the failure travels with it.
            exc.add_note(f"closing the saver failed as well: {failure}")
            log.error("closing the saver failed: %s", failure)

    async def _close_after(self, exc: BaseException) -> None:
        interrupted = isinstance(exc, asyncio.CancelledError)
        if self._in_flight is not None and not interrupted:
            # Now, and not after the wait: nobody should have to guess what it is for.
            log.error("%s; the save of step %d ends first", true_cause(exc), self._in_flight.step)
        try:
            await self._hurry(_EXIT_SECONDS if interrupted else _FAILED_SECONDS)
        except asyncio.CancelledError:
            await self._hurry(_EXIT_SECONDS)
            raise
        finally:
            await self.finalize()

    async def _hurry(self, seconds: float) -> None:
        """Who ends a run waits for a write that goes on, not for a disk that hangs; who interrupts
        it twice, for nothing.
        """
        flight, process, asked = self._in_flight, self._process, time.monotonic()
        try:
            async with patience(seconds):
                await self.wait()
        except TimeoutError:
            assert flight is not None
            assert process is not None
            self._in_flight = None
            await process.death()
            raise CheckpointError(
                f"step {flight.step}: {flight.path} was not saved: its writer was killed "
                f"{time.monotonic() - asked:.1f} s after the run ended otherwise"
            ) from None

    async def _living(self) -> _WriterProcess:
        """The process, or a new one: with no save in flight the old one's death cost none."""
        process = self._process
        if process is not None and not process.is_dead:
            return process
        if process is not None:
            if not process.mourned:
                log.warning("%s with nothing to do; starting another", await process.death())
            self._restarts += 1
        nice = _BACKGROUND_NICE if self._mode is AsyncMode.ASYNC else 0
        self._process = await _WriterProcess.start(nice)
        return self._process

    async def _send(self, process: _WriterProcess, job: Job, flight: _InFlight) -> None:
        """A process that is stopped takes what its pipe holds, and then nothing more."""
        try:
            async with asyncio.timeout(self._deadline):
                await process.send(job)
        except TimeoutError:
            await process.death()
            self._take_in(flight, self._too_slow(flight))

    def _too_slow(self, flight: _InFlight) -> OffbeatError:
        return flight.error(f"did not end within {self._deadline} s; the writer was killed")

    async def _hear_of(self, flight: _InFlight) -> None:
        """Take in one answer about ``flight``, unless another task does so meanwhile."""
        asked, before = time.monotonic(), flight.staged
        async with self._reading:
            if flight is self._in_flight and flight.staged is before:
                reply = await self._reply(flight)
                flight.blocked_seconds += time.monotonic() - asked
                self._take_in(flight, reply)

    async def _reply(self, flight: _InFlight) -> Reply | OffbeatError:
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(self._deadline):
                return await process.reply()
        except TimeoutError:
            await process.death()
            return self._too_slow(flight)
        except CheckpointError as exc:
            return flight.error(f"failed: {exc}")

    def _take_in(self, flight: _InFlight, reply: Reply | OffbeatError) -> None:
        if isinstance(reply, Copied):
            flight.staged = True
            return
        self._in_flight = None
        if isinstance(reply, Done):
            self._reports.append(
                SaveReport(
                    step=flight.step,
                    path=flight.path,
                    mode=self._mode,
                    nbytes=reply.nbytes,
                    blocked_seconds=flight.blocked_seconds,
                    background_seconds=reply.seconds,
                )
            )
        elif isinstance(reply, Failed):
            self._failure = flight.error(f"failed: {reply.text}", by_name(reply.error))
        else:
            self._failure = reply
