"""The rollout side: workflow, reward, staleness bound, failure budgets and deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.schema import (
    Fraction,
    NonNegativeInt,
    PluginSpec,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    preset,
    store,
)


class RolloutPolicy(StrEnum):
    """Which groups make a batch. pace: the oldest tickets, in admission order."""

    PACE = "pace"


class Lookahead(StrEnum):
    """How many tickets are open. full: as many as the staleness bound allows."""

    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """How prompts become scored groups, and how far behind the trainer they may be."""

    workflow: PluginSpec = "offbeat.rollout.rlvr:RLVRWorkflow"
    """``module:attribute`` of the workflow."""

    reward_fn: PluginSpec
    """``module:function`` of the reward; looked up first beside the configuration file."""

    reward_timeout_seconds: PositiveFloat = 15.0
    """A reward call is killed after this long, counted from its start."""

    reward_workers: PositiveInt = 2
    """Reward worker processes."""

    max_staleness: NonNegativeInt = field(default_factory=preset(0))
    """η, versions: a group trains at most this long after its admission; 0 is synchronous."""

    max_head_offpolicyness: NonNegativeInt | None = None
    """Another name of ``max_staleness``; null once the configuration is resolved."""

    policy: RolloutPolicy = RolloutPolicy.PACE
    """Which groups make a batch."""

    lookahead: Lookahead = Lookahead.FULL
    """How many tickets are open."""

    max_concurrent_rollouts: PositiveInt | None = None
    """Requests in flight over all generators; null: slots times replicas, at least one group."""

    max_failure_rate: Fraction = 0.5
    """Share of failed groups above which the run stops."""

    max_consecutive_failures: PositiveInt = 20
    """Failed groups in a row after which the run stops."""

    allow_uncorrected: bool = False
    """Permit ``max_staleness`` > 0 without decoupled loss, which is known to collapse."""

    request_timeout_seconds: PositiveFloat = 600.0
    """Longest time for one generation request."""

    stall_seconds: PositiveFloat = 300.0
    """A wait without progress for this long ends the run and names what was waited for."""

    def _settle(self) -> None:
        alias = self.max_head_offpolicyness
        if alias is not None and "max_staleness" not in self.given:
            store(self, "max_staleness", alias)
            store(self, "given", (self.given | {"max_staleness"}) - {"max_head_offpolicyness"})
        if alias == self.max_staleness:
            store(self, "max_head_offpolicyness", None)
            store(self, "given", self.given - {"max_head_offpolicyness"})

    def _contradictions(self) -> Iterator[Problem]:
        if self.max_head_offpolicyness is not None:
            yield Problem(
                path="max_head_offpolicyness",
                text=f"{self.max_head_offpolicyness} is another name of max_staleness, "
                f"which is {self.max_staleness}; keep one",
            )
