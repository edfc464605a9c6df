"""What a run leaves behind: ledger, metrics, spans, rollouts and the running totals.

Owns the order in which a step is written and the one disk thread that does it. The ledger is
written at once, on the loop: it is the account of groups, and a failure there ends the run.
Everything else is written behind, one step at a time, and a failure is reported once and never
stops training.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from offbeat.checkpoint.snapshot import Counts
from offbeat.launch.protocols import LOG_END
from offbeat.observe.ledger import Breach, EventKind
from offbeat.observe.limits import RunSetup
from offbeat.observe.memory import process_tree_peaks
from offbeat.observe.metrics import StepRecord, dropped_name
from offbeat.observe.rollouts import RolloutLog
from offbeat.observe.sinks import SinkSet
from offbeat.observe.spans import Span, SpanLog, SpanName
from offbeat.observe.summary import FailedSaves, RunStatus, RunTotals, Summary
from offbeat.pipeline.episodes import EVALUATING
from offbeat.pipeline.ledger import Ledger, TrainedGroup
from offbeat.pipeline.no_signal import rewards_equal
from offbeat.pipeline.update_record import UpdateRecord
from offbeat.types import (
    DropReason,
    GeneratorStats,
    GroupId,
    PolicyVersion,
    RolloutGroup,
    Scored,
    StepReport,
    StopReason,
)

log = logging.getLogger(__name__)


class Recorder:
    """Writes one run. Use as an async context manager.

    Args:
        run_dir: the run's folder.
        sinks: where step metrics go; closed at the end.
        ledger: ``run.db``, open; closed by whoever opened it.
        setup: what the summary's advice depends on; without it there is none.
        earlier: step records of a resumed run that still hold.
        counts: what it had counted for its next record.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: SinkSet,
        ledger: Ledger,
        setup: RunSetup | None = None,
        *,
        earlier: Sequence[StepRecord] = (),
        counts: Counts | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._sinks = sinks
        self._ledger = ledger
        self._spans = SpanLog(run_dir / "spans.jsonl")
        self._rollouts = RolloutLog(run_dir)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._writing: asyncio.Future[None] | None = None
        self._counts = counts or Counts()
        self._last_failure: str | None = None
        # Of rollouts that were trained on and are not written yet.
        self._advantages: dict[tuple[GroupId, int], float] = {}
        # Of steps that are not written yet.
        self._updates: dict[int, UpdateRecord] = {}
        self._max_staleness = None if setup is None else setup.max_staleness
        self._breaches: set[Breach] = set()
        self.before_first_step: Callable[[], None] | None = None
        """Called once, before the first step of this attempt counts as trained."""
        self.totals = RunTotals(time.monotonic(), earlier, setup=setup)

    @property
    def attempt(self) -> int:
        """1 for a run that was never resumed."""
        return self._ledger.attempt

    @property
    def counts(self) -> Counts:
        """What was counted since the last call of ``step_metrics``."""
        return self._counts

    # Groups

    def admitted(
        self,
        group_id: GroupId,
        epoch: int,
        row: int,
        version: PolicyVersion,
        *,
        again: bool = False,
    ) -> None:
        """A group joined the line; ``again`` after a restart, where it was counted before."""
        self._ledger.admit(group_id, epoch=epoch, row=row, admission_version=version)
        self._counts = replace(self._counts, admitted=self._counts.admitted + (not again))

    def dropped(
        self, group_id: GroupId, reason: DropReason, detail: str, generated_tokens: int
    ) -> None:
        """A group ended without training."""
        self._ledger.dropped(group_id, reason, detail, generated_tokens=generated_tokens)
        dropped = self._counts.dropped
        self._counts = replace(
            self._counts, dropped={**dropped, reason: dropped.get(reason, 0) + 1}
        )

    def trained(self, groups: Sequence[RolloutGroup], step: int, start: PolicyVersion) -> None:
        """The groups of a step were trained on."""
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        self._ledger.step_trained([_tokens_of(g) for g in groups], step, start)

    # What goes wrong and is mended

    def restarted(self, name: str, why: str) -> None:
        """A generator's process was lost and is being replaced."""
        self._counts = replace(self._counts, restarts=self._counts.restarts + 1)
        self._ledger.event(EventKind.RESTART, _first_line(why), subject=name)

    def reply_lost(self, name: str, why: str) -> None:
        """A reply of a generator was lost, and came when it was asked for again."""
        self._ledger.event(EventKind.LOST_REPLY, _first_line(why), subject=name)

    def reward_worker_replaced(self, why: str) -> None:
        """A reward process ended because of ``why``, and another took its place."""
        self._ledger.event(EventKind.REWARD_WORKER, why)

    def reward_lost(self, why: str) -> None:
        """A reward is missing because of the clock or of a dead process; no matter where nothing is
        trained on it.
        """
        if EVALUATING.get():
            return
        self.broken(Breach.REWARD, f"a reward is missing: {why}")

    def broken(self, breach: Breach, why: str, *, group_id: GroupId | None = None) -> None:
        """What happened keeps the run from being repeated bit for bit, if that was promised.

        Args:
            why: for a person; equal where nothing but the group differs.
        """
        if self._max_staleness != 0:
            return
        self._ledger.event(
            EventKind.DETERMINISM, _first_line(why), subject=breach, group_id=group_id
        )
        if breach not in self._breaches:
            self._breaches.add(breach)
            log.warning("this run cannot be repeated bit for bit any more: %s", why)

    # Saves

    def save_failed(self, why: str) -> None:
        """A model folder was not saved, and training goes on."""
        self._counts = replace(self._counts, failed_saves=self._counts.failed_saves + 1)
        self._last_failure = why

    def snapshot_failed(self, why: str) -> None:
        """A snapshot was not written, and training goes on."""
        self._counts = replace(self._counts, failed_snapshots=self._counts.failed_snapshots + 1)
        self._last_failure = why

    # Spans

    def span(
        self,
        name: SpanName,
        start: float,
        end: float,
        worker: str,
        *,
        group_id: GroupId | None = None,
        step: int | None = None,
    ) -> None:
        """Something took from ``start`` to ``end``."""
        self.totals.add_span(name, start, end)
        self._spans.add(
            Span(name=name, start=start, end=end, worker=worker, group_id=group_id, step=step)
        )

    def engine(self, worker: str, stats: GeneratorStats) -> None:
        """One poll of one generator."""
        self.totals.add_engine(worker, stats)
        for name, spans in (
            (SpanName.DECODE, stats.decode_spans),
            (SpanName.PREFILL, stats.prefill_spans),
        ):
            for start, end in spans:
                self.span(name, start, end, worker)

    # Steps

    def step_metrics(
        self, groups: Sequence[RolloutGroup], report: StepReport, live: PolicyVersion
    ) -> dict[str, float]:
        """Metrics of a step from its groups and the trainer's report, under their names.

        Counts of groups admitted and dropped, of restarts and of failed saves are those since the
        last call.
        """
        counts, self._counts = self._counts, Counts()
        self._advantages |= _advantages(groups, report)
        return {
            **report.metrics,
            **_group_metrics(groups, live),
            "groups/admitted_count": float(counts.admitted),
            "groups/trained_count": float(len(groups)),
            "groups/dropped_count": float(sum(counts.dropped.values())),
            "generate/restarts_count": float(counts.restarts),
            "save/failed_count": float(counts.failed_saves),
            "snapshot/failed_count": float(counts.failed_snapshots),
            **{dropped_name(reason): float(n) for reason, n in counts.dropped.items()},
        }

    def updated(self, step: int, update: UpdateRecord) -> None:
        """How the weights of ``step`` came about: goes beside its rollouts."""
        self._updates[step] = update

    async def write(self, record: StepRecord, groups: Sequence[RolloutGroup] = ()) -> None:
        """Write a finished step behind; waits only for the step before it to be on disk. Canceled
        meanwhile, nothing of it is counted or written.
        """
        await self.flush()
        self.totals.add_step(record)
        self.totals.add_rss(process_tree_peaks().values())
        places = [(g.prompt.group_id, r.sibling) for g in groups for r in g.rollouts]
        advantages = {p: self._advantages.pop(p) for p in places if p in self._advantages}
        update = self._updates.pop(record.step, None)
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(
            self._disk, self._write, record, tuple(groups), advantages, update
        )

    def _write(
        self,
        record: StepRecord,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[tuple[GroupId, int], float],
        update: UpdateRecord | None,
    ) -> None:
        self._sinks.record(record)
        self._spans.flush()
        if groups:
            text = None if update is None else update.to_json()
            self._rollouts.write(record.step, groups, advantages, text)

    async def flush(self) -> None:
        """Wait until everything handed to ``write`` is on disk."""
        writing = self._writing
        if writing is not None:
            await asyncio.wait([writing])  # not the future itself: other tasks wait for it too
            if self._writing is writing:
                self._writing = None  # its error is told by who waits now, and not again
            writing.result()

    def summary(self, status: RunStatus, error: str | None = None) -> Summary:
        """The run as it stands."""
        return self.totals.summary(
            now=time.monotonic(),
            status=status,
            groups=self._ledger.totals(),
            tokens=self._ledger.tokens(),
            events=self._ledger.events(),
            failed=FailedSaves(
                models=self._counts.failed_saves,
                snapshots=self._counts.failed_snapshots,
                last=self._last_failure,
            ),
            error=error,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.flush()
        finally:
            # The disk thread first: after a cancellation it may still be writing to both.
            self._disk.shutdown()
            self._spans.flush()
            self._sinks.close()


def _first_line(text: str) -> str:
    """Without the end of a log, which differs each time."""
    return text.partition(LOG_END)[0].splitlines()[0]


def _advantages(
    groups: Sequence[RolloutGroup], report: StepReport
) -> dict[tuple[GroupId, int], float]:
    """What the trainer reported of each valid rollout, which are its samples in the same order."""
    if not report.advantages:
        return {}
    places = [(g.prompt.group_id, r.sibling) for g in groups for r in g.valid]
    return dict(zip(places, report.advantages, strict=True))


def _tokens_of(group: RolloutGroup) -> TrainedGroup:
    return TrainedGroup(
        group_id=group.prompt.group_id,
        generated_tokens=sum(r.written_tokens for r in group.rollouts),
        trained_tokens=sum(r.written_tokens for r in group.valid),
    )


def _group_metrics(groups: Sequence[RolloutGroup], live: PolicyVersion) -> dict[str, float]:
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r.reward.value for g in groups for r in g.valid if isinstance(r.reward, Scored)]
    completions = [t.completion for r in rollouts for t in r.turns]
    lengths = [r.written_tokens for r in rollouts]
    lags = [live - g.admission_version for g in groups]
    cut = [r.turns[-1].completion.stop_reason is StopReason.LENGTH for r in rollouts]
    mixed = [len(c.versions) > 0 and c.versions.min() != c.versions.max() for c in completions]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/valid_fraction": len(rewards) / len(rollouts),
        "reward/invalid_count": float(len(rollouts) - len(rewards)),
        "reward/zero_std_fraction": statistics.fmean(map(rewards_equal, groups)),
        "lag/group_mean": statistics.fmean(lags),
        "lag/group_max": float(max(lags)),
        "generate/length_tokens": statistics.fmean(lengths),
        "generate/length_max_tokens": float(max(lengths)),
        "generate/truncated_fraction": statistics.fmean(cut),
        "generate/two_versions_count": float(sum(mixed)),
        "tokens/generated_count": float(sum(lengths)),
        **_part_means(groups),
    }


def _part_means(groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
    parts: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.valid:
            if isinstance(rollout.reward, Scored):
                for name, value in rollout.reward.parts.items():
                    parts.setdefault(name, []).append(value)
    return {f"reward_part/{name}": statistics.fmean(values) for name, values in parts.items()}
