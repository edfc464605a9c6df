"""How a run that ended early goes on: from which snapshot, and by which command.

Looks at the names in a run's folder only; whether a snapshot is whole, its reader says.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from offbeat.observe.find import CONFIG_FILE
from offbeat.observe.summary import RunStatus

_ENDED_EARLY = (RunStatus.KILLED, RunStatus.INTERRUPTED, RunStatus.FAILED)
_SNAPSHOTS = "snapshots"
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """``snapshot`` is the newest one, relative to the run's folder; None where none was taken."""

    command: str
    snapshot: Path | None
    step: int

    @property
    def sentence(self) -> str:
        """For a person."""
        if self.snapshot is None:
            return f"starts over, no snapshot was taken: {self.command}"
        return f"from step {self.step} ({self.snapshot}): {self.command}"


def resumption(run_dir: Path, status: RunStatus) -> Resumption | None:
    """How to go on with the run; None where it completed, may still go on, or never began."""
    config = run_dir / CONFIG_FILE
    if status not in _ENDED_EARLY or not config.is_file():
        return None
    # Its own configuration has the overrides and the trial's name in it.
    command = f"offbeat train {shlex.quote(str(config))} --resume"
    found = [
        (int(m[1]), p) for p in run_dir.glob(f"{_SNAPSHOTS}/*") if (m := _STEP.fullmatch(p.name))
    ]
    step, newest = max(found, default=(0, None))
    snapshot = None if newest is None else newest.relative_to(run_dir)
    return Resumption(command=command, snapshot=snapshot, step=step)
