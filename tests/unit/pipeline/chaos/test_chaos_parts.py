"""The parts of ``offbeat chaos``: who is hit, what memory says, and what a poisoned call does."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.pipeline.chaos.faults import Fault, Injector
from offbeat.pipeline.chaos.memory import SETTLING_SECONDS, MemoryLog
from offbeat.pipeline.chaos.poison import EXIT_CODE, Poison, order, poison
from offbeat.pipeline.chaos.processes import Process, listening, processes_of

LISTEN = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
"""


@pytest.fixture
def victim() -> Iterator[tuple[Process, int]]:
    """A process that listens as a worker does, and its port."""
    child = subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        (found,) = [p for p in processes_of(os.getpid()) if p.pid == child.pid]
        yield Process(pid=found.pid, started=found.started, name="generator-0"), port
        child.kill()


def injector(folder: Path, *faults: Fault) -> Injector:
    return Injector(faults, seed=1, poison_dir=folder)


def test_a_listening_socket_is_found_with_its_address(victim: tuple[Process, int]) -> None:
    process, port = victim
    assert listening(process.pid) == [("127.0.0.1", port)]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as ours:
        assert ("::1", ours.getsockname()[1]) in listening(os.getpid())
        assert ("::1", ours.getsockname()[1]) not in listening(process.pid)


def test_a_paused_process_goes_on_when_its_time_is_over(
    victim: tuple[Process, int], tmp_path: Path
) -> None:
    process, _ = victim
    chaos = injector(tmp_path, Fault.PAUSE_GENERATOR)
    hit = chaos.inject([process], now=10.0)
    assert hit is not None
    assert (hit.target, hit.pid) == ("generator-0", process.pid)
    assert process.alive
    while not process.stopped:
        pass
    assert chaos.inject([process], now=10.0) is None, "nobody is hit while he is down"
    chaos.wake(10.0)
    assert process.stopped
    chaos.wake(math.inf)
    while process.stopped:
        pass
    assert process.resident_bytes > 1_000_000


def test_a_killed_process_is_gone_and_its_number_is_not_its_own(
    victim: tuple[Process, int], tmp_path: Path
) -> None:
    process, _ = victim
    assert injector(tmp_path, Fault.KILL_GENERATOR).inject([process], now=0.0) is not None
    while process.alive:
        pass
    assert not Process(pid=os.getpid(), started=1, name="another").alive


def test_every_fault_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    ready = Process(pid=os.getpid(), started=1, name="rewards")  # nobody: it started otherwise
    faults = (Fault.KILL_REWARD, Fault.STOP_REWARD, Fault.POISON_REWARD, Fault.KILL_GENERATOR)
    chaos = injector(tmp_path, *faults)
    hits = [chaos.inject([ready], now=float(i)) for i in range(3)]
    assert Counter(h.fault for h in hits if h is not None) == Counter(faults[:3])
    assert chaos.inject([ready], now=3.0) is None, "the generator's turn, and there is none"


def test_memory_is_compared_by_thirds_and_young_processes_do_not_count() -> None:
    log = MemoryLog()
    for second in range(0, 310, 2):
        grown = 100 if second < 200 else 106
        log.add({("trainer", 1): 100, ("generator-0", second // 60): grown}, float(second))
    generator, trainer = log.growth()
    assert (trainer.name, trainer.first, trainer.last, trainer.flat) == ("trainer", 100, 100, True)
    assert (generator.name, generator.first, generator.last) == ("generator-0", 100, 106)
    assert not generator.flat
    young = MemoryLog()
    young.add({("trainer", 1): 100}, 0.0)
    young.add({("trainer", 1): 100}, SETTLING_SECONDS - 1)
    assert young.growth() == []


def test_poison_adds_nothing_until_it_is_ordered_and_then_acts_once(tmp_path: Path) -> None:
    def call() -> float:
        return poison("1=", "1", [1], [1], poison_dir=str(tmp_path))

    assert call() == 0.0
    order(tmp_path, Poison.NAN)
    assert math.isnan(call())
    order(tmp_path, Poison.HANG)
    order(tmp_path, Poison.RAISE)
    with pytest.raises(RuntimeError, match="poisoned"):
        call()
    assert call() == 0.0


@pytest.mark.parametrize(
    ("kind", "code"), [(Poison.EXIT, EXIT_CODE), (Poison.HANG, -signal.SIGKILL)]
)
def test_poison_ends_or_hangs_its_process(tmp_path: Path, kind: Poison, code: int) -> None:
    order(tmp_path, kind)
    call = (
        "import sys; from offbeat.pipeline.chaos.poison import poison;"
        "poison('', '', [], [], poison_dir=sys.argv[1])"
    )
    child = subprocess.Popen([sys.executable, "-c", call, str(tmp_path)])
    while (tmp_path / "next").exists():
        pass
    if kind is Poison.HANG:
        child.kill()
    assert child.wait(10) == code
