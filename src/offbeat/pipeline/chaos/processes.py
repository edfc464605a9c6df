"""The processes of a run as the kernel shows them: who they are, what they hold, where they listen.

Owns the reading of /proc below one process; signals nobody.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.observe.memory import process_tree

CONTROLLER = "controller"
REWARDS = "rewards"

_MODULES = {
    "offbeat.rollout.reward_worker": REWARDS,
    "offbeat.checkpoint.writer": "writer",
    "offbeat.observe.trackers.worker": "tracker",
}
_WORKER = "offbeat.launch.worker"
_LISTEN = "0A"
_GONE = "ZX"
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat, counted behind the program's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process; ``started``, in ticks since the machine's start, tells it from a later one of
    the same number.
    """

    pid: int
    started: int
    name: str

    @property
    def alive(self) -> bool:
        """Whether it still runs, or is stopped; a zombie does not."""
        stat = _stat(self.pid)
        return (
            stat is not None and stat[_STATE] not in _GONE and int(stat[_STARTED]) == self.started
        )

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        stat = _stat(self.pid)
        return stat is not None and stat[_STATE] == "T"

    @property
    def resident_bytes(self) -> int:
        """Memory that it holds now, shared pages included; 0 when it is gone."""
        with suppress(OSError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0


def processes_of(controller: int) -> list[Process]:
    """The controller of a run, its workers, and what those have started."""
    found = []
    for pid in process_tree(controller):
        stat = _stat(pid)
        if stat is not None and stat[_STATE] not in _GONE:
            name = CONTROLLER if pid == controller else _name(pid)
            found.append(Process(pid=pid, started=int(stat[_STARTED]), name=name))
    return found


def _stat(pid: int) -> list[str] | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def _name(pid: int) -> str:
    """``trainer``, ``generator-0``, …; ``other`` is what workers started, and who is being born."""
    with suppress(OSError):
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if _WORKER in argv:
            # Its standard output is the log file that carries its name.
            return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
        return next((name for module, name in _MODULES.items() if module in argv), "other")
    return "other"


def listening(pid: int) -> list[tuple[str, int]]:
    """Address and port of each TCP socket on which a process listens."""
    inodes = set(_socket_inodes(pid))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            for local, state, inode in ((f[1], f[3], f[9]) for f in map(str.split, lines)):
                if state == _LISTEN and inode in inodes:
                    address, _, port = local.partition(":")
                    found.append((_address(address, family), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    yield inode.strip("[]")


def _address(text: str, family: socket.AddressFamily) -> str:
    """The kernel writes an address as words of four bytes in the order of the machine."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
