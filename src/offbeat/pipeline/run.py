"""One run from a configuration: ``PPOTrainer.from_config(cfg).run()``.

Owns the order in which everything starts and ends, the run directory and the run's status. What
happens in between is ``loop.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

from offbeat.checkpoint import snapshot
from offbeat.checkpoint.folders import CHECKPOINTS
from offbeat.checkpoint.saver import Saver, SaveSchedule, ScheduleState
from offbeat.checkpoint.snapshot import RunState, Snapshot, Snapshots
from offbeat.config import (
    ActorConfig,
    EvaluatorConfig,
    Lookahead,
    NormLevel,
    RecoverConfig,
    RecoverMode,
    RunConfig,
    SaverConfig,
    from_mapping,
    to_yaml,
)
from offbeat.errors import (
    CheckpointError,
    ConfigError,
    OffbeatError,
    boundary,
)
from offbeat.generate.client import EngineInfo
from offbeat.generate.gateway.access import listening, resolve_token
from offbeat.generate.gateway.answers import Answers
from offbeat.generate.gateway.http import Gateway, serve_gateway
from offbeat.generate.healing import HealingGenerator, while_healing
from offbeat.generate.router import Router
from offbeat.launch import interrupts
from offbeat.launch.alive import while_alive
from offbeat.launch.protocols import Scheduler, WorkerHandle, WorkerSpec
from offbeat.launch.scheduler import make_scheduler
from offbeat.observe import liveness
from offbeat.observe.console import console_sink
from offbeat.observe.find import CONFIG_FILE, METRICS_FILE
from offbeat.observe.ledger import FILE_NAME as LEDGER_FILE
from offbeat.observe.ledger import Breach
from offbeat.observe.limits import RunSetup
from offbeat.observe.sinks import JsonlSink, SinkSet
from offbeat.observe.summary import FILE_NAME as SUMMARY_FILE
from offbeat.observe.summary import RunStatus, Summary
from offbeat.observe.trackers.kinds import check_installed
from offbeat.observe.trackers.process import TrackerProcess, open_trackers
from offbeat.pipeline.cadence import Cadence
from offbeat.pipeline.evaluate import Evaluator
from offbeat.pipeline.ledger import Ledger
from offbeat.pipeline.loop import Loop, LoopPlan
from offbeat.pipeline.no_signal import SignalRules
from offbeat.pipeline.preflight import Inputs, open_reward, open_workflow, prepare
from offbeat.pipeline.recorder import Recorder
from offbeat.pipeline.resume import (
    Continuation,
    changed_bits,
    continue_run,
    is_complete,
    is_unfinished,
    machine_changes,
    named_after,
    nothing_to_continue,
    rewrite_config,
    run_of_snapshot,
    run_to_continue,
    snapshot_to_continue,
)
from offbeat.pipeline.run_folder import free_run_dir, named_by_clock
from offbeat.pipeline.save_policy import ModelSaves, SavePolicy, SnapshotSaves
from offbeat.pipeline.snapshots import SnapshotTaker
from offbeat.pipeline.staleness import Policy
from offbeat.pipeline.update_record import UpdateRecorder
from offbeat.pipeline.workers import (
    UPDATE_TIMEOUT_SECONDS,
    generator_specs,
    place_of,
    start_all,
    trainer_worker,
    usable_cores,
    why_not_repeatable,
)
from offbeat.protocols import Generator, Sink
from offbeat.rollout.reward_given import record
from offbeat.train.client import RemoteTrainer, TrainerSpec
from offbeat.types import Environment

log = logging.getLogger(__name__)


class PPOTrainer:
    """A training run. Create with ``from_config``; ``run`` blocks, ``arun`` is for an event loop.

    Example:
        >>> cfg = offbeat.load("recipes/reverse.yaml", ["total_train_steps=3"])
        >>> summary = PPOTrainer.from_config(cfg).run()
        >>> summary.eval.last
    """

    def __init__(
        self,
        cfg: RunConfig,
        inputs: Inputs,
        run_dir: Path,
        *,
        clock_name: bool = False,
        reward_fn: Callable[..., object] | None = None,
        resume: bool = False,
        snapshot: Path | None = None,
    ) -> None:
        self.cfg = cfg
        self.run_dir = run_dir
        self.inputs = inputs
        self._clock_name = clock_name
        self._reward_fn = reward_fn
        self._resume = resume
        self._snapshot = snapshot

    @classmethod
    def from_config(
        cls,
        cfg: RunConfig | Mapping[str, object],
        *,
        reward_fn: Callable[..., object] | None = None,
        resume: bool = False,
        resume_from: Path | None = None,
    ) -> PPOTrainer:
        """Check ``cfg`` and what it names: model folder, data, workflow.

        Nothing is started or written yet.

        Args:
            cfg: the configuration, or its keys as plain data.
            reward_fn: takes the place of ``rollout.reward_fn``, which may then be left out of a
                mapping. Lambdas and closures work if what they hold can be pickled. The run's
                ``config.yaml`` records that there was one, and refuses to be run by itself.
            resume: continue the run of ``cfg.trial_name``, or without one the newest of the
                experiment; ``recover.mode: auto`` does so where there is one.
            resume_from: continue the run that this snapshot is of, from there. What it did
                afterwards is set aside, even if it was complete.

        Raises:
            ConfigError, DataError, ModelError: what cannot be used, and the way out.
        """
        if reward_fn is not None:
            cfg = record(cfg, reward_fn)
        if not isinstance(cfg, RunConfig):
            cfg = from_mapping(cfg, "the mapping given")
        begun = None if resume_from is None else run_of_snapshot(cfg, resume_from)
        if begun is None and (resume or cfg.recover.mode is RecoverMode.AUTO):
            begun = run_to_continue(cfg, asked=resume)
        if resume and begun is None:
            raise nothing_to_continue(cfg)
        clock_name = begun is None and cfg.trial_name is None
        if clock_name:
            cfg = named_by_clock(cfg)
        run_dir = begun or free_run_dir(cfg)
        if begun is not None:
            cfg = named_after(cfg, begun)
        check_installed(cfg.stats_logger)
        inputs = prepare(cfg, reward_log=_reward_log(run_dir), reward_fn=reward_fn)
        return cls(
            cfg,
            inputs,
            run_dir,
            clock_name=clock_name,
            reward_fn=reward_fn,
            resume=begun is not None,
            snapshot=resume_from,
        )

    def run(self) -> Summary:
        """Train to the end and return the summary; ``arun`` is for a running event loop.

        Raises:
            OffbeatError: what ended the run, or that an event loop is running here already.
            KeyboardInterrupt: Ctrl-C ended it in order; a second one had it end at once.
        """
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise OffbeatError(
                "PPOTrainer.run() was called where an event loop is running already, as in a "
                "notebook: write `await trainer.arun()` instead"
            )
        return interrupts.run(self.arun())

    async def arun(self) -> Summary:
        """Train to the end and return the summary, also written to ``summary.json``.

        Raises:
            OffbeatError: what ended the run; the summary says ``failed`` and why.
        """
        while not (self._resume or self._claim_run_dir()):
            self._take_another_name()
        with (
            liveness.held(self.run_dir),
            contextlib.closing(Ledger.open(self.run_dir / LEDGER_FILE)) as ledger,
        ):
            setup = RunSetup.of(self.cfg, usable_cores(self.cfg.model.path))
            begun = self._continue(ledger) if self._resume else Continuation()
            trackers = open_trackers(self.cfg.stats_logger, self.run_dir)
            sinks = SinkSet([*self._sinks(), *trackers])
            counts = None if begun.state is None else begun.state.counts
            async with Recorder(
                self.run_dir, sinks, ledger, setup, earlier=begun.earlier, counts=counts
            ) as recorder:
                try:
                    with boundary(OffbeatError, "unexpected error"):
                        await self._train(recorder, begun)
                except (asyncio.CancelledError, KeyboardInterrupt):
                    self._conclude(recorder, trackers, RunStatus.INTERRUPTED)
                    raise
                except OffbeatError as exc:
                    why = f"{type(exc).__name__}: {exc}"
                    if interrupts.interrupted():
                        log.error("while the interrupted run was ended: %s", why)
                        self._conclude(recorder, trackers, RunStatus.INTERRUPTED)
                        raise asyncio.CancelledError from exc
                    self._conclude(recorder, trackers, RunStatus.FAILED, why)
                    raise
                return self._conclude(recorder, trackers, RunStatus.COMPLETED)

    def _claim_run_dir(self) -> bool:
        """Make the run directory; False when another run has just made it and the clock named both.

        Only one run can create ``config.yaml``. A name that somebody chose is refused instead.
        """
        with boundary(CheckpointError, f"fileroot: creating the run directory {self.run_dir}"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            try:
                with (self.run_dir / CONFIG_FILE).open("x", encoding="utf-8") as file:
                    file.write(to_yaml(self.cfg))
            except FileExistsError as exc:
                if not self._clock_name:
                    raise ConfigError(
                        f"trial_name: another run has just begun in {self.run_dir}; choose another "
                        "trial_name, or leave it out to have one made from the clock"
                    ) from exc
                return False
            (self.run_dir / "logs").mkdir(exist_ok=True)
        return True

    def _continue(self, ledger: Ledger) -> Continuation:
        if self._snapshot is None and not is_unfinished(self.run_dir, self.inputs.steps):
            raise is_complete(self.run_dir)  # by another process, while this one prepared
        (self.run_dir / "logs").mkdir(exist_ok=True)  # it may have been stopped before it had one
        found = snapshot_to_continue(self.run_dir, self._snapshot)
        if found is None:  # no step of another configuration is left
            rewrite_config(self.cfg, self.run_dir, ledger.attempt)
        return continue_run(self.run_dir, ledger, found)

    def _adopt_config(self, recorder: Recorder) -> None:
        """With the first step that a resumed run trains its configuration becomes the run's.

        Not before: one that fails at its start leaves the run as it was configured.
        """
        changed = changed_bits(self.run_dir, self.cfg)
        if changed:
            recorder.broken(Breach.CONFIG, f"it was resumed with {'; '.join(changed)}")
        rewrite_config(self.cfg, self.run_dir, recorder.attempt - 1)

    def _take_another_name(self) -> None:
        taken, self.cfg = self.run_dir, named_by_clock(self.cfg)
        self.run_dir = free_run_dir(self.cfg)
        reward = open_reward(self.cfg, _reward_log(self.run_dir), self._reward_fn)
        self.inputs = dataclasses.replace(
            self.inputs, reward=reward, workflow=open_workflow(self.cfg, reward)
        )
        log.warning("another run has taken %s; the folder of this one is %s", taken, self.run_dir)

    def _conclude(
        self,
        recorder: Recorder,
        trackers: Sequence[TrackerProcess],
        status: RunStatus,
        error: str | None = None,
    ) -> Summary:
        """Write ``summary.json``; a run that went well does not fail for want of it."""
        for tracker in trackers:
            tracker.conclude(status, error)
        summary = recorder.summary(status, error)
        path = self.run_dir / SUMMARY_FILE
        try:
            summary.write(path)
        except OSError as exc:
            log.error("%s could not be written: %s", path, exc)
        return summary

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = [JsonlSink(self.run_dir / METRICS_FILE)]
        if self.cfg.stats_logger.console:
            title = f"{self.cfg.experiment_name}/{self.run_dir.name}"
            sinks.append(console_sink(total_steps=self.inputs.steps, title=title))
        return sinks

    async def _train(self, recorder: Recorder, begun: Continuation) -> None:
        """Start what the run needs, run the loop, end everything in reverse order."""
        async with AsyncExitStack() as stack:
            door = stack.enter_context(self._door())
            # The reward function first: it fails fastest, and a run without rewards is no run.
            self.inputs.reward.tell(recorder)
            await stack.enter_async_context(self.inputs.reward)
            scheduler = make_scheduler(self.cfg.scheduler.type.value, self.run_dir / "logs")
            await stack.enter_async_context(scheduler)
            specs, of_trainer = self._generator_specs(), self._trainer_spec(begun)
            threads = self.cfg.trainer_threads(usable_cores(self.cfg.model.path))
            trainer, *workers = await start_all(
                scheduler, [trainer_worker(of_trainer, threads), *specs]
            )
            remote = RemoteTrainer(trainer, update_timeout=UPDATE_TIMEOUT_SECONDS)
            # From here on somebody sees the death of each process; first those of the trainer.
            patience = self.cfg.rollout.stall_seconds
            await stack.enter_async_context(while_alive([trainer], heartbeat_seconds=patience))
            updates = await UpdateRecorder.begin(of_trainer, remote)
            if begun.snapshot is not None:
                _compare_machines(recorder, begun.snapshot, updates.environment)
                recorder.before_first_step = partial(self._adopt_config, recorder)
            # Ended after the generators: the last saves need none.
            saver = await stack.enter_async_context(self._saver(recorder))
            snapshots = None
            if not self._schedule(self.cfg.recover).is_off:
                written = await stack.enter_async_context(self._snapshots(recorder))
                snapshots = SnapshotTaker(written, remote, recorder, saver)
            weights_gate = asyncio.Lock()
            generators = [
                await stack.enter_async_context(
                    self._healing(worker, spec, scheduler, weights_gate, recorder)
                )
                for worker, spec in zip(workers, specs, strict=True)
            ]
            await stack.enter_async_context(while_healing(generators))
            replicas = {g.name: g for g in generators}
            infos = [await g.info() for g in generators]
            _report_engine(infos[0])
            if why := why_not_repeatable(infos):
                recorder.broken(Breach.ENGINE, why)
            router = Router(generators)
            if door is not None:
                await stack.enter_async_context(self._gateway(router, door))
            loop = self._loop(
                recorder,
                remote,
                replicas,
                router,
                saver,
                snapshots,
                weights_gate,
                updates,
                begun.state,
            )
            with _on_signal(
                signal.SIGUSR1,
                lambda: log.warning("SIGUSR1 asks what this run does: %s", loop.report()),
            ):
                await loop.run()

    def _healing(
        self,
        worker: WorkerHandle,
        spec: WorkerSpec,
        scheduler: Scheduler,
        weights_gate: asyncio.Lock,
        recorder: Recorder,
    ) -> HealingGenerator:
        c = self.cfg.generator
        return HealingGenerator(
            worker,
            spec,
            scheduler,
            gate=weights_gate,
            request_timeout=self.cfg.rollout.request_timeout_seconds,
            heartbeat_seconds=c.heartbeat_seconds,
            max_restarts=c.max_restarts,
            on_restart=recorder.restarted,
            on_lost_reply=recorder.reply_lost,
        )

    def _door(self) -> AbstractContextManager[socket.socket | None]:
        """The gateway's socket, taken before anything starts; None when there is no gateway."""
        c = self.cfg.gateway
        return nullcontext() if c.port is None else listening(c.host, c.port, key="gateway.")

    @asynccontextmanager
    async def _gateway(self, router: Router, door: socket.socket) -> AsyncIterator[None]:
        """Answer questions at ``door`` with the live weights."""
        c, name = self.cfg.gateway, self.cfg.experiment_name
        gateway = Gateway(
            Answers(
                router,
                codec=self.inputs.codec,
                max_len=self.inputs.max_len,
                # The run's own requests never wait for a line of strangers.
                at_once=max(1, self.cfg.generator.slots // 2),
            ),
            name=name,
            token=resolve_token(c.host, c.token, key="gateway."),
            version=lambda: router.version,
        )
        async with serve_gateway(gateway, door) as url:
            log.info("the model answers while it trains: %s, model %s", url, name)
            yield

    def _trainer_spec(self, begun: Continuation) -> TrainerSpec:
        cfg = self.cfg
        return TrainerSpec(
            model_path=cfg.model.path,
            dtype=cfg.model.dtype,
            device=cfg.model.device,
            seed=cfg.seed,
            temperature=cfg.gconfig.temperature,
            max_new_tokens=cfg.gconfig.max_new_tokens,
            total_steps=self.inputs.steps,
            actor=cfg.actor,
            onednn_linears=cfg.model.onednn_linears,
            snapshots=not self._schedule(cfg.recover).is_off,
            restore=None if begun.snapshot is None else place_of(begun.snapshot),
        )

    def _generator_specs(self) -> list[WorkerSpec]:
        threads = self.cfg.generator_threads(usable_cores(self.cfg.model.path))
        return generator_specs(self.cfg, self.inputs.max_len, threads)

    @asynccontextmanager
    async def _saver(self, recorder: Recorder) -> AsyncIterator[ModelSaves | None]:
        """None when nothing is ever saved. At the end of a run the save in flight is waited for."""
        c, directory = self.cfg.saver, self.run_dir / CHECKPOINTS
        if self._schedule(c).is_off and not c.at_end:
            yield None
            return
        opening = Saver.open(
            mode=self.cfg.saver.mode,
            checkpoints_dir=directory,
            template_dir=Path(self.cfg.model.path),
            keep_last=c.keep_last,
            keep_every=c.keep_every,
        )
        policy = SavePolicy("saver", c.on_error, directory, recorder.save_failed)
        async with await opening as saver:
            saves = ModelSaves(saver, policy, last_step=self.inputs.steps)
            yield saves
            await saves.wait()

    @asynccontextmanager
    async def _snapshots(self, recorder: Recorder) -> AsyncIterator[SnapshotSaves]:
        """At the end of a run the snapshot in flight is waited for."""
        c, directory = self.cfg.recover, self.run_dir / snapshot.FOLDER
        names = (CONFIG_FILE, LEDGER_FILE, f"{LEDGER_FILE}-wal", METRICS_FILE)
        needs = [self.run_dir / name for name in names]
        policy = SavePolicy("recover", c.on_error, directory, recorder.snapshot_failed)
        async with Snapshots(directory, needs=needs, keep=c.keep) as snapshots:
            saves = SnapshotSaves(snapshots, policy)
            yield saves
            await saves.ready()

    def _loop(
        self,
        recorder: Recorder,
        trainer: RemoteTrainer,
        replicas: Mapping[str, Generator],
        router: Router,
        saver: ModelSaves | None,
        snapshots: SnapshotTaker | None,
        weights_gate: asyncio.Lock,
        updates: UpdateRecorder,
        start: RunState | None,
    ) -> Loop:
        cfg, inputs = self.cfg, self.inputs
        evaluator = self._evaluator(router) if inputs.validation is not None else None
        plan = LoopPlan(
            steps=inputs.steps,
            groups_per_step=cfg.train_dataset.batch_size,
            total_groups=inputs.total_groups,
            max_staleness=cfg.rollout.max_staleness,
            capacity=cfg.max_concurrent_rollouts,
            sampling=inputs.sampling,
            max_failure_rate=cfg.rollout.max_failure_rate,
            max_consecutive_failures=cfg.rollout.max_consecutive_failures,
            stall_seconds=cfg.rollout.stall_seconds,
            request_timeout_seconds=cfg.rollout.request_timeout_seconds,
            signal=_signal_rules(cfg.actor),
            policy=Policy(cfg.rollout.policy.value),
            adaptive_lookahead=cfg.rollout.lookahead is Lookahead.ADAPTIVE,
            group_deadline_seconds=cfg.rollout.group_deadline_seconds,
            dynamic_sampling=cfg.rollout.dynamic_sampling,
            max_groups_without_signal=cfg.rollout.max_groups_without_signal,
        )
        cadence = Cadence(
            steps=inputs.steps,
            evaluate=self._schedule(cfg.evaluator, None if start is None else start.evaluate),
            evaluate_at_start=cfg.evaluator.at_start,
            evaluate_at_end=cfg.evaluator.at_end,
            save=self._schedule(cfg.saver, None if start is None else start.save),
            save_at_end=cfg.saver.at_end,
            snapshot=self._schedule(cfg.recover, None if start is None else start.snapshot),
        )
        return Loop(
            plan,
            cadence,
            generator=router,
            replicas=replicas,
            trainer=trainer,
            workflow=inputs.workflow,
            stream=inputs.stream,
            codec=inputs.codec,
            recorder=recorder,
            evaluator=evaluator,
            saver=saver,
            weights_gate=weights_gate,
            snapshots=snapshots,
            updates=updates,
            start=start,
        )

    def _evaluator(self, generator: Router) -> Evaluator:
        if self.inputs.validation is None:
            raise ConfigError("valid_dataset: there is none to evaluate on; add one")
        return Evaluator(
            generator=generator,
            workflow=self.inputs.workflow,
            stream=self.inputs.validation,
            codec=self.inputs.codec,
            plan=self.inputs.eval_sampling,
            concurrency=self.cfg.concurrent_prompts(self.inputs.eval_sampling.n_samples),
        )

    def _schedule(
        self,
        section: SaverConfig | EvaluatorConfig | RecoverConfig,
        since: ScheduleState | None = None,
    ) -> SaveSchedule:
        return SaveSchedule(
            freq_steps=section.freq_steps,
            freq_epochs=section.freq_epochs,
            freq_secs=section.freq_secs,
            now=time.monotonic(),
            since=since,
        )


@contextlib.contextmanager
def _on_signal(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    """Call it when the signal comes; outside of the main thread, where none comes, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def _signal_rules(actor: ActorConfig) -> SignalRules:
    return SignalRules(
        group_baseline=actor.reward_norm.mean_level is NormLevel.GROUP,
        truncated_count=not (actor.exclude_truncated or actor.mask_no_eos_with_zero),
    )


def _reward_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "rewards.log"


def _compare_machines(recorder: Recorder, taken: Snapshot, now: Environment) -> None:
    """A resumed run has other bits than an uninterrupted one where these differ."""
    changes = machine_changes(taken.state.environment, now)
    if changes:
        recorder.broken(Breach.MACHINE, f"it was resumed elsewhere: {'; '.join(changes)}")


def _report_engine(info: EngineInfo) -> None:
    log.info(
        "%s parameters, %s on %s%s, %d thread%s; cached decode and training pass agree %s",
        f"{info.parameters:,}",
        info.dtype,
        info.device,
        " (oneDNN linears)" if info.onednn else "",
        info.threads,
        "" if info.threads == 1 else "s",
        "bit for bit" if info.bitwise else f"to {info.max_error:.0e} nats",
    )
