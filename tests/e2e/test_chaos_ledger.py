"""The ledger adds up for another process at any moment: mid-run, on a full disk, after SIGKILL."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from chaos_checks import check_run, fates, max_staleness, shared_memory

from offbeat.checkpoint.manifest import verify
from offbeat.observe.ledger import read_tokens, read_totals

BATCH = 2
"""Groups of one step in the configuration of these runs."""

SOON = 10.0
DEATH_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a ledger found, in one transaction."""

    admitted: int
    trained: int
    dropped: int
    open: int
    last_id: int
    steps: int
    last_step: int
    largest_lag: int


QUERY = """
SELECT count(*), count(*) FILTER (WHERE fate = 'trained'), count(*) FILTER (WHERE fate = 'dropped'),
       count(*) FILTER (WHERE fate IS NULL), coalesce(max(group_id), -1), count(DISTINCT step),
       coalesce(max(step), 0), coalesce(max(start_version - admission_version), 0)
FROM groups WHERE superseded_by IS NULL
"""


@contextmanager
def reading(lab: Any) -> Iterator[sqlite3.Connection]:
    file = lab.run_dir() / "run.db"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as connection:
        yield connection


def look(lab: Any) -> Look:
    with reading(lab) as connection:
        (found,) = connection.execute(QUERY)
    return Look(**dict(zip(Look.__dataclass_fields__, found, strict=True)))


def check_look(seen: Look, staleness: int) -> None:
    """Holds at any moment of any run: groups in order, whole steps, and the bound."""
    assert seen.admitted == seen.trained + seen.dropped + seen.open
    assert seen.admitted == seen.last_id + 1
    assert seen.steps == seen.last_step
    assert seen.trained == BATCH * seen.steps
    assert seen.open <= (staleness + 1) * BATCH
    assert seen.largest_lag <= staleness


def check_moved_on(before: Look, after: Look) -> None:
    assert before.admitted <= after.admitted
    assert before.trained <= after.trained
    assert before.dropped <= after.dropped


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_another_process_can_add_the_ledger_up_at_any_moment_and_after_sigkill(
    lab: Any, mode: str
) -> None:
    run = lab.train(f"mode={mode}", "total_train_steps=1000000")
    run.until("the first step", lambda: lab.groups("trained"))
    staleness = max_staleness(lab)
    seen = [look(lab)]
    while seen[-1].steps < seen[0].steps + 30:
        seen.append(look(lab))
        check_look(seen[-1], staleness)
        check_moved_on(*seen[-2:])
        assert run.process.poll() is None, run.output
    os.kill(run.pid, signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    last = look(lab)
    check_look(last, staleness)
    check_moved_on(seen[-1], last)
    totals = read_totals(lab.run_dir() / "run.db")
    assert totals.admitted == totals.trained + sum(totals.dropped.values()) + totals.open
    tokens = read_tokens(lab.run_dir() / "run.db")
    assert tokens.generated == tokens.trained + sum(tokens.wasted.values())


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_nothing_outlives_a_killed_controller_of_many_processes_by_two_seconds(lab: Any) -> None:
    before = shared_memory()
    run = lab.train(
        "mode=async", "generator.replicas=2", "rollout.reward_workers=3", "saver.freq_steps=1",
        "total_train_steps=1000000",
    )  # fmt: skip
    run.until("a saved step", (lab.run_dir() / "checkpoints" / "latest").exists)
    workers = run.workers()
    assert {"trainer", "generator-0", "generator-1", "rewards", "writer"} <= set(workers)
    began = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    run.process.wait(DEATH_SECONDS)
    while run.workers():
        assert time.monotonic() - began < DEATH_SECONDS, f"left behind {run.workers()}"
        time.sleep(0.005)
    assert shared_memory() <= before
    verify((lab.run_dir() / "checkpoints" / "latest").resolve())


@pytest.mark.slow
@pytest.mark.invariant("I02")
@pytest.mark.invariant("I11")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_under_the_checkpoints_ends_the_run_and_leaves_no_torn_one(
    lab: Any, mode: str
) -> None:
    run = lab.train(f"mode={mode}", "saver.freq_steps=1", "total_train_steps=1000000")
    run.until("a saved step", (lab.run_dir() / "checkpoints" / "latest").exists)
    resource.prlimit(run.worker("writer"), resource.RLIMIT_FSIZE, (1000, 1000))
    assert run.end(within=SOON) == 1, run.output
    assert "checkpoints/step-" in lab.summary()["error"]
    assert "File too large" in lab.summary()["error"]
    assert "Traceback" not in run.output
    check_run(lab)
    for folder in (lab.run_dir() / "checkpoints").glob("step-*"):
        verify(folder)


@pytest.mark.slow
@pytest.mark.invariant("I02")
def test_a_full_disk_under_the_ledger_ends_the_run_and_what_is_there_adds_up(lab: Any) -> None:
    run = lab.train("mode=async", "total_train_steps=1000000")
    run.until("the first step", lambda: lab.groups("trained"))
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
    assert run.end(within=SOON) == 1, run.output
    assert "run.db: the ledger cannot be written" in run.output
    assert "Free space on that file system" in run.output
    assert "Traceback" not in run.output
    check_look(look(lab), max_staleness(lab))
    assert fates(lab)["open"] > 0
