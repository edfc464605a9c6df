"""What must hold of every run, whatever happened to it; read from outside, in another process."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from offbeat.observe.ledger import LedgerRow, read_groups
from offbeat.pipeline.chaos.judge import judge

TIMES = ("throughput/", "wait/", "train/", "weights/", "generate/pause", "generate/restarts")
"""What may differ between two runs that are otherwise equal."""


def max_staleness(lab: Any, trial: str = "run") -> int:
    config = yaml.safe_load((lab.run_dir(trial) / "config.yaml").read_text())
    return int(config["rollout"]["max_staleness"])


def check_run(lab: Any, trial: str = "run") -> None:
    """I01 and I02, and that ledger, rollouts and summary tell the same story."""
    findings = judge(lab.run_dir(trial), max_staleness=max_staleness(lab, trial))
    assert len(findings) >= 6
    assert [f for f in findings if f.holds is False] == []
    assert max(step["lag/group_max"] for step in lab.metrics(trial)) <= max_staleness(lab, trial)


def fates(lab: Any, trial: str = "run") -> dict[str, int]:
    """How many groups ended how; None stands for those that are open."""
    with closing(sqlite3.connect(lab.run_dir(trial) / "run.db")) as ledger:
        found = ledger.execute(
            "SELECT coalesce(reason, fate, 'open'), count(*) FROM groups GROUP BY 1"
        )
        return dict(found)


def rows(lab: Any, trial: str = "run") -> tuple[LedgerRow, ...]:
    """Every group of the run."""
    return read_groups(lab.run_dir(trial) / "run.db")


def details(lab: Any, reason: str) -> str:
    """Why groups were dropped for ``reason``, one per line."""
    return "\n".join(row.detail for row in rows(lab) if row.reason == reason)


def shared_memory() -> set[str]:
    """Named shared memory of this user."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir() if entry.stat().st_uid == os.getuid()}


def weights(lab: Any, trial: str) -> bytes:
    return bytes((lab.run_dir(trial) / "checkpoints/latest/model.safetensors").read_bytes())


def without_times(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in step.items() if k != "seconds" and not k.startswith(TIMES)}
        for step in steps
    ]


def restarts(lab: Any, trial: str) -> float:
    return float(sum(step["generate/restarts_count"] for step in lab.metrics(trial)))


def check_equal(lab: Any, trial: str, undisturbed: str) -> None:
    assert without_times(lab.metrics(trial)) == without_times(lab.metrics(undisturbed))
    assert weights(lab, trial) == weights(lab, undisturbed)
