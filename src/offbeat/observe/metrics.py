"""The declared metrics of a run and the record of one step.

Owns the set of names (``area/quantity_unit``), how several values of one name become one
(`Reduction`), and `StepRecord`. Knows no files and no processes. A name that is not declared here
is a typo somebody plots for a week: it is refused where tests turn warnings into errors, and said
once (by the warnings machinery) in a user's run, which goes on.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from offbeat.protocols import JsonValue
from offbeat.types import DropReason, NoSignal


class Reduction(StrEnum):
    """How several values of one metric become one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric: its name, how it is reduced, and what it means (with unit)."""

    name: str
    reduction: Reduction
    meaning: str


class UndeclaredMetric(UserWarning, ValueError):
    """A metric name that is not in `METRICS`; an error under a warnings filter of ``error``."""


PROX_PREFIX = "actor/prox_"
PROX_APPROXIMATIONS: Mapping[str, str] = {
    "loglinear": "log-linear proximal log-prob",
    "linear": "proximal log-prob of mixed probabilities",
    "rollout": "recorded log-prob as the proximal one",
}
"""What can stand in for the recomputed proximal log-prob."""

PROX_MEASURES: Mapping[str, str] = {
    "logp_mean": "mean, nats",
    "error_mean": "distance from the recomputed one, nats, mean",
    "error_max": "distance from the recomputed one, nats, largest",
    "relative_error_mean": "mean distance as a fraction of the recomputed one's mean size",
    "squared_error_mean": "squared distance from the recomputed one, nats², mean",
    "behave_weight_mean": "its behavior weight: proximal over behavior probability, mean",
    "behave_error_mean": "distance of its behavior weight from the true one, mean",
    "behave_relative_error_mean": "the same as a fraction of the true behavior weight, mean",
    "ratio_mean": "its importance ratio: current over proximal probability, mean",
    "ratio_error_mean": "distance of its importance ratio from the true one, mean",
    "ratio_relative_error_mean": "the same as a fraction of the true importance ratio, mean",
}
"""What is measured about each of `PROX_APPROXIMATIONS`; fractions, not percent."""


def prox_name(approximation: str, measure: str) -> str:
    """The metric of one of `PROX_MEASURES` of one of `PROX_APPROXIMATIONS`.

    Example:
        >>> prox_name("loglinear", "error_mean")
        'actor/prox_error_loglinear_mean'
    """
    quantity, _, reduction = measure.rpartition("_")
    return f"{PROX_PREFIX}{quantity}_{approximation}_{reduction}"


_MEAN: Mapping[str, str] = {
    "reward/mean": "mean reward of the valid rollouts of the batch",
    "reward/std": "standard deviation of the same rewards",
    "reward/valid_fraction": "rollouts of the batch whose reward could be computed",
    "reward/zero_std_fraction": "groups whose rewards are all equal",
    "eval/reward_mean": "mean reward on the validation set",
    "eval/length_tokens": "mean length of a validation answer",
    "eval/truncated_fraction": "validation answers cut by the length limit",
    "eval/valid_fraction": "validation rewards that could be computed",
    "lag/group_mean": "start version - admission version, mean over groups",
    "lag/token_mean": "start version - token version, mean over trained tokens",
    "throughput/tokens_per_second": "generated tokens per second of the step, prompts excluded",
    "throughput/trained_tokens_per_second": "tokens with a loss per second of the step",
    "generate/length_tokens": "mean length of an answer of the batch",
    "generate/truncated_fraction": "answers of the batch cut by the length limit",
    "actor/loss": "loss of the actor, all terms",
    "actor/entropy": "entropy over the vocabulary, nats, mean over trained tokens",
    "actor/clip_fraction": "trained tokens whose ratio was clipped",
    "actor/dual_clip_fraction": "trained tokens held by the lower clip of negative advantages",
    "actor/grad_norm": "gradient norm before clipping, mean over minibatches",
    "actor/ratio_mean": "current over proximal probability",
    "actor/behave_weight_mean": "proximal over behavior probability, before the cap",
    "actor/masked_fraction": "trained tokens whose behavior weight was masked",
    "actor/ess": "effective sample size of the behavior weights, as a fraction of the tokens",
    "actor/kl_k1": "k1 estimate of KL(behavior || proximal), nats",
    "actor/kl_k3": "k3 estimate of KL(behavior || proximal), nats",
    "actor/prox_logp_mean": "recomputed proximal log-prob, nats, mean over trained tokens",
}
_SUM: Mapping[str, str] = {
    "reward/invalid_count": "rollouts whose reward could not be computed",
    "eval/samples_count": "validation answers scored",
    "eval/seconds": "seconds spent evaluating",
    "wait/data_seconds": "seconds the trainer waited for groups",
    "wait/eval_seconds": "seconds a commit waited for a running evaluation",
    "wait/save_seconds": "seconds training waited for a save",
    "wait/snapshot_seconds": "seconds training waited for a snapshot to begin",
    "wait/staging_seconds": "seconds a publication waited for the copy of what is saved",
    "generate/pause_seconds": "seconds generation stood still for a commit",
    "generate/restarts_count": "generator processes that were lost and replaced",
    "generate/two_versions_count": "completions whose tokens have more than one version",
    "save/failed_count": "model folders that could not be saved while training went on",
    "snapshot/failed_count": "snapshots that could not be written while training went on",
    "train/update_seconds": "seconds the trainer was busy with the update",
    "train/staging_seconds": "seconds an optimizer step waited for a snapshot's copy",
    "train/publish_seconds": "seconds to lay the new weights out for the generators",
    "weights/stage_seconds": "seconds to stage the new version at the generators",
    "weights/commit_seconds": "seconds from the commit request to the last acknowledgment",
    "weights/bytes": "bytes of the published weights",
    "actor/tokens_count": "tokens with a loss",
    "actor/rows_count": "rows of the batch",
    "actor/minibatches_count": "optimizer steps of the update",
    "actor/nonfinite_count": "tokens dropped because their recorded log-prob was not finite",
    "groups/admitted_count": "groups admitted during the step",
    "groups/trained_count": "groups trained by the step",
    "groups/dropped_count": "groups dropped during the step, all reasons",
    "tokens/generated_count": "tokens of the groups that ended during the step",
}
_MAX: Mapping[str, str] = {
    "reward/max": "best reward of the batch",
    "lag/group_max": "start version - admission version, largest of the batch",
    "lag/token_max": "start version - token version, largest of the batch",
    "generate/length_max_tokens": "longest answer of the batch",
    "actor/ratio_max": "largest current over proximal probability",
    "actor/behave_weight_max": "largest proximal over behavior probability",
    "actor/logp_error_max": "largest distance of recomputed from recorded log-prob, fresh tokens",
}
_MIN: Mapping[str, str] = {
    "reward/min": "worst reward of the batch",
    "actor/ratio_min": "smallest current over proximal probability",
    "actor/behave_weight_min": "smallest proximal over behavior probability",
}
_LAST: Mapping[str, str] = {
    "eval/version": "policy version that was evaluated",
    "actor/lr": "learning rate of the last optimizer step",
    "data/epoch": "epoch of the newest admitted prompt",
}

DROPPED_PREFIX = "groups/dropped_"
"""``groups/dropped_<reason>_count`` for every `DropReason`."""

REWARD_PART_PREFIX = "reward_part/"
EVAL_PART_PREFIX = "eval_part/"
"""``reward_part/<name>``, ``eval_part/<name>``: the mean of one named part of the reward in
training and evaluation; the names are the user's."""


def dropped_name(reason: DropReason) -> str:
    """The metric that counts groups dropped for ``reason``."""
    return f"{DROPPED_PREFIX}{reason.value}_count"


NO_SIGNAL: Mapping[NoSignal, str] = {
    NoSignal.EQUAL: "all rewards equal",
    NoSignal.TRUNCATED: "all answers cut by the length limit",
    NoSignal.EMPTY: "no answer has a token",
}
"""What is said of a group without signal."""


def no_signal_name(cause: NoSignal) -> str:
    """The metric that counts groups of the batch without signal for ``cause``."""
    return f"groups/no_signal_{cause.value}_count"


def _declare() -> Iterable[Metric]:
    by_reduction = {
        Reduction.MEAN: _MEAN,
        Reduction.SUM: {
            **_SUM,
            **{dropped_name(r): f"groups dropped during the step: {r.value}" for r in DropReason},
            **{no_signal_name(c): f"groups that teach nothing: {t}" for c, t in NO_SIGNAL.items()},
        },
        Reduction.MAX: _MAX,
        Reduction.MIN: _MIN,
        Reduction.LAST: _LAST,
    }
    for reduction, meanings in by_reduction.items():
        for name, meaning in meanings.items():
            yield Metric(name=name, reduction=reduction, meaning=meaning)
    for approximation, what in PROX_APPROXIMATIONS.items():
        for measure, meaning in PROX_MEASURES.items():
            yield Metric(
                name=prox_name(approximation, measure),
                reduction=Reduction.MAX if measure.endswith("_max") else Reduction.MEAN,
                meaning=f"{what}: {meaning}",
            )


METRICS: Mapping[str, Metric] = MappingProxyType({m.name: m for m in _declare()})
"""Every declared metric by name."""


def declared(name: str) -> Metric:
    """The metric called ``name``.

    Raises:
        UndeclaredMetric: no such metric; the message names the nearest one.
    """
    known = METRICS.get(name)
    if known is not None:
        return known
    if any(
        name.startswith(p) and len(name) > len(p) for p in (REWARD_PART_PREFIX, EVAL_PART_PREFIX)
    ):
        return Metric(name=name, reduction=Reduction.MEAN, meaning="one part of the reward")
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
    raise UndeclaredMetric(
        f"metric {name!r} is not declared in offbeat.observe.metrics; the nearest is {nearest[0]!r}"
    )


def check_declared(names: Iterable[str]) -> None:
    """Warn with `UndeclaredMetric` for each name that is not declared."""
    for name in names:
        try:
            declared(name)
        except UndeclaredMetric as unknown:
            warnings.warn(unknown, stacklevel=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The metrics of one finished step.

    ``version`` is the one that the step produced; ``seconds`` the duration of the step on the
    controller's clock; ``metrics`` maps declared names to reduced values, NaN included when that is
    what was measured.
    """

    step: int
    version: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, JsonValue]:
        """What a sink writes: ``version``, ``seconds`` and the metrics in one mapping."""
        check_declared(self.metrics)
        return {"version": self.version, "seconds": self.seconds, **self.metrics}


def seconds_of(steps: Iterable[StepRecord]) -> float:
    """How long they took. Step 0, the evaluation before the first, does not count: it runs while
    the first does.
    """
    return math.fsum(record.seconds for record in steps if record.step > 0)


class MetricReducer:
    """Collects values of declared metrics and reduces each by its own rule.

    Example:
        >>> r = MetricReducer()
        >>> r.add("reward/mean", 1.0, weight=3); r.add("reward/mean", 0.0)
        >>> r.reduced()
        {'reward/mean': 0.75}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """One value; ``weight`` (> 0) counts in a mean only. Raises UndeclaredMetric."""
        if not weight > 0:
            raise ValueError(f"{name}: weight must be positive, got {weight}")
        declared(name)
        self._values.setdefault(name, []).append((float(value), float(weight)))

    def reduced(self) -> dict[str, float]:
        """One number per name, in the order in which the names were first added."""
        return {
            name: _reduce(declared(name).reduction, pairs) for name, pairs in self._values.items()
        }


def _reduce(rule: Reduction, pairs: list[tuple[float, float]]) -> float:
    values = [v for v, _ in pairs]
    # max() and min() of a list with NaN depend on the order; a NaN that was measured must stay
    # visible.
    if any(math.isnan(v) for v in values) and rule is not Reduction.LAST:
        return math.nan
    match rule:
        case Reduction.SUM:
            return math.fsum(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.MIN:
            return min(values)
        case Reduction.LAST:
            return values[-1]
        case Reduction.MEAN:
            return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
