"""When the policy is evaluated on ``valid_dataset``."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.config.schema import NonNegativeInt, Section, store


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorConfig(Section):
    """Evaluations during the run. A frequency of 0 is off and becomes null."""

    freq_epochs: NonNegativeInt | None = None
    """Evaluate every n epochs; 0 and null are off."""

    freq_steps: NonNegativeInt | None = None
    """Evaluate every n steps; 0 and null are off."""

    freq_secs: NonNegativeInt | None = None
    """Evaluate every n seconds; 0 and null are off."""

    at_start: bool = True
    """Evaluate before the first step."""

    at_end: bool = True
    """Evaluate after the last step."""

    def _settle(self) -> None:
        for name in ("freq_epochs", "freq_steps", "freq_secs"):
            if getattr(self, name) == 0:
                store(self, name, None)
