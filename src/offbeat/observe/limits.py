"""What limited a run, in one sentence with the numbers behind it and the options that change it.

Pure: a `TimeSplit` and the `RunSetup` in, a `Limit` out. Owns the thresholds and the advice; knows
no files and no processes. The shares in a sentence are of the loop's seconds (start and end of the
run excluded), rounded so that they add up to 100 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from offbeat.config import RunConfig
from offbeat.config.model import DType
from offbeat.config.presets import ASYNC_MAX_STALENESS
from offbeat.observe.timeline import TimeSplit

SINGLE = 0.5
"""From this share of the time on, the largest part is the limit, if it is ahead of the next one."""

AHEAD = 0.15
"""How much larger the share of a single limit is than that of the next part."""

BOTH_BUSY = 0.75
"""Trainer and engines both busy for this share of the time: the machine is the limit."""

WORTH = 1.1
"""Overlap that promises less than this speed-up is not recommended."""


NOTABLE = 0.1
"""Rewards that take this share of waiting and training decide how much overlap can give."""


class LimitedBy(StrEnum):
    """What took most of the time; ``nothing``: no single part did."""

    TRAINING = "training"
    GENERATION = "generation"
    REWARDS = "rewards"
    EVALUATION = "evaluation"
    PUBLISHING = "publishing"
    SAVING = "saving"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What a run was told, as far as advice depends on it.

    ``cores`` is what a process can use well. ``prox_pass``: a step has a forward pass of its own
    for the proximal log-prob that ``loglinear`` would save.
    """

    max_staleness: int
    cores: int
    trainer_threads: int
    generator_threads: int
    trains_in_bfloat16: bool
    generates_in_bfloat16: bool
    prefix_sharing: bool
    gradient_checkpointing: bool
    prox_pass: bool

    @classmethod
    def of(cls, cfg: RunConfig, cores: int) -> RunSetup:
        """The setup of ``cfg`` on a machine with ``cores`` usable cores."""
        actor = cfg.actor
        return cls(
            max_staleness=cfg.rollout.max_staleness,
            cores=cores,
            trainer_threads=cfg.trainer_threads(cores),
            generator_threads=cfg.generator_threads(cores),
            trains_in_bfloat16=cfg.model.dtype is DType.BFLOAT16,
            generates_in_bfloat16=(cfg.generator.dtype or cfg.model.dtype) is DType.BFLOAT16,
            prefix_sharing=actor.prefix_sharing,
            gradient_checkpointing=actor.gradient_checkpointing,
            prox_pass=actor.use_decoupled_loss
            and actor.should_compute_prox_logp()
            and actor.ppo_n_minibatches > 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What limited a run: ``what`` took ``share`` of the loop's seconds.

    ``seconds`` are all parts; they add up to the run's seconds, those of a resumed run to the ones
    of its last attempt. ``overlap_bound`` is set for a run that took turns: how many times as fast
    it could be at most if generation and training overlapped. ``options`` are the configuration
    keys that the sentence names, some with a value (``mode=async``).
    """

    what: LimitedBy
    share: float
    seconds: TimeSplit
    overlap_bound: float | None
    options: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do, and the configuration keys that do it, some with the value."""

    what: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} ({', '.join(self.options)})"


def find_limit(
    split: TimeSplit, setup: RunSetup, *, engine_seconds: float | None, steps: int
) -> Limit | None:
    """What limited a run; None as long as no step was trained.

    Args:
        split: where the time went. steps: of this attempt.
        engine_seconds: busy seconds of the engines, mean over them; None without an engine.
    """
    if split.training <= 0 or steps < 1:
        return None
    shares = {part: seconds / split.loop for part, seconds in _parts(split).items()}
    busy = None if engine_seconds is None else min(1.0, engine_seconds / split.loop)
    what, largest = _decide(shares, busy)
    bound = overlap_bound(split, ASYNC_MAX_STALENESS) if setup.max_staleness == 0 else None
    advice = _advice(what, largest, setup, busy, bound)
    return Limit(
        what=what,
        share=shares[largest],
        seconds=split,
        overlap_bound=bound,
        options=tuple(dict.fromkeys(option for a in advice for option in a.options)),
        sentence=f"{_facts(split, shares, busy, setup)}: {_verdict(what, shares, busy)}; "
        f"{_overlap(split, bound, steps)}{_listed(advice)}",
    )


def overlap_bound(split: TimeSplit, max_staleness: int) -> float:
    """min((M + t)/(G + t), η + 1): the most that overlapping generation and training can give.

    M is the time the trainer waited for groups, G the part of it in which an engine computed, t the
    time of the updates. The engine's passes count as full: where many were nearly empty, filling
    them can give more.
    """
    together = split.generation + split.training
    return min((split.waiting + split.training) / together, max_staleness + 1.0)


def _parts(split: TimeSplit) -> dict[str, float]:
    return {
        "training": split.training,
        "generation": split.generation,
        "rewards": split.rewards,
        "evaluation": split.evaluation,
        "publishing": split.publishing,
        "saving": split.saving,
        "rest": split.idle + split.rest,
    }


def _decide(shares: Mapping[str, float], busy: float | None) -> tuple[LimitedBy, str]:
    """The limit, and the part with the largest share."""
    first, second = sorted(shares, key=lambda part: -shares[part])[:2]
    both_busy = busy is not None and min(busy, shares["training"]) >= BOTH_BUSY
    single = shares[first] >= SINGLE and shares[first] - shares[second] >= AHEAD
    if first == "rest" or not single or both_busy:
        return LimitedBy.NOTHING, first
    return LimitedBy(first), first


_WORDS = {
    "training": "training {}",
    "generation": "waiting for generation {}",
    "rewards": "waiting for rewards alone {}",
    "evaluation": "evaluation {}",
    "publishing": "publishing {}",
    "saving": "saving {}",
    "rest": "the rest {}",
}


def _facts(
    split: TimeSplit, shares: Mapping[str, float], busy: float | None, setup: RunSetup
) -> str:
    percents = rounded_percents(shares)
    parts = ", ".join(_WORDS[part].format(f"{n} %") for part, n in percents.items() if n)
    turns = "generation and training took turns; " if setup.max_staleness == 0 else ""
    idle = "" if busy is None else f"; generation was idle {100 * (1 - busy):.0f} % of it"
    around = f"start {split.starting:.1f} s, end {split.ending:.1f} s"
    return f"{turns}of {split.loop:.1f} s ({around}): {parts}{idle}"


def rounded_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole percents that add up to 100; what rounding down leaves goes to the largest remainders.

    Args:
        shares: they add up to 1.
    """
    down = {part: int(share * 100) for part, share in shares.items()}
    by_remainder = sorted(shares, key=lambda part: down[part] - shares[part] * 100)
    for part in by_remainder[: 100 - sum(down.values())]:
        down[part] += 1
    return down


def _verdict(what: LimitedBy, shares: Mapping[str, float], busy: float | None) -> str:
    if what is not LimitedBy.NOTHING:
        return f"{what} {'are' if what is LimitedBy.REWARDS else 'is'} the limit"
    if busy is not None and min(busy, shares["training"]) >= BOTH_BUSY:
        return "trainer and engines both work nearly all the time, the machine is the limit"
    return "nothing single is the limit"


def _overlap(split: TimeSplit, bound: float | None, steps: int) -> str:
    """For a run that took turns: what overlap would give, with the numbers of the formula."""
    if bound is None:
        return ""
    m, g, t = (x / steps for x in (split.waiting, split.generation, split.training))
    formula = (
        f"min((M + t)/(G + t), η + 1) with M {m:.2f} s, G {g:.2f} s, t {t:.2f} s per step "
        f"and η {ASYNC_MAX_STALENESS}"
    )
    # A call that waits for a free reward process looks like a reward; overlap does not shorten it.
    notable = split.rewards > NOTABLE * (split.waiting + split.training)
    proviso = ", if the reward processes keep up" if notable else ""
    return f"overlapping the two would be at most {bound:.2f} times as fast{proviso}, {formula}; "


def _listed(advice: list[Advice]) -> str:
    *most, last = [str(a) for a in advice]
    return f"use {', '.join(most)} or {last}" if most else f"use {last}"


def _advice(
    what: LimitedBy, largest: str, setup: RunSetup, busy: float | None, bound: float | None
) -> list[Advice]:
    part = largest if what is LimitedBy.NOTHING else what.value
    overlap = [_OVERLAP] if bound is not None and bound >= WORTH else []
    return [*overlap, *_BY_PART[part](setup, busy)]


_OVERLAP = Advice(what="asynchronous training", options=("mode=async",))


def _for_training(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(
        what="fewer tokens per step",
        options=("train_dataset.batch_size", "gconfig.n_samples", "gconfig.max_new_tokens"),
    )
    if not setup.prefix_sharing:
        yield Advice(what="prefix sharing", options=("actor.prefix_sharing",))
    if not setup.trains_in_bfloat16:
        yield Advice(what="bfloat16", options=("model.dtype",))
    if setup.prox_pass:
        yield Advice(what="loglinear", options=("actor.prox_logp_method",))
    if setup.gradient_checkpointing:
        yield Advice(
            what="no recomputed activations, if memory allows",
            options=("actor.gradient_checkpointing",),
        )
    if setup.trainer_threads < setup.cores:
        yield Advice(what="more trainer threads", options=("actor.threads",))


def _for_generation(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(what="shorter answers", options=("gconfig.max_new_tokens",))
    yield Advice(what="more requests at once", options=("generator.slots",))
    if setup.max_staleness > 0 and busy is not None and busy < BOTH_BUSY:
        yield Advice(what="more groups in flight", options=("rollout.max_staleness",))
    if not setup.generates_in_bfloat16:
        yield Advice(what="bfloat16", options=("generator.dtype",))
    if setup.generator_threads < setup.cores:
        yield Advice(
            what="more generator threads or processes",
            options=("generator.threads", "generator.replicas"),
        )


def _for_rewards(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(what="more reward processes", options=("rollout.reward_workers",))
    yield Advice(what="a shorter time limit", options=("rollout.reward_timeout_seconds",))
    if setup.max_staleness > 0:
        yield Advice(what="more groups in flight", options=("rollout.max_staleness",))


def _for_evaluation(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(
        what="rarer evaluations",
        options=("evaluator.freq_steps", "evaluator.at_start", "evaluator.at_end"),
    )
    yield Advice(what="fewer rows", options=("valid_dataset.limit",))
    yield Advice(what="shorter answers", options=("eval_gconfig.max_new_tokens",))


def _for_publishing(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(
        what="larger and so fewer steps", options=("train_dataset.batch_size", "gconfig.n_samples")
    )


def _for_saving(setup: RunSetup, busy: float | None) -> Iterator[Advice]:
    yield Advice(what="rarer saves", options=("saver.freq_steps", "saver.freq_epochs"))
    yield Advice(what="saves in the background", options=("saver.mode=async",))


_BY_PART = {
    "training": _for_training,
    "generation": _for_generation,
    "rewards": _for_rewards,
    "evaluation": _for_evaluation,
    "publishing": _for_publishing,
    "saving": _for_saving,
    "rest": _for_publishing,
}
"""What to change, by the part that took most of the time; the rest is paid per step."""
