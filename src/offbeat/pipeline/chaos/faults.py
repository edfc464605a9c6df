"""The faults: what each does to which process, and when the next one comes.

Owns the signals, and wakes what it put to sleep; knows no run directory and judges nothing.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from offbeat.pipeline.chaos.poison import Poison, order
from offbeat.pipeline.chaos.processes import REWARDS, Process, listening


class Fault(StrEnum):
    """What can go wrong, and the run has to survive."""

    KILL_GENERATOR = "kill-generator"
    STOP_GENERATOR = "stop-generator"
    PAUSE_GENERATOR = "pause-generator"
    PAUSE_TRAINER = "pause-trainer"
    KILL_REWARD = "kill-reward"
    STOP_REWARD = "stop-reward"
    POISON_REWARD = "poison-reward"


LOSES_GENERATOR = (Fault.KILL_GENERATOR, Fault.STOP_GENERATOR)
"""Faults after which a generator's process has to be replaced."""

_VICTIMS = {
    Fault.KILL_GENERATOR: "generator",
    Fault.STOP_GENERATOR: "generator",
    Fault.PAUSE_GENERATOR: "generator",
    Fault.PAUSE_TRAINER: "trainer",
    Fault.KILL_REWARD: REWARDS,
    Fault.STOP_REWARD: REWARDS,
}
_PAUSES = (Fault.PAUSE_GENERATOR, Fault.PAUSE_TRAINER)
_KILLS = (Fault.KILL_GENERATOR, Fault.KILL_REWARD)

PAUSE_SECONDS = (0.1, 1.0)
"""Shortest and longest time for which a process is stopped and then goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault that happened, ``at`` seconds after the start; ``pid`` is None for an order."""

    fault: Fault
    at: float
    target: str
    pid: int | None


class Injector:
    """Does one of ``faults`` when asked: each once in a random order, then each once again.

    A fault that has no victim now waits for its turn.

    Args:
        seed: of the choices.
        poison_dir: where the poisoned reward function looks for orders.
    """

    def __init__(self, faults: Sequence[Fault], *, seed: int, poison_dir: Path) -> None:
        self._faults = faults
        self._round: list[Fault] = []
        """What is left of this round, in its order."""
        self._random = random.Random(seed)
        self._poison_dir = poison_dir
        self._paused: list[tuple[float, Process]] = []

    def pause_until_next(self, every: float) -> float:
        """Seconds until the next fault, between half of ``every`` and three halves of it."""
        return every * self._random.uniform(0.5, 1.5)

    def inject(self, processes: Sequence[Process], now: float) -> Injection | None:
        """Do one fault to one of ``processes``; None when none of them is a victim now."""
        if not self._round:
            self._round = self._random.sample(self._faults, len(self._faults))
        for fault in self._round:
            victims = self._victims(fault, processes)
            if victims or fault is Fault.POISON_REWARD:
                self._round.remove(fault)
                return self._do(fault, victims, now)
        return None

    def _do(self, fault: Fault, victims: Sequence[Process], now: float) -> Injection:
        if fault is Fault.POISON_REWARD:
            kind = self._random.choice(list(Poison))
            order(self._poison_dir, kind)
            return Injection(fault=fault, at=now, target=kind, pid=None)
        victim = self._random.choice(victims)
        self._hit(fault, victim, now)
        return Injection(fault=fault, at=now, target=victim.name, pid=victim.pid)

    def _victims(self, fault: Fault, processes: Sequence[Process]) -> list[Process]:
        """Who can suffer it: nobody who is stopped, and no worker that is still starting."""
        name = _VICTIMS.get(fault)
        if name is None:
            return []
        named = [p for p in processes if p.name.startswith(name) and not p.stopped]
        return named if name == REWARDS else [p for p in named if listening(p.pid)]

    def _hit(self, fault: Fault, victim: Process, now: float) -> None:
        if fault in _PAUSES:
            self._paused.append((now + self._random.uniform(*PAUSE_SECONDS), victim))
        _signal(victim, signal.SIGKILL if fault in _KILLS else signal.SIGSTOP)

    def wake(self, now: float) -> None:
        """Let those go on whose pause is over."""
        for until, process in self._paused:
            if until <= now:
                _signal(process, signal.SIGCONT)
        self._paused = [(until, process) for until, process in self._paused if until > now]


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if process.alive:
            os.kill(process.pid, number)
