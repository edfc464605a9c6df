"""Groups that teach nothing: which they are, why, and when there have been too many in a row.

Owns the causes and the count; knows no tasks and no trainer. A group without signal is no failure:
it is trained on for nothing, or with dynamic sampling replaced. Thousands of them are a run that
learns nothing and looks busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import RolloutError
from offbeat.observe.metrics import no_signal_name
from offbeat.types import NoSignal, RolloutGroup, Scored, StopReason

ADVICE = {
    NoSignal.EMPTY: "no answer has a token to train on; does the model stop at once? Look at "
    "`offbeat show RUN --samples 3` and at gconfig.stop",
    NoSignal.TRUNCATED: "every answer was cut at gconfig.max_new_tokens, and cut answers do not "
    "count (actor.exclude_truncated, actor.mask_no_eos_with_zero); raise gconfig.max_new_tokens",
    NoSignal.EQUAL: "all rewards of a group are equal, so no answer is better than another; look "
    "at `offbeat show RUN --samples 3`: is the task too hard or too easy for this model, or does "
    "the reward function miss the right answers? Partial credit, easier rows or more answers "
    "(gconfig.n_samples) help",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRules:
    """What takes a group's signal away under the objective of the run.

    ``group_baseline``: rewards are compared within the group. ``truncated_count``: answers cut by
    the length limit take part in the loss with a reward of their own.
    """

    group_baseline: bool
    truncated_count: bool

    def why_none(self, group: RolloutGroup) -> NoSignal | None:
        """The first cause that holds for the group's valid rollouts; None where there is signal."""
        last = [r.turns[-1].completion for r in group.valid]
        if not any(len(t.completion.token_ids) for r in group.valid for t in r.turns):
            return NoSignal.EMPTY
        cut = all(c.stop_reason is StopReason.LENGTH for c in last)
        if cut and not self.truncated_count:
            return NoSignal.TRUNCATED
        return NoSignal.EQUAL if self.group_baseline and rewards_equal(group) else None

    def counts(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """How many of a step's groups have no signal, a metric for each cause."""
        causes = Counter(self.why_none(group) for group in groups)
        return {no_signal_name(cause): float(causes[cause]) for cause in NoSignal}


def rewards_equal(group: RolloutGroup) -> bool:
    """Whether every valid answer has the same reward."""
    return len({r.reward.value for r in group.valid if isinstance(r.reward, Scored)}) == 1


class SignalWatch:
    """Counts groups without signal, and ends a run that has seen nothing else for long.

    Args:
        max_in_a_row: groups without signal in a row after which the run stops; None never stops.
    """

    def __init__(self, max_in_a_row: int | None) -> None:
        self._max = max_in_a_row
        self._in_a_row: Counter[NoSignal] = Counter()

    def record(self, cause: NoSignal | None) -> None:
        """Count one complete group, in the order of completion.

        Raises:
            RolloutError: that many in a row had none; names the most frequent cause, and what to
                try.
        """
        if cause is None:
            self._in_a_row.clear()
            return
        self._in_a_row[cause] += 1
        total = self._in_a_row.total()
        if self._max is not None and total >= self._max:
            ((most, count),) = self._in_a_row.most_common(1)
            raise RolloutError(
                f"the last {total} groups gave nothing to learn from "
                f"(rollout.max_groups_without_signal), {count} of them because {ADVICE[most]}"
            )
