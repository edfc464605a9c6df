"""The loop: one path for synchronous and asynchronous training.

Consumes the prompt stream; produces policy versions. Three kinds of tasks share one event loop and
one ``TaskGroup``::

    admission   waits for a ticket and a free slot     unblocked by a publication, a drop, a
                                                       finished request
    episodes    wait for generator and rewards         unblocked by their replies or deadlines
    training    waits for the g oldest groups          unblocked by the last of them; gives up after
                                                       ``stall_seconds`` of silence

Training is the finite clock: when it has taken its last step nothing is in flight, and the others
end with it. With ``max_staleness`` 0 the tickets of a batch are the only ones open, so generation
and training take turns: that is synchronous training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offbeat.checkpoint.snapshot import RunState
from offbeat.data.stream import PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import PromptTooLong, StallError, WeightSyncError, true_cause
from offbeat.launch.blob import write_blob
from offbeat.launch.codec import encode
from offbeat.observe.ledger import Breach
from offbeat.observe.metrics import StepRecord
from offbeat.observe.spans import SpanName
from offbeat.pipeline.cadence import Cadence
from offbeat.pipeline.episodes import (
    CHOSEN,
    Dropped,
    FailureBudget,
    GroupEngine,
    SamplingPlan,
    run_episode,
)
from offbeat.pipeline.evaluate import Evaluator
from offbeat.pipeline.no_signal import SignalRules, SignalWatch
from offbeat.pipeline.recorder import Recorder
from offbeat.pipeline.running_evaluation import RunningEvaluation
from offbeat.pipeline.save_policy import ModelWriter
from offbeat.pipeline.signal import Signal
from offbeat.pipeline.snapshots import SnapshotTaker
from offbeat.pipeline.staleness import (
    BEGINNING,
    Policy,
    Position,
    SlotGauge,
    StalenessManager,
    Ticket,
)
from offbeat.pipeline.stall import Patience, PendingGroup, pending_text, task_stacks
from offbeat.pipeline.update_record import UpdateRecorder
from offbeat.protocols import Generator, Trainer, Workflow
from offbeat.rollout.samples import to_samples
from offbeat.types import (
    DropReason,
    GroupId,
    Invalid,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    StepReport,
    WeightUpdate,
)

log = logging.getLogger(__name__)

CONTROLLER = "controller"

LATE_GROUP = "a group was dropped at its deadline (rollout.group_deadline_seconds)"

LOUD_FAILURES = 3
"""Groups that failed or did not fit and are reported one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """What one run of the loop is told; every number is resolved.

    ``steps`` batches of ``groups_per_step`` groups, ``total_groups`` in all (the last batch may be
    short). ``capacity`` is the number of requests the generators run at the same time.
    """

    steps: int
    groups_per_step: int
    total_groups: int
    max_staleness: int
    capacity: int
    sampling: SamplingPlan
    max_failure_rate: float
    max_consecutive_failures: int
    stall_seconds: float
    signal: SignalRules
    request_timeout_seconds: float = 0.0
    policy: Policy = Policy.PACE
    adaptive_lookahead: bool = False
    group_deadline_seconds: float | None = None
    dynamic_sampling: bool = False
    max_groups_without_signal: int | None = None


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    """A group that the ledger holds as open: when it was admitted (CLOCK_MONOTONIC seconds), and
    what generates for it once its episode has begun.
    """

    admitted_at: float
    engine: GroupEngine | None = None

    @property
    def open_requests(self) -> tuple[str, ...]:
        return () if self.engine is None else self.engine.open_requests

    @property
    def generated_tokens(self) -> int:
        return 0 if self.engine is None else self.engine.generated_tokens


class Loop:
    """Runs one training run to its end.

    Args:
        replicas: every generator by name, for statistics; ``generator`` routes to them.
        evaluator: None without a validation set.
        saver: None when nothing is ever saved.
        weights_gate: held from a publication to its commit; who needs the live weights meanwhile
            waits for it.
        snapshots: None when none is ever taken.
        updates: records how each update can be repeated; None for a run that cannot be replayed.
        start: what a resumed run goes on from; trainer and recorder were restored to it.
    """

    def __init__(
        self,
        plan: LoopPlan,
        cadence: Cadence,
        *,
        generator: Generator,
        replicas: Mapping[str, Generator],
        trainer: Trainer,
        workflow: Workflow,
        stream: PromptStream,
        codec: TextCodec,
        recorder: Recorder,
        evaluator: Evaluator | None,
        saver: ModelWriter | None,
        weights_gate: asyncio.Lock,
        snapshots: SnapshotTaker | None = None,
        updates: UpdateRecorder | None = None,
        start: RunState | None = None,
    ) -> None:
        self._plan = plan
        self._cadence = cadence
        self._generator = generator
        self._replicas = replicas
        self._trainer = trainer
        self._workflow = workflow
        self._stream = stream
        self._codec = codec
        self._recorder = recorder
        self._evaluator = evaluator
        self._saver = saver
        self._weights_gate = weights_gate
        self._snapshots = snapshots
        self._updates = updates
        self._start = start
        self._manager = StalenessManager(
            max_staleness=plan.max_staleness,
            groups_per_step=plan.groups_per_step,
            total_groups=plan.total_groups,
            policy=plan.policy,
            adaptive_lookahead=plan.adaptive_lookahead,
            start=_position(start),
        )
        self._again = frozenset(() if start is None else start.open_groups)
        self._watch = SignalWatch(plan.max_groups_without_signal)
        self._gauge = SlotGauge(plan.capacity)
        self._budget = FailureBudget(
            max_rate=plan.max_failure_rate,
            max_consecutive=plan.max_consecutive_failures,
            rows=len(stream),
        )
        self._changed = Signal()
        self._open: dict[GroupId, _OpenGroup] = {}
        self._evaluation: RunningEvaluation | None = None
        # The newest step whose weights are live, until its record is written.
        self._unwritten: tuple[StepRecord, Sequence[RolloutGroup]] | None = None
        self._tokens_written = 0
        self._warned_of_invalid = False
        self._failures = 0

    async def run(self) -> None:
        """Train all steps. Raises the first error that ends the run; no task outlives this call."""
        try:
            async with asyncio.TaskGroup() as tasks:
                done = 0
                if self._start is not None:
                    await self._resume(self._start)
                    done = self._start.step
                elif self._evaluator is not None and self._cadence.evaluate_at_start:
                    record = StepRecord(step=0, version=0, seconds=0.0)
                    self._evaluate(self._evaluator, record, (), tasks)
                admission = tasks.create_task(self._admit(tasks), name="admission")
                for step in range(done + 1, self._plan.steps + 1):
                    await self._step(step, tasks)
                await self._settle_evaluation()
                admission.cancel()
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors
        finally:
            for group_id, group in self._open.items():
                tokens = group.generated_tokens
                self._recorder.dropped(group_id, DropReason.CANCELLED, "the run ended", tokens)
            if self._unwritten is not None:  # its groups are trained, whatever came after
                await self._recorder.write(*self._unwritten)
        await self._poll_engines()

    async def _resume(self, start: RunState) -> None:
        """Bring the restored weights to every generator, before anything is admitted."""
        async with self._weights_gate:
            update = await self._trainer.publish()
            if update.version != start.version:
                raise WeightSyncError(
                    f"the trainer was restored to version {update.version}, the snapshot of step "
                    f"{start.step} is of version {start.version}"
                )
            await self._generator.stage(update)
            await self._generator.commit(update.version)
        through = start.step >= self._plan.steps
        if through:
            log.warning(
                "nothing is left to train: the snapshot is of step %d, and %d steps are asked for",
                start.step,
                self._plan.steps,
            )
        # A save that was due was under way when the run stopped.
        due = start.saved or (through and self._cadence.save_at_end)
        if self._saver is not None and due and not self._saver.holds(start.step):
            await self._saver.save(update, step=start.step)

    # Admission and episodes

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Open tickets as long as the bound and the generators' slots allow."""
        n = self._plan.sampling.n_samples
        while True:
            await self._changed.wait_for(lambda: self._manager.may_admit() and self._gauge.fits(n))
            ticket = self._manager.admit()
            group_id = ticket.group_id
            epoch, row = self._stream.epoch_of(group_id), self._stream.row_of(group_id)
            again = group_id in self._again
            self._recorder.admitted(group_id, epoch, row, ticket.admission_version, again=again)
            self._open[group_id] = _OpenGroup(admitted_at=time.monotonic())
            try:
                prompt = self._stream.prompt_at(group_id)
            except PromptTooLong as exc:
                self._drop(group_id, Dropped(reason=DropReason.TOO_LONG, detail=str(exc)))
                continue
            self._gauge.reserve(group_id, n)
            tasks.create_task(self._episode(ticket, prompt), name=f"group {group_id}")

    async def _episode(self, ticket: Ticket, prompt: Prompt) -> None:
        """One group, from its prompt to delivery or drop."""
        group_id = ticket.group_id
        record = partial(self._recorder.span, worker=CONTROLLER, group_id=group_id)

        def request_ended(start: float, end: float) -> None:
            self._gauge.end()
            self._changed.notify()
            record(SpanName.GENERATE, start, end)

        engine = GroupEngine(
            self._generator,
            self._codec,
            self._plan.sampling,
            group_id=group_id,
            key=group_id,
            tag="train",
            on_start=lambda: self._gauge.start(group_id),
            on_end=request_ended,
        )
        self._open[group_id].engine = engine
        try:
            outcome = await run_episode(
                self._workflow,
                engine,
                prompt,
                ticket.admission_version,
                deadline_seconds=self._plan.group_deadline_seconds,
                on_reward=partial(record, SpanName.REWARD),
            )
        finally:
            self._gauge.release(group_id)
        if isinstance(outcome, RolloutGroup):
            self._warn_of_invalid(outcome)
            self._budget.record(outcome)
            outcome = self._with_signal(outcome)
        if isinstance(outcome, Dropped):
            self._drop(group_id, outcome)
        else:
            self._manager.deliver(group_id, outcome)
            self._drop_stale()
            self._changed.notify()

    def _with_signal(self, group: RolloutGroup) -> RolloutGroup | Dropped:
        """Count a complete group; one that teaches nothing is replaced with dynamic sampling."""
        cause = self._plan.signal.why_none(group)
        self._watch.record(cause)
        if cause is None or not self._plan.dynamic_sampling:
            return group
        return Dropped(reason=DropReason.FILTERED, detail=f"nothing to learn from: {cause}")

    def _drop_stale(self) -> None:
        """Under the policy drop: what is complete and too late to train leaves the line."""
        for group_id, group in self._manager.stale().items():
            lag = self._manager.live - group.admission_version
            late = (
                f"{lag} versions after its admission, max_staleness is {self._plan.max_staleness}"
            )
            self._drop(group_id, Dropped(reason=DropReason.STALE, detail=late))

    def _warn_of_invalid(self, group: RolloutGroup) -> None:
        """Say once, with the reason, that rewards are missing; each step's line counts them."""
        reasons = [r.reward.reason for r in group.rollouts if isinstance(r.reward, Invalid)]
        if reasons and not self._warned_of_invalid:
            self._warned_of_invalid = True
            log.warning("a reward is invalid and leaves its rollout out: %s", reasons[0])

    def _drop(self, group_id: GroupId, outcome: Dropped) -> None:
        self._manager.drop(group_id)
        tokens = self._open.pop(group_id).generated_tokens
        self._recorder.dropped(group_id, outcome.reason, outcome.detail, tokens)
        if outcome.reason is DropReason.CANCELLED:
            self._recorder.broken(Breach.GROUP_DEADLINE, LATE_GROUP, group_id=group_id)
        self._changed.notify()
        self._say_drop(group_id, outcome)
        self._budget.record(outcome)

    def _say_drop(self, group_id: GroupId, outcome: Dropped) -> None:
        """Warn of the first that were not chosen, then of every tenfold; the ledger has all."""
        chosen = outcome.reason in CHOSEN
        self._failures += not chosen
        rare = self._failures <= LOUD_FAILURES or str(self._failures).strip("0") == "1"
        level = logging.WARNING if rare and not chosen else logging.DEBUG
        log.log(level, "group %d dropped (%s): %s", group_id, outcome.reason, outcome.detail)

    # Training

    async def _step(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """One batch: wait, update, publish, commit; then save and evaluate when due."""
        started = time.monotonic()
        groups = await self._next_batch(step)
        live = self._manager.live
        waited = time.monotonic() - started
        report = await self._update(groups, PolicyVersion(live + 1), step)
        metrics = self._recorder.step_metrics(groups, report, live)
        metrics |= self._plan.signal.counts(groups)
        update, published = await self._publish(groups, step)
        metrics |= published
        metrics["wait/data_seconds"] = waited
        metrics["train/update_seconds"] = report.ended - report.started
        metrics["train/staging_seconds"] = report.staging_seconds
        record = StepRecord(
            step=step, version=live + 1, seconds=time.monotonic() - started, metrics=metrics
        )
        self._unwritten = (record, groups)
        epochs = self._stream.epoch_of(GroupId(step * self._plan.groups_per_step))
        save = self._cadence.save_due(step, epochs) and self._saver is not None
        evaluate = self._cadence.evaluation_due(step, epochs)
        if save:
            metrics |= await self._save(update, step)
        if self._cadence.snapshot_due(step, epochs) and self._snapshots is not None:
            metrics |= await self._take_snapshot(self._snapshots, step, tasks, saved=save)
        await self._poll_engines()
        seconds = time.monotonic() - started
        metrics["data/epoch"] = float(groups[-1].prompt.epoch)
        metrics["throughput/tokens_per_second"] = metrics["tokens/generated_count"] / seconds
        metrics["throughput/trained_tokens_per_second"] = metrics["actor/tokens_count"] / seconds
        record = replace(record, seconds=seconds)
        if self._evaluator is not None and evaluate:
            self._evaluate(self._evaluator, record, groups, tasks)
        else:
            await self._write(record, groups)

    async def _next_batch(self, step: int) -> list[RolloutGroup]:
        """The oldest groups, once they are complete.

        Raises:
            StallError: nothing happened for ``stall_seconds``: no request ended, and either none
                was open or no token was written for as long as a request may take.
        """
        started = time.monotonic()
        waits = not self._manager.batch_ready()
        slots_free = self._gauge.fits(self._plan.sampling.n_samples)
        patience = self._patience()
        while not self._manager.batch_ready():
            try:
                async with asyncio.timeout(self._plan.stall_seconds):
                    await self._changed.changed()
                patience.something_happened()
            except TimeoutError:
                tokens = await self._poll_engines()
                generating = any(group.open_requests for group in self._open.values())
                if patience.is_spent(generating=generating, tokens=tokens):
                    raise self._stalled(step) from None
        self._recorder.span(SpanName.WAIT, started, time.monotonic(), CONTROLLER, step=step)
        batch = self._manager.take()
        self._manager.lookahead.batch_taken(
            waited=waits, slots_free=slots_free, finished=self._manager.finished_groups
        )
        return batch

    def _patience(self) -> Patience:
        plan = self._plan
        return Patience(plan.stall_seconds, plan.request_timeout_seconds, self._tokens_written)

    def report(self) -> str:
        """Where the tasks are and, last, what the run waits for: groups with their holders."""
        groups = pending_text(self._pending_groups()) or "  no group"
        if self._evaluation is not None:
            groups += f"\n  {self._evaluation.progress}"
        tasks = task_stacks(asyncio.all_tasks())
        live = self._manager.live
        return f"version {live} is live; its tasks\n{tasks}\nit waits for\n{groups}"

    def _pending_groups(self) -> list[PendingGroup]:
        now = time.monotonic()
        return [
            PendingGroup(
                group_id=g,
                row=self._stream.row_of(g),
                age_seconds=now - self._open[g].admitted_at,
                generating=self._open[g].open_requests,
            )
            for g in self._manager.pending
        ]

    def _stalled(self, step: int) -> StallError:
        log.error("the run stalled: %s", self.report())
        return StallError(
            f"step {step} has waited {self._plan.stall_seconds:g} s (rollout.stall_seconds) in "
            f"which no group ended and no token was written for one; waiting for "
            f"{len(self._manager.pending)} groups:\n{pending_text(self._pending_groups())}"
        )

    async def _update(
        self, groups: Sequence[RolloutGroup], produce: PolicyVersion, step: int
    ) -> StepReport:
        samples = [s for g in groups for s in to_samples(g)]
        self._check_versions(groups)
        with write_blob(encode(samples)) as blob:
            report = await self._trainer.update(blob.ref, produce)
        if report.version != produce:
            raise WeightSyncError(
                f"asked the trainer for version {produce}, it produced {report.version}"
            )
        self._recorder.span(SpanName.TRAIN, report.started, report.ended, "trainer", step=step)
        self._recorder.totals.add_training(report.started, report.ended)
        return report

    def _check_versions(self, groups: Sequence[RolloutGroup]) -> None:
        """No token may be older than its group's admission or newer than the live version."""
        for group in groups:
            for turn in (t for r in group.rollouts for t in r.turns):
                versions = turn.completion.versions
                oldest, newest = group.admission_version, self._manager.live
                if len(versions) and not (oldest <= versions.min() <= versions.max() <= newest):
                    raise WeightSyncError(
                        f"group {group.prompt.group_id} has tokens of versions {versions.min()} to "
                        f"{versions.max()}, but was admitted at version {oldest} and the live "
                        f"version is {newest}"
                    )

    async def _publish(
        self, groups: Sequence[RolloutGroup], step: int
    ) -> tuple[WeightUpdate, dict[str, float]]:
        """Bring the trainer's weights to every generator; the tickets end when they are live."""
        asked = time.monotonic()
        await self._settle_evaluation()  # before the old weights are overwritten: it may need them
        settled = time.monotonic()
        if self._saver is not None:
            await self._saver.maybe_wait_for_staging()  # it may still copy them
        # A generator that is being replaced reads the old weights until the gate is ours.
        async with self._weights_gate:
            begin = time.monotonic()
            update = await self._trainer.publish()
            published = time.monotonic()
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._generator.stage(update), name="staging")
                readers.create_task(self._record_update(step, update), name="digests")
            staged = time.monotonic()
            pause = await self._generator.commit(update.version)
        # One turn of the loop: live version, ends of tickets and admission change together.
        start_version = self._manager.live
        self._manager.publish(update.version)
        self._recorder.trained(groups, step, start_version)
        for group in groups:
            del self._open[group.prompt.group_id]
        self._drop_stale()
        self._changed.notify()
        committed = time.monotonic()
        self._recorder.span(SpanName.PUBLISH, begin, published, "trainer", step=step)
        self._recorder.span(SpanName.STAGE, published, staged, CONTROLLER, step=step)
        self._recorder.span(SpanName.COMMIT, staged, committed, CONTROLLER, step=step)
        return update, {
            "train/publish_seconds": published - begin,
            "weights/stage_seconds": staged - published,
            "weights/commit_seconds": committed - staged,
            "weights/bytes": float(update.nbytes),
            "wait/eval_seconds": settled - asked,
            "wait/staging_seconds": begin - settled,
            "generate/pause_seconds": pause,
        }

    async def _record_update(self, step: int, update: WeightUpdate) -> None:
        """Takes the digests of ``update`` while the generators read it too: the trainer waits."""
        if self._updates is not None:
            self._recorder.updated(step, await self._updates.record(update))

    async def _save(self, update: WeightUpdate, step: int) -> dict[str, float]:
        """Save the version just published; in the background, unless the mode is sync."""
        assert self._saver is not None
        begin = time.monotonic()
        await self._saver.save(update, step=step)
        end = time.monotonic()
        self._recorder.span(SpanName.SAVE, begin, end, CONTROLLER, step=step)
        return {"wait/save_seconds": end - begin}

    async def _take_snapshot(
        self, snapshots: SnapshotTaker, step: int, tasks: asyncio.TaskGroup, *, saved: bool
    ) -> dict[str, float]:
        """Begin to copy the trainer's state, and the controller's as of the same moment.

        Any moment between two updates will do: what the ledger holds then, and the line, belong
        together, and what follows is superseded if this snapshot is resumed from.
        """
        begin = time.monotonic()
        await snapshots.ready()
        await snapshots.take(self._state(step, saved=saved), tasks)
        end = time.monotonic()
        self._recorder.span(SpanName.SAVE, begin, end, CONTROLLER, step=step)
        return {"wait/snapshot_seconds": end - begin}

    def _state(self, step: int, *, saved: bool) -> RunState:
        now, line = time.monotonic(), self._manager.position
        return RunState(
            step=step,
            version=line.live,
            attempt=self._recorder.attempt,
            next_group_id=line.next_group,
            open_groups=line.open_groups,
            lookahead=line.lookahead,
            counts=self._recorder.counts,
            saved=saved,
            save=self._cadence.save.state(now),
            evaluate=self._cadence.evaluate.state(now),
            snapshot=self._cadence.snapshot.state(now),
        )

    async def _write(self, record: StepRecord, groups: Sequence[RolloutGroup]) -> None:
        self._unwritten = (record, groups)
        await self._recorder.write(record, groups)
        self._unwritten = None
        if self._snapshots is not None:
            self._snapshots.recorded(record.step)

    # Evaluation

    def _evaluate(
        self,
        evaluator: Evaluator,
        record: StepRecord,
        groups: Sequence[RolloutGroup],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Evaluate the live version; the step's record is kept until the result is there."""
        live = self._manager.live
        self._evaluation = RunningEvaluation(evaluator, live, record, groups, tasks)

    async def _settle_evaluation(self) -> None:
        """Wait for the running evaluation, if any, and write the record that waited for it.

        This pins an evaluation to its version: no commit happens before it is through.

        Raises:
            StallError: nothing happened for ``stall_seconds``, as in ``_next_batch``.
        """
        running = self._evaluation
        if running is None:
            return
        try:
            result = await running.result(self._patience(), self._poll_engines)
        except StallError:
            log.error("the run stalled: %s", self.report())
            raise
        self._evaluation = None
        ended = running.began + result.seconds
        self._recorder.span(SpanName.EVAL, running.began, ended, CONTROLLER, step=running.step)
        await self._write(running.record(result), running.groups)

    async def _poll_engines(self) -> int:
        """Collect every generator's spans and counters since the last poll; returns the tokens that
        they have written and read so far.
        """
        written = 0
        for name, replica in self._replicas.items():
            stats = await replica.stats()
            self._recorder.engine(name, stats)
            written += stats.decode_tokens + stats.prefill_tokens
        self._tokens_written = written
        self._recorder.totals.settle(time.monotonic())
        return written


def _position(start: RunState | None) -> Position:
    if start is None:
        return BEGINNING
    return Position(
        live=start.version,
        next_group=start.next_group_id,
        open_groups=start.open_groups,
        lookahead=start.lookahead,
    )
