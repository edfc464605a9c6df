"""One background process that writes folders, and the controller's side of it.

Owns the process, the one job in flight, and the moment at which its error is raised. Knows no
content: a job says where everything lies. Knows no torch.

    submit(job) ──► Copied   … training goes on … Done
                    next submit(), wait() or close() waits here and raises what went wrong

At most one job is in flight; nobody has to poll for its end. A process that dies during a job fails
that job; one that dies with nothing to do is replaced by the next job, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.checkpoint.writer import Copied, Done, Failed, Job, Reply
from offbeat.errors import CheckpointError, boundary, by_name
from offbeat.launch.interrupts import patience

log = logging.getLogger(__name__)

_WRITER_MODULE = "offbeat.checkpoint.writer"
_BACKGROUND_NICE = 10
_EXIT_SECONDS = 5.0

DEADLINE_SECONDS = 600.0
"""Bound of every wait for the writer."""


class SaveMode(StrEnum):
    """What ``Saver.save`` waits for; ``AUTO`` is async where weights can be read through /proc."""

    SYNC = "sync"
    ASYNC = "async"
    AUTO = "auto"

    def resolve(self) -> SaveMode:
        """This mode with ``AUTO`` decided for this platform."""
        if self is not SaveMode.AUTO:
            return self
        shared = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
        return SaveMode.ASYNC if shared else SaveMode.SYNC


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One finished save.

    ``blocked_seconds`` were spent in ``submit``, waiting for the one before included;
    ``background_seconds`` are the writer's, from the job's arrival to the folder in place.
    """

    step: int
    path: Path
    mode: SaveMode
    nbytes: int
    blocked_seconds: float
    background_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    step: int
    path: Path
    blocked_seconds: float = 0.0


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


class BackgroundWriter:
    """Runs jobs in one process, one at a time; an async context manager.

    The process starts with the first job, or with ``start``; from the main thread: a child dies
    with the thread that started it.

    Args:
        mode: ``SYNC`` or ``ASYNC``; in the background the process yields the CPU to training.
        deadline_seconds: bound of every wait for it.
    """

    def __init__(self, *, mode: SaveMode, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._mode = mode
        self._deadline = deadline_seconds
        self._process: _WriterProcess | None = None
        self._in_flight: _InFlight | None = None
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
        """Start the process now, so that the first job does not wait for it."""
        await self._living()

    async def submit(self, job: Job, *, step: int, path: Path, wait_for_copy: bool = True) -> None:
        """Hand a job over; with ``wait_for_copy`` its source may change when this returns.

        Waits for the job before this one and raises its error; this one is then not started.

        Args:
            job: writes the folder ``path`` of ``step``.
            wait_for_copy: return at the job's first answer; otherwise at once, and its source must
                stay as it is until ``wait`` returns.

        Raises:
            CheckpointError: names the step, the path and what went wrong.
        """
        started = time.monotonic()
        await self.wait()
        process = await self._living()
        flight = self._in_flight = _InFlight(step=step, path=path)
        await process.send(job)
        reply = await self._reply(flight) if wait_for_copy else Copied()
        flight = dataclasses.replace(flight, blocked_seconds=time.monotonic() - started)
        if isinstance(reply, Copied):
            self._in_flight = flight
        else:
            self._finish(flight, reply)

    async def wait(self) -> None:
        """Wait for the job in flight, if any. Raises its CheckpointError, once."""
        while (flight := self._in_flight) is not None:
            reply = await self._reply(flight)
            if not isinstance(reply, Copied):  # comes here after a submit that was canceled
                self._finish(flight, reply)

    def take_reports(self) -> tuple[SaveReport, ...]:
        """Reports of the jobs known to be finished since the last call.

        An async job is known to be finished after the next ``submit``, ``wait`` or ``close``.
        """
        reports, self._reports = tuple(self._reports), []
        return reports

    async def close(self) -> None:
        """Wait for the job in flight and end the process. Raises the job's CheckpointError."""
        process = self._process
        if process is None:
            return
        try:
            await self.wait()
        finally:
            code = await process.stop()
        if code != 0 and not process.mourned:
            raise await process.death()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if isinstance(exc, asyncio.CancelledError):
                await self._hurry()
            await self.close()
        except CheckpointError as failure:
            if exc is None:
                raise
            # The body's error goes on, a cancellation above all; the failure travels with it.
            exc.add_note(f"closing the saver failed as well: {failure}")
            log.error("closing the saver failed: %s", failure)

    async def _hurry(self) -> None:
        """Who interrupts a run waits for a write that goes on, not for a disk that hangs; who does
        so twice, for nothing.
        """
        flight, process, asked = self._in_flight, self._process, time.monotonic()
        try:
            async with patience(_EXIT_SECONDS):
                await self.wait()
        except TimeoutError:
            assert flight is not None
            assert process is not None
            self._in_flight = None
            await process.death()
            raise CheckpointError(
                f"step {flight.step}: {flight.path} was not saved: its writer was killed "
                f"{time.monotonic() - asked:.1f} s after the run was interrupted"
            ) from None

    async def _living(self) -> _WriterProcess:
        """The process, or a new one: no job is in flight, so the death of the old one cost none."""
        process = self._process
        if process is not None and not process.is_dead:
            return process
        if process is not None:
            if not process.mourned:
                log.warning("%s with nothing to do; starting another", await process.death())
            self._restarts += 1
        nice = _BACKGROUND_NICE if self._mode is SaveMode.ASYNC else 0
        self._process = await _WriterProcess.start(nice)
        return self._process

    async def _reply(self, flight: _InFlight) -> Reply:
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(self._deadline):
                return await process.reply()
        except TimeoutError:
            self._in_flight = None
            await process.death()
            raise CheckpointError(
                f"step {flight.step}: saving {flight.path} did not end within {self._deadline} s; "
                "the writer was killed"
            ) from None
        except CheckpointError as exc:
            self._in_flight = None
            raise CheckpointError(
                f"step {flight.step}: saving {flight.path} failed: {exc}"
            ) from exc

    def _finish(self, flight: _InFlight, reply: Done | Failed) -> None:
        self._in_flight = None
        if isinstance(reply, Failed):
            raise by_name(reply.error)(
                f"step {flight.step}: saving {flight.path} failed: {reply.text}"
            )
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
