"""A tracker as the controller sees it: a sink whose other end is a process.

Owns that process and the bounds of what it may cost. Training never depends on it::

    start    begins with the run; the first step waits for it, START_SECONDS at most
    a step   travels in a packet; the kernel's socket buffer is the queue
    too slow the queue is full: it may hold the run up for PATIENCE_SECONDS in all, later steps
             without room are dropped and counted
    hanging  the process ends itself after the deadlines of ``worker``
    the end  is waited for: CLOSE_SECONDS, HURRY_SECONDS in an interrupted run; then it is killed

A failure is raised once; `offbeat.observe.sinks.SinkSet` reports it and leaves the sink out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from offbeat.config.stats_logger import StatsLoggerConfig
from offbeat.errors import WorkerError
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.kinds import TRACKERS
from offbeat.observe.trackers.wire import (
    PACKET_BYTES,
    Failed,
    Finish,
    FromTracker,
    Step,
    ToTracker,
    encode,
    read_news,
)
from offbeat.observe.trackers.worker import FINISH_SECONDS, START_SECONDS, WRITE_SECONDS
from offbeat.protocols import JsonValue

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
CLOSE_SECONDS = START_SECONDS + FINISH_SECONDS
HURRY_SECONDS = 5.0
EXIT_SECONDS = 1.0
"""How long a process whose socket is closed may take to disappear."""

BUFFER_BYTES = 1 << 20
"""The queue that is asked for; the kernel may grant less."""

_WORKER_MODULE = "offbeat.observe.trackers.worker"


def open_trackers(section: StatsLoggerConfig, run_dir: Path) -> tuple[TrackerProcess, ...]:
    """Start the trackers of a run; ``run_dir`` holds its ``config.yaml``."""
    return tuple(TrackerProcess.start(name, run_dir) for name in section.trackers)


class TrackerProcess:
    """One tracker of one run; a ``Sink``. Its prints go to ``logs/<name>.log``."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        log_path: Path,
        patience: float,
    ) -> None:
        self._name = name
        self._process = process
        self._link = link
        self._log_path = log_path
        self._ready = False
        self._given_up = False
        self._patience = patience
        self._sent = 0
        self._dropped = 0
        self._ending = Finish(status=RunStatus.FAILED)

    @classmethod
    def start(
        cls, name: str, run_dir: Path, *, patience: float = PATIENCE_SECONDS
    ) -> TrackerProcess:
        """Start the process; does not wait for the tracker.

        ``patience`` is how many seconds it may hold the run up in all once it has started.
        """
        log_path = run_dir / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, theirs, log_path.open("ab") as output:
            undo.enter_context(ours)
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            process = subprocess.Popen(
                # -P: the working folder's files must not shadow modules of the standard library.
                [
                    *(sys.executable, "-P", "-m", _WORKER_MODULE, str(os.getpid())),
                    *(str(theirs.fileno()), name, str(run_dir)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**TRACKERS[name].environment, **os.environ},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
            undo.pop_all()
        return cls(name, process, ours, log_path, patience)

    def __str__(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        """Process id of the tracker's process."""
        return self._process.pid

    @property
    def dropped(self) -> int:
        """Steps that were not written because the tracker was too slow."""
        return self._dropped

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Hand one step over.

        Raises:
            WorkerError: the tracker failed, at this or an earlier step; says how.
        """
        self._listen()
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        if self._send(Step(step=step, metrics=numbers)):
            self._sent += 1
        else:
            self._dropped += 1

    def conclude(self, status: RunStatus, error: str | None) -> None:
        """How the run ended; ``close`` passes it on."""
        self._ending = Finish(status=status, error=error)

    def close(self) -> None:
        """Have the record closed, and end the process.

        Raises:
            WorkerError: the record could not be closed.
        """
        try:
            if not self._given_up:
                self._finish()
        finally:
            self._end()
        if self._dropped:
            log.warning(
                "%s was slower than the run: %d of %d steps are missing there; metrics.jsonl has "
                "all of them",
                self._name,
                self._dropped,
                self._dropped + self._sent,
            )

    def _listen(self) -> None:
        """Read what the process said since the last call; the first call waits for its start."""
        # Its process ends itself at the same deadline: the second is for the news of it.
        if not self._ready and not self._wait(select.POLLIN, START_SECONDS + EXIT_SECONDS):
            raise self._failure(f"not started after {START_SECONDS:g} s")
        while self._wait(select.POLLIN, 0.0):
            news = self._receive()
            if news is None:
                raise self._failure(self._death())
            if isinstance(news, Failed):
                raise self._failure(news.reason)
            self._ready = True

    def _receive(self) -> FromTracker | None:
        """The next message; None when the process has closed its end."""
        try:
            packet = self._link.recv(PACKET_BYTES)
        except ConnectionResetError:
            # It closed with packets of ours unread; what it said before can still be read.
            packet = self._link.recv(PACKET_BYTES)
        return read_news(packet) if packet else None

    def _send(self, order: ToTracker) -> bool:
        """Whether there was room, or room came while patience lasted."""
        packet = encode(order)
        while True:
            try:
                self._link.send(packet)
            except BlockingIOError:
                if not self._wait_for_room():
                    return False
            except (BrokenPipeError, ConnectionResetError):
                self._listen()
                raise self._failure(self._death()) from None
            else:
                return True

    def _wait_for_room(self) -> bool:
        began = time.monotonic()
        room = self._wait(select.POLLOUT, self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - began))
        return room

    def _wait(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._link, event)
        return bool(poll.poll(seconds * 1000))

    def _failure(self, reason: str) -> WorkerError:
        self._given_up = True
        return WorkerError(f"tracker {self._name}: {reason} (its log: {self._log_path})")

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code = self._process.returncode
        if code == -signal.SIGALRM:
            return (
                f"a call did not return in time ({START_SECONDS:g} s to start, {WRITE_SECONDS:g} s "
                f"for a step, {FINISH_SECONDS:g} s at the end); its process was ended"
            )
        return f"its process ended with exit code {code}"

    def _finish(self) -> None:
        hurry = self._ending.status == RunStatus.INTERRUPTED
        seconds = HURRY_SECONDS if hurry else CLOSE_SECONDS
        self._patience = seconds
        if not self._send(self._ending):
            raise self._failure(f"still busy {seconds:g} s after the end of the run")
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            raise self._failure(f"not finished {seconds:g} s after the end of the run") from None
        self._check_end()

    def _check_end(self) -> None:
        while (news := self._receive()) is not None:
            if isinstance(news, Failed):
                raise self._failure(news.reason)
        if self._process.returncode != 0:
            raise self._failure(self._death())

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()
