"""One run under faults: start it as a child, break it at random moments, and judge what is left.

Owns the child process and its output; everything that is done to the run comes from outside, by
signals and files. Waits for the run's end, which has a deadline once it was asked for.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.config import RunConfig, load
from offbeat.errors import DataError
from offbeat.observe.find import METRICS_FILE
from offbeat.observe.terminal import table
from offbeat.pipeline.chaos.faults import LOSES_GENERATOR, Fault, Injection, Injector
from offbeat.pipeline.chaos.judge import Finding, judge
from offbeat.pipeline.chaos.memory import Growth, MemoryLog
from offbeat.pipeline.chaos.poison import FUNCTION
from offbeat.pipeline.chaos.processes import Process, processes_of

HEARTBEAT_SECONDS = 5.0
"""``generator.heartbeat_seconds`` of the run, unless it is given."""

UNLIMITED = 1_000_000
"""Restarts and steps that no run comes to: it is not the number of faults that ends it."""

END_SECONDS = 15.0
"""How long the run may take to end when it is asked to, with a save that is under way."""

NOTICE_SECONDS = 2.0
"""How long the death of a process may go unnoticed."""

ORPHAN_SECONDS = 2.0
"""How long a worker may outlive the run."""

LOOK_SECONDS = 0.1
MEMORY_SECONDS = 2.0
JUDGED_SECONDS = 600.0
"""Memory of a run that was watched for less is only shown: allocators still fill their pools."""

TERMINATED = 143
RESTARTED = "; restarting it ("
"""What the run says of each generator that it replaces (``generate/healing.py``)."""

OUTPUT_NAME = "controller.log"
TAIL_LINES = 12
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run and how to break it: a fault about ``every`` seconds, for ``minutes`` from the
    first step on; null lets the run come to its own end. ``reach``: see ``judge``.
    """

    config: Path
    overrides: Sequence[str]
    faults: Sequence[Fault]
    every: float
    seed: int
    minutes: float | None
    reach: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was injected and what was found."""

    run_dir: Path
    injections: Sequence[Injection]
    findings: Sequence[Finding]

    @property
    def sound(self) -> bool:
        """Whether no claim failed."""
        return all(finding.holds is not False for finding in self.findings)

    def text(self) -> str:
        """Both tables and what they come to, for a person."""
        tables = [*_injected(self.injections), "", *_found(self.findings)]
        return "\n".join([*tables, "", self._sum_line(), *self._where()])

    def _sum_line(self) -> str:
        judged = [finding for finding in self.findings if finding.holds is not None]
        failed = sum(not finding.holds for finding in judged)
        if failed:
            return f"{failed} of {len(judged)} claims fail{'s' if failed == 1 else ''}"
        if not self.injections:
            return "every claim holds, but nothing was broken: give the run more time"
        return "every claim holds"

    def _where(self) -> list[str]:
        """How to look on, if the run came so far."""
        if not self.run_dir.is_dir():
            return []
        return [f"look at the run: offbeat show {self.run_dir}"]


def _injected(injections: Sequence[Injection]) -> list[str]:
    if not injections:
        return ["no fault was injected"]
    counts = Counter((i.fault.value, i.target) for i in injections)
    return table(
        ("injected", "into", "times"), [(*key, str(n)) for key, n in sorted(counts.items())], left=2
    )


def _found(findings: Sequence[Finding]) -> list[str]:
    words = {True: "holds", False: "FAILS", None: "-"}
    return table(
        ("claim", "verdict", "detail"),
        [(f.claim, words[f.holds], f.detail) for f in findings],
        left=3,
    )


def soak(plan: Plan, say: Callable[[str], None]) -> Report:
    """Run ``plan`` to its end; ``say`` gets a line for each fault as it happens.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="offbeat-chaos-") as scratch:
        overrides = [*plan.overrides, *_additions(plan, Path(scratch))]
        cfg = load(plan.config, overrides)
        assert cfg.trial_name is not None
        run_dir = Path(cfg.fileroot) / cfg.experiment_name / cfg.trial_name
        output = Path(scratch) / OUTPUT_NAME
        say(f"run folder {run_dir}")
        with _child([str(plan.config), *overrides], output) as child:
            watch = _Watch(plan, cfg, child, run_dir, Path(scratch))
            watch.until_end(say)
        findings = watch.findings(output.read_text(encoding="utf-8", errors="replace"))
        if run_dir.is_dir():
            shutil.copy(output, run_dir / "logs" / OUTPUT_NAME)
            findings += _judged(run_dir, cfg, plan)
    return Report(run_dir=run_dir, injections=watch.injections, findings=findings)


def _judged(run_dir: Path, cfg: RunConfig, plan: Plan) -> list[Finding]:
    """What the folder tells; what was seen from outside counts also where it tells nothing."""
    try:
        return judge(run_dir, max_staleness=cfg.rollout.max_staleness, reach=plan.reach)
    except DataError as exc:
        return [Finding(claim="the run left a readable folder", holds=False, detail=str(exc))]


def _additions(plan: Plan, poison_dir: Path) -> Iterator[str]:
    """Overrides that let a run survive more faults than a healthy machine has; given ones stay."""
    cfg = load(plan.config, plan.overrides)
    if cfg.trial_name is None:
        yield f"trial_name=chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    if "max_restarts" not in cfg.generator.given:
        yield f"generator.max_restarts={UNLIMITED}"
    if "heartbeat_seconds" not in cfg.generator.given:
        yield f"generator.heartbeat_seconds={HEARTBEAT_SECONDS:g}"
    if Fault.POISON_REWARD in plan.faults:
        yield f"rollout.reward_fn={_poisoned(cfg, poison_dir)}"
    if plan.minutes is not None and not any(o.startswith("total_train_") for o in plan.overrides):
        yield from _endless(cfg)


def _poisoned(cfg: RunConfig, poison_dir: Path) -> str:
    """The run's reward functions, and one that adds nothing until it is told to fail."""
    given = cfg.rollout.reward_fn
    poison = {"fn": FUNCTION, "args": {"poison_dir": str(poison_dir)}}
    if isinstance(given, str):
        return json.dumps([{"fn": given}, poison])
    parts = [{"fn": r.fn, "weight": r.weight, "name": r.name, "args": dict(r.args)} for r in given]
    return json.dumps([*parts, poison])


def _endless(cfg: RunConfig) -> Iterator[str]:
    """Time ends the run, not its length; the learning rate rises as before, and then stays."""
    optimizer = cfg.actor.optimizer
    yield f"total_train_steps={UNLIMITED}"
    yield "actor.optimizer.lr_scheduler_type=constant"
    if cfg.total_train_steps is not None:
        steps = optimizer.warmup_steps_proportion * cfg.total_train_steps
        yield f"actor.optimizer.warmup_steps_proportion={steps / UNLIMITED:.9f}"


@contextmanager
def _child(arguments: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``offbeat train`` in a session of its own; it does not outlive the block."""
    with output.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> bool:
    """Ask it to end in order; False when it had to be killed.

    By SIGTERM: a shell lets what it starts in the background ignore Ctrl-C, and so do its children.
    """
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # Its workers die with it.
        child.wait()
        return False
    return True


class _Watch:
    """Looks at a run from outside until it has ended, and breaks it now and then."""

    def __init__(
        self,
        plan: Plan,
        cfg: RunConfig,
        child: subprocess.Popen[bytes],
        run_dir: Path,
        poison_dir: Path,
    ) -> None:
        self._plan = plan
        self._child = child
        self._run_dir = run_dir
        self._injector = Injector(plan.faults, seed=plan.seed, poison_dir=poison_dir)
        self._calm = 2 * cfg.generator.heartbeat_seconds + NOTICE_SECONDS
        """Seconds before the end in which nothing is broken any more: what is lost then may not be
        noticed in time.
        """
        self._memory = MemoryLog()
        self._seen: set[Process] = set()
        self._shared_memory = _shared_memory()
        self._began = time.monotonic()
        self._look_at = 0.0
        self._watched = 0.0
        self._asked = False
        self._ended = True
        self.injections: list[Injection] = []

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def until_end(self, say: Callable[[str], None]) -> None:
        """Returns when the run has ended, by itself or because its time is up."""
        self._until(lambda: (self._run_dir / METRICS_FILE).exists())
        limit = math.inf if self._plan.minutes is None else self._now + self._plan.minutes * 60
        while self._pause(limit) and self._now < limit:
            if self._now < limit - self._calm:
                self._break(say)
        self._injector.wake(math.inf)
        self._watched = self._now
        if self._child.poll() is None:
            self._look()
            self._asked = True
            self._ended = _end(self._child)

    def _pause(self, limit: float) -> bool:
        """Look on until the next fault is due; False when the run ends before."""
        due = min(limit, self._now + self._injector.pause_until_next(self._plan.every))
        return self._until(lambda: self._now >= due)

    def _until(self, reached: Callable[[], bool]) -> bool:
        """Look on until then; False when the run ends before."""
        while not reached():
            if self._child.poll() is not None:
                return False
            if self._now >= self._look_at:
                self._look_at = self._now + MEMORY_SECONDS
                self._look()
            self._injector.wake(self._now)
            time.sleep(LOOK_SECONDS)
        return True

    def _break(self, say: Callable[[str], None]) -> None:
        injection = self._injector.inject(processes_of(self._child.pid), self._now)
        if injection is not None:
            self.injections.append(injection)
            where = "" if injection.pid is None else f" (pid {injection.pid})"
            say(f"{injection.at:7.1f} s  {injection.fault}: {injection.target}{where}")

    def _look(self) -> None:
        processes = processes_of(self._child.pid)
        self._seen.update(processes)
        self._memory.add({(p.name, p.pid): p.resident_bytes for p in processes}, self._now)

    def findings(self, output: str) -> list[Finding]:
        """What was seen from outside; ``output`` is what the run said."""
        return [
            self._end_as_expected(output),
            self._losses_noticed(output),
            self._nothing_left(),
            *(self._flat(growth) for growth in self._memory.growth()),
        ]

    def _end_as_expected(self, output: str) -> Finding:
        expected = TERMINATED if self._asked else os.EX_OK
        code = self._child.returncode
        fine = self._ended and code == expected
        last = "" if fine else ": " + " | ".join(output.splitlines()[-TAIL_LINES:])
        return Finding(
            claim="the run went on to its end, and ended when asked (I13)",
            holds=fine,
            detail=f"exit code {code}{self._asked_text(fine)}{last}",
        )

    def _asked_text(self, fine: bool) -> str:
        if not self._asked:
            return ""
        as_asked = ", as asked by" if fine else ", asked by"
        return f"{as_asked} SIGTERM after {self._watched:.0f} s"

    def _losses_noticed(self, output: str) -> Finding:
        """Each lost generator is named (I12), and nobody who was not lost; the last may be due."""
        lost = {i.pid: i.at for i in self.injections if i.fault in LOSES_GENERATOR}
        due = sum(at > self._watched - self._calm for at in lost.values())
        restarts = output.count(RESTARTED)
        return Finding(
            claim="each lost generator was named and replaced, and no other (I12)",
            holds=len(lost) - due <= restarts <= len(lost),
            detail=f"{len(lost)} lost, {restarts} replaced",
        )

    def _nothing_left(self) -> Finding:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := [p for p in self._seen if p.alive]) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        files = _shared_memory() - self._shared_memory
        names = [f"{p.name} (pid {p.pid})" for p in left] + sorted(files)
        return Finding(
            claim="no process and no shared memory is left (I13)",
            holds=not names,
            detail=", ".join(names) or f"{len(self._seen)} processes, all gone",
        )

    def _flat(self, growth: Growth) -> Finding:
        change = growth.last / growth.first - 1
        return Finding(
            claim=f"memory of {growth.name} stays flat",
            holds=growth.flat if self._watched >= JUDGED_SECONDS else None,
            detail=f"{growth.first / MIB:.1f} MiB in the first third, {growth.last / MIB:.1f} in "
            f"the last ({change:+.1%})",
        )


def _shared_memory() -> set[str]:
    """Named shared memory of this user; offbeat makes none, and what it starts should not."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            with suppress(OSError):
                if entry.stat().st_uid == os.getuid():
                    found.add(entry.path)
    return found
