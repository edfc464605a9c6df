"""Where the processes of a run live."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.schema import Section


class SchedulerType(StrEnum):
    """local: processes on this machine; inline: everything inside the controller."""

    LOCAL = "local"
    INLINE = "inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """Placement of generators and trainer."""

    type: SchedulerType = SchedulerType.LOCAL
    """Where the processes live."""
