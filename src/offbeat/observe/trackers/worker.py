"""The process of one tracker: ``python -m offbeat.observe.trackers.worker <parent> <fd> <name>
<run folder>``.

Owns the tracker and a deadline for each call of it. A call that takes longer has its stack written
to the log and ends the process. Messages come on the socket ``fd``. Its end without a `Finish`
means that the controller was killed: the record is closed as that, and the process ends.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.config import load
from offbeat.errors import OffbeatError, WorkerError, boundary
from offbeat.observe.summary import RunStatus
from offbeat.observe.trackers.kinds import TRACKERS
from offbeat.observe.trackers.wire import (
    PACKET_BYTES,
    Failed,
    Finish,
    Ready,
    Step,
    ToTracker,
    encode,
    read_order,
)

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
WRITE_SECONDS = 30.0
FINISH_SECONDS = 60.0
"""Longest calls of a tracker: beginning a record, writing one step, closing the record."""

ORPHAN_SECONDS = 5.0
"""Longest closing of a record whose controller is gone."""

REASON_CHARACTERS = 2000


def main(argv: list[str]) -> int:
    """Serve one tracker to the end of the run; 1 when it failed."""
    _, _parent, descriptor, name, run_dir = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The stack first, then what SIGALRM does by itself: it ends the process, whatever it is in.
    faulthandler.register(signal.SIGALRM, chain=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with socket.socket(fileno=int(descriptor)) as link:
        link.set_inheritable(False)  # what the tracker starts must not keep it open
        try:
            with boundary(WorkerError, name):
                _serve(link, name, Path(run_dir))
        except OffbeatError as exc:
            logger.exception("%s failed", name)
            link.send(encode(Failed(reason=str(exc)[:REASON_CHARACTERS])))
            return 1
    return 0


def _serve(link: socket.socket, name: str, run_dir: Path) -> None:
    with _deadline(START_SECONDS):
        tracker = TRACKERS[name].open(load(run_dir / "config.yaml"), run_dir)
    link.send(encode(Ready()))
    while isinstance(order := _next(link), Step):
        with _deadline(WRITE_SECONDS):
            tracker.write(order.step, order.metrics)
    orphaned = order.status == RunStatus.KILLED
    with _deadline(ORPHAN_SECONDS if orphaned else FINISH_SECONDS):
        tracker.finish(order.status, order.error)


def _next(link: socket.socket) -> ToTracker:
    packet = link.recv(PACKET_BYTES)
    if packet:
        return read_order(packet)
    return Finish(status=RunStatus.KILLED, error="the controller was killed")


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
