"""Where the processes of a run live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.schema import Problem, Section


class SchedulerType(StrEnum):
    """local: processes on this machine; inline: everything inside the controller; slurm: later."""

    LOCAL = "local"
    INLINE = "inline"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """Placement of generators and trainer."""

    type: SchedulerType = SchedulerType.LOCAL
    """Where the processes live; slurm is refused: there is no such scheduler yet."""

    def _contradictions(self) -> Iterator[Problem]:
        if self.type is SchedulerType.SLURM:
            yield Problem(
                path="type",
                text="there is no Slurm scheduler yet; local runs everything on one machine, also "
                "inside a job that Slurm gave you",
            )
