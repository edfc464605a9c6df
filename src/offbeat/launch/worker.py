"""The entry of a worker process: ``python -m offbeat.launch.worker <parent pid> <name>``.

Owns the process: its death with its parent, its signals, its log, and one service served over RPC
until it is told to stop. Knows nothing of the service. Standard input is a socket to the parent:
a ``WorkerStart`` comes in, ``Ready`` or a ``Fault`` goes out, and its end means that the parent is
gone. The name among the arguments is for ``ps`` and ``pgrep -f`` only.

Stopped by: SIGTERM or the end of that socket; cleanup then has ``CLEANUP_SECONDS``. SIGUSR1 writes
every thread's stack to the log.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from typing import NoReturn

from offbeat.errors import OffbeatError, WorkerError, boundary
from offbeat.launch.calls import Fault
from offbeat.launch.codec import decode
from offbeat.launch.frames import LENGTH, Ready, WorkerStart, frame
from offbeat.launch.rpc import serve
from offbeat.launch.target import open_target

logger = logging.getLogger(__name__)

CLEANUP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Serve until told to stop; 0 after an orderly end, 1 when the service could not be opened."""
    _die_with_parent(int(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file, not a TextIO
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with _take_stdin() as control:
        start = decode(_receive(control), WorkerStart)
        return asyncio.run(_run(start, control))


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's starting thread ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # It died before prctl could notice.
        os._exit(1)


def _take_stdin() -> socket.socket:
    """The control socket, moved off descriptor 0 so that no child of the service inherits it."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return control


def _receive(control: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(control, LENGTH.size))
    return _exactly(control, length)


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = control.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise SystemExit("the parent went away before it said what to start")
        data += piece
    return bytes(data)


async def _run(start: WorkerStart, control: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    ready, asked = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(_serve(start, control, ready, asked))

        def stop() -> None:
            # Once: a second cancellation would interrupt the cleanup that the first one began.
            loop.remove_reader(control)
            loop.add_signal_handler(signal.SIGTERM, int)
            faulthandler.dump_traceback_later(CLEANUP_SECONDS, exit=True)
            asked.set()
            if not ready.is_set():
                serving.cancel()

        loop.add_signal_handler(signal.SIGTERM, stop)
        loop.add_reader(control, stop)
    loop.remove_reader(control)
    return 0 if serving.cancelled() else serving.result()


async def _serve(
    start: WorkerStart, control: socket.socket, ready: asyncio.Event, asked: asyncio.Event
) -> int:
    """Open, report, set ``ready``, and leave in an orderly way once ``asked``."""
    async with AsyncExitStack() as stack:
        try:
            service = await stack.enter_async_context(open_target(start.target, start.payload))
            with boundary(WorkerError, f"serving {start.target}"):
                server = await stack.enter_async_context(
                    serve(service, service.METHODS, host=start.host, token=start.token)
                )
        except OffbeatError as exc:
            logger.exception("%s could not start", start.name)
            control.sendall(frame(Fault.of(exc)))
            return 1
        control.sendall(frame(Ready(url=server.url)))
        logger.info("%s serves %s at %s", start.name, start.target, server.url)
        ready.set()
        await asked.wait()
    return 0


def _leave(code: int) -> NoReturn:
    """End without the interpreter's own end: with torch loaded that takes a second, for nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv))
