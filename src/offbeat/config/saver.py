"""When and how model folders are saved, and the save option of Megatron engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.schema import NonNegativeInt, PositiveInt, Section, preset, store


class AsyncMode(StrEnum):
    """sync: training waits for the write; async: for the copy only; auto: async where supported."""

    SYNC = "sync"
    ASYNC = "async"
    AUTO = "auto"


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

    at_end: bool = True
    """Save after the last step."""

    def _settle(self) -> None:
        for name in ("freq_epochs", "freq_steps", "freq_secs"):
            if getattr(self, name) == 0:
                store(self, name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronEngineConfig(Section):
    """Options of Megatron training engines."""

    async_save: bool = field(default_factory=preset(False))
    """Save in the background."""
