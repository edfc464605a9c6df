"""When to save, and the controller's side of saving.

Owns the cadence (``SaveSchedule``, a state machine without clocks) and one background writer
process (``Saver``). Knows no torch and no weights: it passes on where they lie. Both modes run the
same function in the same process, so their folders are equal byte for byte; they differ in what
``save`` waits for.

    sync    save() ──► job ──────────────────────────────► Done           blocked: all of it
    async   save() ──► job ──► Copied   … training goes on … Done         blocked: the copy
                                        next save() or close() waits here and raises what went wrong

At most one save is in flight; nobody has to poll for its end.
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

import msgspec

from offbeat.checkpoint.folders import step_folder
from offbeat.checkpoint.manifest import SaveManifest
from offbeat.checkpoint.writer import Copied, Done, Failed, Reply, SaveJob
from offbeat.errors import CheckpointError, boundary, by_name
from offbeat.types import WeightUpdate

log = logging.getLogger(__name__)

_WRITER_MODULE = "offbeat.checkpoint.writer"
_BACKGROUND_NICE = 10
_EXIT_SECONDS = 5.0


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


class SaveSchedule:
    """Says when a save is due: each frequency has its own timer, 0 and None switch it off.

    ``freq_steps`` and ``freq_epochs`` fire when the count of completed steps or epochs passes a
    multiple of them, so a resumed run saves at the same steps; ``freq_secs`` fires that long after
    it last did.

    Args:
        freq_steps, freq_epochs: completed steps and epochs.
        freq_secs: seconds of the caller's clock.
        step, epoch, now: where the run starts or resumes.
    """

    def __init__(
        self,
        *,
        freq_steps: int | None = None,
        freq_epochs: int | None = None,
        freq_secs: float | None = None,
        step: int = 0,
        epoch: int = 0,
        now: float,
    ) -> None:
        given = {"freq_steps": freq_steps, "freq_epochs": freq_epochs, "freq_secs": freq_secs}
        for name, value in given.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self._freq_steps = freq_steps or 0
        self._freq_epochs = freq_epochs or 0
        self._freq_secs = freq_secs or 0.0
        self._step, self._epoch, self._fired = step, epoch, now

    @property
    def is_off(self) -> bool:
        """Whether no frequency is set, so that nothing is ever due."""
        return not (self._freq_steps or self._freq_epochs or self._freq_secs)

    def due(self, step: int, epoch: int, now: float) -> bool:
        """Whether to save now; asking moves the timers that fire."""
        by_step = _passed(self._freq_steps, self._step, step)
        by_epoch = _passed(self._freq_epochs, self._epoch, epoch)
        by_time = self._freq_secs > 0 and now - self._fired >= self._freq_secs
        self._step, self._epoch = step, epoch
        if by_time:
            self._fired = now
        return by_step or by_epoch or by_time


def _passed(freq: int, before: int, after: int) -> bool:
    return freq > 0 and after // freq > before // freq


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One finished save.

    ``blocked_seconds`` were spent in ``save``, waiting for the one before included;
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
        return self._process.returncode is not None

    async def send(self, job: SaveJob) -> None:
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
            async with asyncio.timeout(_EXIT_SECONDS):
                self._jobs.close()
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()
        finally:
            if self._process.returncode is None:
                await self.kill()


class Saver:
    """Writes ``step-NNNNNN`` folders through one background process; an async context manager.

    Example:
        >>> opening = Saver.open(mode=SaveMode.AUTO, checkpoints_dir=there, template_dir=model)
        >>> async with await opening as saver:
        ...     await saver.save(await trainer.publish(), step=10)
    """

    def __init__(
        self,
        *,
        writer: _WriterProcess,
        mode: SaveMode,
        checkpoints_dir: Path,
        template_dir: Path,
        keep_last: int | None,
        deadline_seconds: float,
    ) -> None:
        self._writer = writer
        self._mode = mode
        self._checkpoints_dir = checkpoints_dir.absolute()
        self._template_dir = template_dir.absolute()
        self._keep_last = keep_last
        self._deadline = deadline_seconds
        self._in_flight: _InFlight | None = None
        self._reports: list[SaveReport] = []

    @classmethod
    async def open(
        cls,
        *,
        mode: SaveMode,
        checkpoints_dir: Path,
        template_dir: Path,
        keep_last: int | None = None,
        deadline_seconds: float = 600.0,
    ) -> Saver:
        """Start the writer, from the main thread: a child dies with the thread that started it.

        Args:
            keep_last: step folders to keep; 0 and None keep all.
            deadline_seconds: bound of every wait for the writer.
        """
        mode = mode.resolve()
        return cls(
            writer=await _WriterProcess.start(_nice(mode)),
            mode=mode,
            checkpoints_dir=checkpoints_dir,
            template_dir=template_dir,
            keep_last=keep_last or None,
            deadline_seconds=deadline_seconds,
        )

    @property
    def mode(self) -> SaveMode:
        """``SYNC`` or ``ASYNC``."""
        return self._mode

    @property
    def writer_pid(self) -> int:
        """Process id of the background writer."""
        return self._writer.pid

    async def save(self, update: WeightUpdate, *, step: int, config_digest: str = "") -> None:
        """Save ``update`` as the weights of ``step``; its buffer is free again when this returns.

        Waits for the save before this one and raises its error; this one is then not started.

        Raises:
            CheckpointError: names the step, the path and what went wrong.
        """
        started = time.monotonic()
        await self.wait()
        writer = await self._living_writer()
        path = step_folder(self._checkpoints_dir, step)
        flight = self._in_flight = _InFlight(step=step, path=path)
        await writer.send(self._job(update, step, path, config_digest))
        reply = await self._reply(flight)
        flight = dataclasses.replace(flight, blocked_seconds=time.monotonic() - started)
        if isinstance(reply, Copied):
            self._in_flight = flight
        else:
            self._finish(flight, reply)

    async def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its CheckpointError, once."""
        while (flight := self._in_flight) is not None:
            reply = await self._reply(flight)
            if not isinstance(reply, Copied):  # comes here after a save that was canceled
                self._finish(flight, reply)

    def take_reports(self) -> tuple[SaveReport, ...]:
        """Reports of the saves known to be finished since the last call.

        An async save is known to be finished after the next ``save``, ``wait`` or ``close``.
        """
        reports, self._reports = tuple(self._reports), []
        return reports

    async def close(self) -> None:
        """Wait for the save in flight and end the writer. Raises the save's CheckpointError."""
        try:
            await self.wait()
        finally:
            code = await self._writer.stop()
        if code != 0 and not self._writer.mourned:
            raise await self._writer.death()

    async def __aenter__(self) -> Saver:
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
        """Who interrupts a run waits for a write that goes on, not for a disk that hangs."""
        flight = self._in_flight
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self.wait()
        except TimeoutError:
            assert flight is not None
            self._in_flight = None
            await self._writer.death()
            raise CheckpointError(
                f"step {flight.step}: {flight.path} was not saved: its writer was killed "
                f"{_EXIT_SECONDS:g} s after the run was interrupted"
            ) from None

    def _job(self, update: WeightUpdate, step: int, path: Path, config_digest: str) -> SaveJob:
        return SaveJob(
            weights=update,
            save=SaveManifest(step=step, version=update.version, config_digest=config_digest),
            template_dir=str(self._template_dir),
            checkpoints_dir=str(self._checkpoints_dir),
            out_dir=str(path),
            keep_last=self._keep_last,
            detach=self._mode is SaveMode.ASYNC,
        )

    async def _living_writer(self) -> _WriterProcess:
        if self._writer.is_dead:
            if not self._writer.mourned:
                raise await self._writer.death()
            self._writer = await _WriterProcess.start(_nice(self._mode))
        return self._writer

    async def _reply(self, flight: _InFlight) -> Reply:
        try:
            async with asyncio.timeout(self._deadline):
                return await self._writer.reply()
        except TimeoutError:
            self._in_flight = None
            await self._writer.death()
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


def _nice(mode: SaveMode) -> int:
    """In the background the writer yields to training; in sync mode everybody waits for it."""
    return _BACKGROUND_NICE if mode is SaveMode.ASYNC else 0
