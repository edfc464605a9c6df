"""The rollout side: workflow, reward, staleness bound, failure budgets and deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.config.reward import RewardConfig, RewardSpec, bad_url
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
    """Which groups make a batch.

    pace: the oldest, in admission order; drop: the first that are ready, and late ones are dropped.
    """

    PACE = "pace"
    DROP = "drop"


class Lookahead(StrEnum):
    """How many groups are open. full: all that the bound allows; adaptive: what training needs."""

    FULL = "full"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section):
    """How prompts become scored groups, and how far behind the trainer they may be."""

    workflow: PluginSpec = "offbeat.rollout.rlvr:RLVRWorkflow"
    """``module:attribute`` of the workflow."""

    reward_fn: RewardSpec | tuple[RewardConfig, ...]
    """``module:function`` of the reward, looked up first beside the configuration file; or the URL
    of a web service; or a list of ``{fn, weight, name, args}``, whose values are added up.
    """

    reward_timeout_seconds: PositiveFloat = 15.0
    """A reward call is killed after this long, counted from its start."""

    reward_workers: PositiveInt = 2
    """Worker processes of each reward function."""

    max_staleness: NonNegativeInt = field(default_factory=preset(0))
    """η, versions: a group trains at most this long after its admission; 0 is synchronous."""

    max_head_offpolicyness: NonNegativeInt | None = None
    """Another name of ``max_staleness``; null once the configuration is resolved."""

    policy: RolloutPolicy = RolloutPolicy.PACE
    """Which groups make a batch; drop throws late groups away, and with them long answers."""

    lookahead: Lookahead = Lookahead.FULL
    """How many groups are open; adaptive makes the data younger where generation is fast."""

    group_deadline_seconds: PositiveFloat | None = None
    """A group that takes longer is dropped and replaced; null waits. Not repeatable bit for bit."""

    dynamic_sampling: bool = False
    """Replace groups that teach nothing (all rewards equal, say) instead of training on them."""

    max_groups_without_signal: PositiveInt | None = 2000
    """Groups in a row that teach nothing after which the run stops; null never stops."""

    max_concurrent_rollouts: PositiveInt | None = None
    """Requests in flight over all generators; null: slots times replicas, at least one group."""

    max_failure_rate: Fraction = 0.5
    """Share of failed groups above which the run stops."""

    max_consecutive_failures: PositiveInt = 20
    """Failed groups in a row after which the run stops."""

    allow_uncorrected: bool = False
    """Permit ``max_staleness`` > 0 without decoupled loss, which is known to collapse."""

    request_timeout_seconds: PositiveFloat = 600.0
    """Longest time for one generation request, after which its generator is replaced once."""

    stall_seconds: PositiveFloat = 300.0
    """A wait without progress for this long ends the run and names what was waited for. Where it is
    for a generator, ``request_timeout_seconds`` more, so that this can be replaced first."""

    def _settle(self) -> None:
        alias = self.max_head_offpolicyness
        if alias is not None and "max_staleness" not in self.given:
            store(self, "max_staleness", alias)
            store(self, "given", (self.given | {"max_staleness"}) - {"max_head_offpolicyness"})
        if alias == self.max_staleness:
            store(self, "max_head_offpolicyness", None)
            store(self, "given", self.given - {"max_head_offpolicyness"})

    def _contradictions(self) -> Iterator[Problem]:
        yield from self._bad_reward()
        if self.max_head_offpolicyness is not None:
            yield Problem(
                path="max_head_offpolicyness",
                text=f"{self.max_head_offpolicyness} is another name of max_staleness, "
                f"which is {self.max_staleness}; keep one",
            )

    def _bad_reward(self) -> Iterator[Problem]:
        if isinstance(self.reward_fn, str):
            yield from bad_url(self.reward_fn, "reward_fn")
            return
        if not self.reward_fn:
            yield Problem(path="reward_fn", text="an empty list; name at least one function")
        names = [reward.name for reward in self.reward_fn]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield Problem(
                    path=f"reward_fn[{index}].name",
                    text=f"{name!r} is also the name of another; give one of them its own",
                )
