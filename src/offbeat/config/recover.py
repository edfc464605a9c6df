"""When a run takes snapshots of itself, and whether it continues by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.saver import FREQUENCIES, OnError
from offbeat.config.schema import NonNegativeInt, PositiveInt, Problem, Section, store


class RecoverMode(StrEnum):
    """off: a run goes on only with ``offbeat train --resume``; auto: whenever there is one that was
    not finished, so that the same command starts and restarts a job.
    """

    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverConfig(Section):
    """Snapshots hold all that a run needs to continue: weights, optimizer, open groups.

    They are taken in the background and cost three times the float32 weights of disk each. The
    default bounds what can be lost by time, because that bounds what it costs; short runs take
    none. A frequency of 0 is off and becomes null.
    """

    mode: RecoverMode = RecoverMode.OFF
    """Whether ``offbeat train`` continues an unfinished run without being told to."""

    freq_epochs: NonNegativeInt | None = None
    """Take a snapshot every n epochs; 0 and null are off."""

    freq_steps: NonNegativeInt | None = None
    """Take a snapshot every n steps; 0 and null are off."""

    freq_secs: NonNegativeInt | None = 600
    """Take a snapshot every n seconds; 0 and null are off."""

    keep: PositiveInt = 2
    """Keep the n newest; a second one is there should the newest be damaged."""

    on_error: OnError = OnError.STOP
    """Whether a failed snapshot ends the run; it can be continued from the snapshot before."""

    def _settle(self) -> None:
        for name in FREQUENCIES:
            if getattr(self, name) == 0:
                store(self, name, None)

    def _contradictions(self) -> Iterator[Problem]:
        if any(getattr(self, name) is not None for name in FREQUENCIES):
            return
        for name in ("keep", "on_error"):
            if name in self.given:
                yield Problem(
                    path=name,
                    text=f"{getattr(self, name)} has no effect: no snapshot is ever taken; set "
                    f"freq_steps or freq_secs, or leave {name} out",
                )
