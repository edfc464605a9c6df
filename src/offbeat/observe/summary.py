"""What a run amounts to: the contents of ``summary.json``, and the accumulator that yields it.

`RunTotals` is pure: step records and engine statistics in, a `Summary` out, every time passed in.
The file is written aside and renamed, so a reader sees a whole summary or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from offbeat.errors import DataError
from offbeat.observe.files import replacing
from offbeat.observe.ledger import EventTotals, LedgerTotals, TokenTotals
from offbeat.observe.limits import Limit, RunSetup, find_limit
from offbeat.observe.metrics import EVAL_PART_PREFIX, StepRecord, no_signal_name, seconds_of
from offbeat.observe.spans import BusyTotals, SpanName
from offbeat.observe.timeline import Timeline
from offbeat.types import GeneratorStats, NoSignal

FILE_NAME = "summary.json"


class RunStatus(StrEnum):
    """How a run ended, or stands.

    The last three are never written. They are what a reader says of a run without a summary:
    ``running`` or ``killed`` as its lock tells (`offbeat.observe.liveness`), ``unfinished`` where
    there is none.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    KILLED = "killed"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """``total`` of the run, of which the trainer was busy ``training`` or ``waiting`` for data."""

    total: float
    training: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCurve:
    """Mean validation rewards; None when the run never evaluated. ``parts`` are the means of the
    reward's named parts in the last evaluation.
    """

    first: float | None
    last: float | None
    best: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCurve:
    """Mean training rewards of the first and the last step; None before the first."""

    first: float | None
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Versions between admission (group) or sampling (token) and training; None before the first
    step.
    """

    group_mean: float | None
    group_max: int | None
    token_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """``generated = trained + wasted``, over the groups that ended; ``prefill`` are prompt tokens
    processed.
    """

    prefill: int
    generated: int
    trained: int
    wasted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """``admitted = trained + sum(dropped) + open``; ``dropped`` has a key for every reason."""

    admitted: int
    trained: int
    dropped: Mapping[str, int]
    open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSaves:
    """How many model folders and snapshots could not be written while training went on. ``last`` is
    the last error of the last attempt; None where that had none, or has not ended.
    """

    models: int = 0
    snapshots: int = 0
    last: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. ``error`` is the message that ended a failed run and absent from the file otherwise;
    so is ``failed_saves`` when there is none.

    ``peak_rss_bytes`` is the largest sum, at the end of a step, over the processes of then of each
    one's own peak, shared pages counted in each. It, ``tokens.prefill``, ``engine_busy_fraction``,
    ``decode_share_of_training_time`` and ``limit`` cover the last attempt of a resumed run.
    ``limit`` is None before the first step.

    ``restarts`` of each generator by name, ``reward_workers_replaced`` and ``lost_replies`` are
    those of all attempts. ``deterministic``: the run can be repeated bit for bit
    (``docs/design/determinism.md``); None where that was not promised, or a run without a summary
    does not say. ``determinism_broken_by`` has a sentence for each kind of reason.

    ``groups_without_signal`` counts the trained groups from which nothing could be learned, by
    `NoSignal` value; ``invalid_rewards`` the answers to trained groups that had no reward.
    """

    status: RunStatus
    steps: int
    seconds: Seconds
    eval: EvalCurve
    reward: RewardCurve
    lag: Lag
    tokens: Tokens
    groups: Groups
    completions_with_two_versions: int
    decode_share_of_training_time: float | None
    engine_busy_fraction: float | None
    peak_rss_bytes: int
    restarts: Mapping[str, int] = field(default_factory=dict)
    reward_workers_replaced: int = 0
    lost_replies: int = 0
    deterministic: bool | None = None
    determinism_broken_by: tuple[str, ...] = ()
    limit: Limit | None = None
    groups_without_signal: Mapping[str, int] = field(default_factory=dict)
    invalid_rewards: int = 0
    failed_saves: FailedSaves | None = None
    error: str | None = None

    def to_json(self) -> bytes:
        """The bytes of ``summary.json``: indented, non-finite numbers as null."""
        plain = msgspec.to_builtins(self)
        for name in ("failed_saves", "error"):
            if plain[name] is None:
                del plain[name]
        return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"

    def write(self, path: Path) -> None:
        """Replace ``path``. Raises OSError when it cannot be written."""
        with replacing(path) as aside:
            aside.write_bytes(self.to_json())


def read_summary(path: Path) -> Summary:
    """The summary at ``path``.

    Raises:
        DataError: missing, or not a summary.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError as exc:
        raise DataError(f"{path}: no summary; the run has not ended, or was killed") from exc
    except msgspec.MsgspecError as exc:
        raise DataError(f"{path}: not a run's summary: {exc}") from exc


class RunTotals:
    """Adds a run up, step by step.

    Reads these metrics of a step where present: ``reward/mean``, ``eval/reward_mean``,
    ``lag/group_mean``, ``lag/group_max``, ``lag/token_mean``, ``wait/data_seconds``,
    ``train/update_seconds``, ``generate/two_versions_count``, ``reward/invalid_count``,
    ``groups/no_signal_*_count``, ``save/failed_count``,
    ``snapshot/failed_count``, and as weights of the means ``groups/trained_count`` and
    ``actor/tokens_count``.

    Args:
        started: CLOCK_MONOTONIC seconds at which this attempt began.
        earlier: step records of the surviving line that earlier attempts wrote.
        setup: what the run was told; without it the summary says nothing about its limit.
    """

    def __init__(
        self,
        started: float,
        earlier: Sequence[StepRecord] = (),
        setup: RunSetup | None = None,
    ) -> None:
        self._started = started
        self._setup = setup
        self._updates = 0
        self._timeline = Timeline(started)
        self._earlier_seconds = seconds_of(earlier)
        self._steps = 0
        self._seconds = {"wait/data_seconds": 0.0, "train/update_seconds": 0.0}
        self._rewards: list[float] = []
        self._evals: list[float] = []
        self._eval_parts: dict[str, float] = {}
        self._group_lag = _WeightedMean()
        self._token_lag = _WeightedMean()
        self._group_lag_max: int | None = None
        self._two_versions = 0
        self._without_signal = dict.fromkeys(NoSignal, 0)
        self._invalid_rewards = 0
        self._failed_models = 0
        self._failed_snapshots = 0
        self._prefill = _CounterTotals()
        self._peak_rss = 0
        self._busy = BusyTotals()
        for record in earlier:
            self.add_step(record)

    def add_step(self, record: StepRecord) -> None:
        """One finished step."""
        found = {k: v for k, v in record.metrics.items() if math.isfinite(v)}
        self._steps = max(self._steps, record.step)
        for name in self._seconds:
            self._seconds[name] += found.get(name, 0.0)
        self._two_versions += int(found.get("generate/two_versions_count", 0))
        for cause in NoSignal:
            self._without_signal[cause] += int(found.get(no_signal_name(cause), 0))
        self._invalid_rewards += int(found.get("reward/invalid_count", 0))
        self._failed_models += int(found.get("save/failed_count", 0))
        self._failed_snapshots += int(found.get("snapshot/failed_count", 0))
        if "reward/mean" in found:
            self._rewards.append(found["reward/mean"])
        if "eval/reward_mean" in found:
            self.add_eval(found["eval/reward_mean"])
            self._eval_parts = {
                name.removeprefix(EVAL_PART_PREFIX): value
                for name, value in found.items()
                if name.startswith(EVAL_PART_PREFIX)
            }
        if "lag/group_mean" in found:
            self._group_lag.add(found["lag/group_mean"], found.get("groups/trained_count", 1.0))
        if "lag/token_mean" in found:
            self._token_lag.add(found["lag/token_mean"], found.get("actor/tokens_count", 1.0))
        if "lag/group_max" in found:
            self._group_lag_max = max(self._group_lag_max or 0, int(found["lag/group_max"]))

    def add_eval(self, reward_mean: float) -> None:
        """One evaluation that is not part of a step's record, such as the one before the first
        step.
        """
        self._evals.append(reward_mean)

    def add_training(self, start: float, end: float) -> None:
        """The trainer was busy from ``start`` to ``end`` (a step report's times)."""
        self._busy.add_training(start, end)
        self._timeline.add(SpanName.TRAIN, start, end)
        self._updates += 1

    def add_span(self, name: SpanName, start: float, end: float) -> None:
        """A span of the controller; training and the engines' passes have methods of their own."""
        if name is not SpanName.TRAIN:
            self._timeline.add(name, start, end)

    def add_engine(self, worker: str, stats: GeneratorStats) -> None:
        """One poll of one generator: spans since the last poll, counters since its start.

        Its memory is not taken from here: `add_rss` counts every process.
        """
        self._busy.add_engine(worker, decode=stats.decode_spans, prefill=stats.prefill_spans)
        self._timeline.add_engine((*stats.decode_spans, *stats.prefill_spans))
        self._prefill.observe(worker, stats.prefill_tokens)

    def add_rss(self, peaks: Iterable[int]) -> None:
        """Peak resident bytes so far of each process that there is now."""
        self._peak_rss = max(self._peak_rss, sum(peaks))

    def settle(self, upto: float) -> None:
        """Every training interval that starts before ``upto`` was added; call it once per step."""
        self._busy.settle(upto)
        self._timeline.settle()

    @property
    def decode_share(self) -> float | None:
        """Decode share of training time so far."""
        return self._busy.decode_share()

    def summary(
        self,
        *,
        now: float,
        status: RunStatus,
        groups: LedgerTotals,
        tokens: TokenTotals,
        events: EventTotals | None = None,
        failed: FailedSaves | None = None,
        error: str | None = None,
    ) -> Summary:
        """The run as it stands at ``now`` (CLOCK_MONOTONIC seconds).

        ``failed`` counts the saves that failed since the last step, and has the last error.
        """
        self.settle(now)
        elapsed = now - self._started
        happened = events or EventTotals()
        return Summary(
            status=status,
            steps=self._steps,
            seconds=Seconds(
                total=elapsed + self._earlier_seconds,
                training=self._seconds["train/update_seconds"],
                waiting=self._seconds["wait/data_seconds"],
            ),
            eval=EvalCurve(
                first=_first(self._evals),
                last=_first(reversed(self._evals)),
                best=max(self._evals, default=None),
                parts=self._eval_parts,
            ),
            reward=RewardCurve(first=_first(self._rewards), last=_first(reversed(self._rewards))),
            lag=Lag(
                group_mean=self._group_lag.value,
                group_max=self._group_lag_max,
                token_mean=self._token_lag.value,
            ),
            tokens=Tokens(
                prefill=self._prefill.total,
                generated=tokens.generated,
                trained=tokens.trained,
                wasted=sum(tokens.wasted.values()),
            ),
            groups=Groups(
                admitted=groups.admitted,
                trained=groups.trained,
                dropped={reason.value: n for reason, n in groups.dropped.items()},
                open=groups.open,
            ),
            completions_with_two_versions=self._two_versions,
            decode_share_of_training_time=self._busy.decode_share(),
            engine_busy_fraction=self._busy.engine_busy(elapsed),
            peak_rss_bytes=self._peak_rss,
            restarts=happened.restarts,
            reward_workers_replaced=happened.reward_workers,
            lost_replies=happened.lost_replies,
            deterministic=not happened.broken_by if self._promises_bits else None,
            determinism_broken_by=happened.broken_by,
            limit=self._limit(now),
            groups_without_signal={c.value: n for c, n in self._without_signal.items()},
            invalid_rewards=self._invalid_rewards,
            failed_saves=self._failed_saves(failed or FailedSaves()),
            error=error,
        )

    @property
    def _promises_bits(self) -> bool:
        return self._setup is not None and self._setup.max_staleness == 0

    def _failed_saves(self, since: FailedSaves) -> FailedSaves | None:
        models = self._failed_models + since.models
        snapshots = self._failed_snapshots + since.snapshots
        if not (models or snapshots):
            return None
        return FailedSaves(models=models, snapshots=snapshots, last=since.last)

    def _limit(self, now: float) -> Limit | None:
        if self._setup is None:
            return None
        return find_limit(
            self._timeline.split(now),
            self._setup,
            engine_seconds=self._busy.engine_seconds,
            steps=self._updates,
        )


def _first(values: Iterable[float]) -> float | None:
    return next(iter(values), None)


class _WeightedMean:
    """sum(w x) / sum(w)."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        self._sum += value * weight
        self._weight += weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight > 0 else None


class _CounterTotals:
    """Sums counters that restart at zero when their process is replaced."""

    def __init__(self) -> None:
        self._ended = 0
        self._newest: dict[str, int] = {}

    def observe(self, worker: str, counter: int) -> None:
        newest = self._newest.get(worker, 0)
        if counter < newest:
            self._ended += newest
        self._newest[worker] = counter

    @property
    def total(self) -> int:
        return self._ended + sum(self._newest.values())
