"""When and how model folders are saved, and the save option of Megatron engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.schema import NonNegativeInt, PositiveInt, Problem, Section, preset, store

FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")
"""The keys that say when; all three off: never."""


class AsyncMode(StrEnum):
    """sync: training waits for the write; async: for the copy only; auto: async where supported."""

    SYNC = "sync"
    ASYNC = "async"
    AUTO = "auto"


class OnError(StrEnum):
    """What a failed save does, on a full disk for example. stop: it ends the run; continue: it is
    logged and counted, and the next one that is due is tried.
    """

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverConfig(Section):
    """Hugging Face folders written during the run. A frequency of 0 is off and becomes null."""

    freq_epochs: NonNegativeInt | None = None
    """Save every n epochs; 0 and null are off."""

    freq_steps: NonNegativeInt | None = None
    """Save every n steps; 0 and null are off."""

    freq_secs: NonNegativeInt | None = None
    """Save every n seconds; 0 and null are off."""

    mode: AsyncMode = field(default_factory=preset(AsyncMode.SYNC))
    """Whether training waits for the write."""

    keep_last: PositiveInt | None = None
    """Keep the n newest folders; null keeps all."""

    keep_every: PositiveInt | None = None
    """Beside those of keep_last, keep each folder whose step is a multiple of n; null keeps none.
    """

    at_end: bool = True
    """Save after the last step."""

    on_error: OnError = OnError.STOP
    """Whether a failed save ends the run. The save of the last step always does."""

    def _settle(self) -> None:
        for name in FREQUENCIES:
            if getattr(self, name) == 0:
                store(self, name, None)

    def _contradictions(self) -> Iterator[Problem]:
        if self.keep_every is not None and self.keep_last is None:
            yield Problem(
                path="keep_every",
                text=f"{self.keep_every} has no effect: keep_last is null, so every folder stays; "
                "set keep_last, or leave keep_every out",
            )
        if self.keep_every == 1 and self.keep_last is not None:
            yield Problem(
                path="keep_every",
                text=f"1 keeps the folder of every step, so keep_last {self.keep_last} has no "
                "effect; set keep_every to 2 or more, or leave both out",
            )
        if self.on_error is OnError.CONTINUE and all(getattr(self, n) is None for n in FREQUENCIES):
            yield Problem(
                path="on_error",
                text="continue has no effect: nothing is saved before the last step, and that save "
                "always ends the run when it fails; set freq_steps or freq_secs, or leave on_error "
                "out",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronEngineConfig(Section):
    """Options of Megatron training engines."""

    async_save: bool = field(default_factory=preset(False))
    """Save in the background."""
