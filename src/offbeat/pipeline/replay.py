"""A run's updates once more, from what it recorded: does the same input give the same weights?

Consumes a run's folder; produces a ``Replay``: that every digest agrees, or the first step and
tensor that differ. Starts trainers only, and writes nothing but logs, to a scratch folder. Waits
for what a run waits for from its trainer, and is unblocked by the same deadlines.

Each step's rollouts file has the trainer's specification beside the digests
(`offbeat.pipeline.update_record`), and that is what is used: ``config.yaml`` says what the newest
attempt was told, which is not what the steps before it were trained with when something was
changed in between. Where it changes, a new trainer takes the state of the one before, as in the
run.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint import snapshot as snapshots
from offbeat.checkpoint.folders import step_folders, step_of
from offbeat.checkpoint.snapshot import Snapshot, read_snapshot
from offbeat.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DataError,
    ModelError,
    TrainingError,
    WeightSyncError,
    boundary,
)
from offbeat.launch.alive import while_alive
from offbeat.launch.blob import write_blob
from offbeat.launch.codec import encode
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerHandle
from offbeat.model.check import check_folder
from offbeat.observe.find import METRICS_FILE
from offbeat.observe.liveness import Life, life_of
from offbeat.observe.rollouts import read_rollouts, read_update, recorded_steps, rollouts_path
from offbeat.observe.sinks import read_metrics
from offbeat.pipeline.devices import check_device
from offbeat.pipeline.resume import machine_changes
from offbeat.pipeline.update_record import UpdateRecord
from offbeat.pipeline.workers import UPDATE_TIMEOUT_SECONDS, place_of, trainer_worker
from offbeat.rollout.samples import recorded_samples
from offbeat.train.client import RemoteTrainer, Restore, TrainerSpec
from offbeat.types import Environment, WeightUpdate
from offbeat.weights.digests import tensor_digests

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUpdate:
    """A step that can be repeated."""

    step: int
    record: UpdateRecord

    @property
    def computed_with(self) -> tuple[TrainerSpec, Environment]:
        """What one trainer process can repeat together."""
        return self.record.trainer, self.record.environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The steps to repeat, in order and at least one, and the ``start``: None is the model folder.

    ``recorded`` is the newest step of the run.
    """

    run_dir: Path
    start: Snapshot | None
    updates: tuple[RecordedUpdate, ...]
    recorded: int

    @property
    def place(self) -> Restore | None:
        """What the first trainer goes on from."""
        return None if self.start is None else place_of(self.start)

    @property
    def started_from(self) -> str:
        """Where the first weights lie."""
        first = self.updates[0].record.trainer.model_path
        return first if self.start is None else str(self.start.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step whose weights are not those of the run.

    ``recorded`` and ``replayed`` are digests of all weights; ``tensors`` those of the tensors that
    differ, recorded and replayed, by name in the order of the layout.
    """

    step: int
    recorded: str
    replayed: str
    tensors: dict[str, tuple[str, str]]
    tensor_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of it: the steps that agree, and the one that does not, which ends it."""

    agreeing: tuple[int, ...]
    divergence: Divergence | None


OnStep = Callable[[RecordedUpdate], None]
"""Called with each step that agrees."""


def plan_replay(
    run_dir: Path, *, from_step: int | None = None, to_step: int | None = None
) -> ReplayPlan:
    """Find what a replay needs, and that all of it is there.

    Args:
        run_dir: the run's folder; it may still be running.
        from_step: steps before it need not be repeated, as far as there is a snapshot to start
            from. None is the first.
        to_step: the last one. None is the newest that was trained; of a run that goes on, the
            newest that was recorded.

    Raises:
        DataError: a file is missing, cannot be read or is too old; or there are no such steps.
    """
    steps = recorded_steps(run_dir)
    if not steps:
        raise DataError(
            f"{run_dir}: no rollouts were recorded, so there is nothing to replay; a run records "
            "each step that it trains"
        )
    first, last = from_step or 1, to_step or _newest(run_dir, steps)
    if to_step is not None and first > last:
        raise DataError(
            f"{run_dir}: --from-step {first} lies behind --to-step {last}: the range is empty"
        )
    asked = max(from_step or 1, to_step or 1)
    if asked > steps[-1]:
        raise DataError(
            f"{run_dir}: step {asked} was not recorded; recorded are steps {steps[0]} "
            f"to {steps[-1]}"
        )
    start = _newest_snapshot_before(run_dir, first)
    begin = 1 if start is None else start.state.run.step + 1
    updates = _recorded(run_dir, range(begin, last + 1))
    _check_one_line(run_dir, updates)
    return ReplayPlan(run_dir=run_dir, start=start, updates=updates, recorded=steps[-1])


def _newest(run_dir: Path, recorded: Sequence[int]) -> int:
    """The last step of a run; its file may be missing."""
    if life_of(run_dir) is Life.ALIVE:  # files are written behind
        return recorded[-1]
    metrics = run_dir / METRICS_FILE
    trained = [r.step for r in read_metrics(metrics)] if metrics.is_file() else []
    return max([*trained, recorded[-1]])


def _newest_snapshot_before(run_dir: Path, step: int) -> Snapshot | None:
    for folder in step_folders(run_dir / snapshots.FOLDER):
        if step_of(folder) < step:
            try:
                return read_snapshot(folder)
            except CorruptCheckpoint as exc:
                log.warning("the snapshot %s is damaged and not used: %s", folder, exc)
    return None


def _ways_out(run_dir: Path, step: int, begin: int) -> str:
    """What to do without the file of ``step`` in a replay that starts with ``begin``."""
    ways = ["bring the file back"]
    if step > begin:
        ways.append(f"replay what lies before it with --to-step {step - 1}")
    later = [s for f in step_folders(run_dir / snapshots.FOLDER) if (s := step_of(f)) >= step]
    if later:
        ways.append(f"start from a snapshot after it with --from-step {min(later) + 1}")
    return ", or ".join(ways)


def _recorded(run_dir: Path, steps: Sequence[int]) -> tuple[RecordedUpdate, ...]:
    """Nearly all of a record is what the one before says; it is kept once."""
    missing = sorted(set(steps) - set(recorded_steps(run_dir)))
    if missing:
        raise DataError(
            f"{rollouts_path(run_dir, missing[0])} is missing, and no later step can be repeated "
            f"without it: {_ways_out(run_dir, missing[0], steps[0])}"
        )
    kept: dict[bytes, tuple[TrainerSpec, Environment]] = {}
    updates = []
    for step in steps:
        record = _record(run_dir, step, begin=steps[0])
        trainer, environment = kept.setdefault(
            encode((record.trainer, record.environment)), (record.trainer, record.environment)
        )
        record = dataclasses.replace(record, trainer=trainer, environment=environment)
        updates.append(RecordedUpdate(step=step, record=record))
    return tuple(updates)


def _record(run_dir: Path, step: int, *, begin: int) -> UpdateRecord:
    path = rollouts_path(run_dir, step)
    text = read_update(run_dir, step)
    if text is None:
        raise DataError(
            f"{path} has no record of its update: an offbeat that kept none wrote it, or the file "
            f"was rewritten since: {_ways_out(run_dir, step, begin)}"
        )
    return UpdateRecord.from_json(text, path)


def _check_one_line(run_dir: Path, updates: Sequence[RecordedUpdate]) -> None:
    """Each step must start from the weights that the one before it produced."""
    for before, after in itertools.pairwise(updates):
        if before.record.digest != after.record.before:
            raise DataError(
                f"{rollouts_path(run_dir, after.step)}: its update started from weights "
                f"{after.record.before}, and step {before.step} produced {before.record.digest}: "
                "the files are not of one run; bring back those that were recorded together"
            )


def _tell_nobody(done: RecordedUpdate) -> None:
    """For who waits for the end only."""


async def replay(plan: ReplayPlan, on_step: OnStep = _tell_nobody) -> Replay:
    """Repeat the updates until one diverges.

    Raises:
        ModelError, CheckpointError: the replay cannot start from the weights that the run did.
        TrainingError, WeightSyncError: an update that the run took is refused now.
        OffbeatError: a trainer cannot be started, or was lost.
    """
    with tempfile.TemporaryDirectory(prefix="offbeat-replay-") as scratch:
        async with LocalScheduler(Path(scratch)) as scheduler:
            return await _Replaying(plan, scheduler, on_step).run()


class _Replaying:
    """One replay under way."""

    def __init__(self, plan: ReplayPlan, scheduler: LocalScheduler, on_step: OnStep) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._on_step = on_step
        self._agreeing: list[int] = []

    async def run(self) -> Replay:
        """One trainer after the other, each from the state of the one before."""
        trainer: WorkerHandle | None = None
        for _, same in itertools.groupby(self._plan.updates, lambda u: u.computed_with):
            updates = tuple(same)
            trainer = await self._next_trainer(trainer, updates[0])
            async with while_alive([trainer]):
                divergence = await self._repeat(updates, _remote(trainer))
            if divergence is not None:
                return Replay(agreeing=tuple(self._agreeing), divergence=divergence)
        return Replay(agreeing=tuple(self._agreeing), divergence=None)

    async def _next_trainer(
        self, before: WorkerHandle | None, first: RecordedUpdate
    ) -> WorkerHandle:
        """The trainer that takes ``first`` and what follows; ``before`` ends when it has started.

        Raises:
            ModelError, CheckpointError: it does not hold what ``first`` started from.
        """
        spec, environment = first.computed_with
        _check_model(spec)
        place = self._plan.place if before is None else await _place_in(_remote(before))
        spec = dataclasses.replace(spec, restore=place)
        trainer = await self._scheduler.start(trainer_worker(spec, environment.threads))
        if before is None:
            _check_start(self._plan, await _remote(trainer).publish())
        else:
            await before.close()
        _warn_of_other_machine(first, await _remote(trainer).environment())
        return trainer

    async def _repeat(
        self, updates: Sequence[RecordedUpdate], remote: RemoteTrainer
    ) -> Divergence | None:
        for update in updates:
            produced = await self._update(update, remote)
            if produced.digest != update.record.digest:
                return _divergence(update, produced)
            self._agreeing.append(update.step)
            self._on_step(update)
        return None

    async def _update(self, update: RecordedUpdate, remote: RemoteTrainer) -> WeightUpdate:
        """Take one update with what its file holds; returns the weights it produced."""
        path = rollouts_path(self._plan.run_dir, update.step)
        with boundary(DataError, f"{path}: no longer what a run records"):
            samples = recorded_samples(read_rollouts(self._plan.run_dir, update.step))
        try:
            with write_blob(encode(samples)) as blob:
                await remote.update(blob.ref, update.record.version)
            return await remote.publish()
        except (TrainingError, WeightSyncError) as exc:
            raise type(exc)(
                f"step {update.step}: the run took this update, and now it is refused, so {path} "
                f"or the code that trains is not what it was: {exc}"
            ) from exc


def _remote(trainer: WorkerHandle) -> RemoteTrainer:
    return RemoteTrainer(trainer, update_timeout=UPDATE_TIMEOUT_SECONDS)


def _check_model(spec: TrainerSpec) -> None:
    folder = Path(spec.model_path)
    if not folder.is_dir():
        raise ModelError(
            f"model.path: the run trained {folder}, and there is no such folder here; a relative "
            "path counts from the folder in which the run was started: replay it there"
        )
    check_folder(folder)
    check_device(spec.device)


async def _place_in(remote: RemoteTrainer) -> Restore:
    """Where in the memory of a trainer another one can go on from it."""
    await remote.begin_snapshot()
    state = await remote.snapshot()
    return Restore(
        path=state.tensors.uri,
        version=state.tensors.version,
        optimizer_steps=state.optimizer_steps,
    )


def _check_start(plan: ReplayPlan, held: WeightUpdate) -> None:
    wanted = plan.updates[0].record.before
    if held.digest == wanted:
        return
    digests = f"its weights have digest {held.digest}, those of the run had {wanted}"
    if plan.start is None:
        raise ModelError(
            f"model.path: {plan.started_from} is not the model that this run started from: "
            f"{digests}; put the old folder back, or start from a snapshot with --from-step"
        )
    raise CheckpointError(
        f"{plan.started_from} is not what step {plan.updates[0].step} started from: {digests}; "
        "move it away to start before it"
    )


def _warn_of_other_machine(first: RecordedUpdate, now: Environment) -> None:
    changes = machine_changes(first.record.environment, now)
    if changes:
        log.warning(
            "step %d was computed elsewhere (%s): the digests may differ although nothing is wrong",
            first.step,
            "; ".join(changes),
        )


def _divergence(update: RecordedUpdate, produced: WeightUpdate) -> Divergence:
    found, record = tensor_digests(produced), update.record
    pairs = zip(found.items(), record.tensors, strict=True)
    return Divergence(
        step=update.step,
        recorded=record.digest,
        replayed=produced.digest,
        tensors={name: (was, now) for (name, now), was in pairs if was != now},
        tensor_count=len(found),
    )
