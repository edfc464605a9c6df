"""How answers are sampled, in training (``gconfig``) and in evaluation (``eval_gconfig``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from offbeat.config.schema import (
    Fraction,
    Matching,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Problem,
    Range,
    Section,
    preset,
)

LEAST_TEMPERATURE = 1e-3
"""Below it the answers are greedy in all but name, and large logits, divided, leave float32."""

MOST_TEMPERATURE = 1e3
"""Above it every token is as likely as any other."""

MOST_TOP_K = 1_000_000
"""More than any vocabulary has; far larger numbers fit no array of the engine."""

TopK = Annotated[int, Range(ge=0, le=MOST_TOP_K)]
StopString = Annotated[str, Matching(pattern=r"(?s).+", meaning="a string that is not empty")]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig(Section):
    """Sampling of one prompt's answers.

    Left out of ``eval_gconfig``: ``n_samples`` is 1, ``temperature`` 0, and ``max_new_tokens``,
    ``stop``, ``stop_token_ids`` and ``ignore_eos`` are those of ``gconfig``.
    """

    n_samples: PositiveInt = field(default_factory=preset(8))
    """Answers (siblings) per prompt."""

    max_new_tokens: PositiveInt = field(default_factory=preset(256))
    """Longest answer, tokens."""

    temperature: NonNegativeFloat = field(default_factory=preset(1.0))
    """Divides the logits; 0 is greedy, else 0.001 to 1000. Training needs > 0."""

    top_p: Fraction = 1.0
    """Keep the most likely tokens up to this mass; 1 is off. Training needs 1."""

    top_k: TopK = 0
    """Keep the k most likely tokens; 0 is off. Training needs 0."""

    min_p: Fraction = 0.0
    """Keep tokens this likely relative to the likeliest one; 0 is off. Training needs 0."""

    stop: tuple[StopString, ...] = field(default_factory=preset(()))
    """Strings that end an answer; text is trimmed, tokens stay."""

    stop_token_ids: tuple[NonNegativeInt, ...] = field(default_factory=preset(()))
    """Token ids that end an answer, beside the model's own."""

    ignore_eos: bool = field(default_factory=preset(False))
    """Do not end at the model's own end-of-sequence tokens."""

    def _contradictions(self) -> Iterator[Problem]:
        if self.top_p == 0.0:
            yield Problem(path="top_p", text="0.0 keeps no token; it must be > 0 (1 is off)")
        wrong = temperature_problem(self.temperature)
        if wrong is not None:
            yield Problem(path="temperature", text=wrong)


def temperature_problem(value: float) -> str | None:
    """What is wrong with a temperature, of a configuration or of a single request; None: nothing.

    A NaN is wrong too.
    """
    if value == 0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        return None
    return (
        f"{value} is neither 0 (greedy) nor between {LEAST_TEMPERATURE:g} and {MOST_TEMPERATURE:g}"
    )
