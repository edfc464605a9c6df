"""One run from a configuration: ``PPOTrainer.from_config(cfg).run()``.

Owns the order in which everything starts and ends, the run directory and the run's status. What
happens in between is ``loop.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from offbeat.checkpoint.saver import SaveMode, Saver, SaveSchedule
from offbeat.config import EvaluatorConfig, RunConfig, SaverConfig, from_mapping, to_yaml
from offbeat.errors import (
    CheckpointError,
    ConfigError,
    OffbeatError,
    RewardError,
    WorkerError,
    boundary,
    true_cause,
)
from offbeat.generate import client as generate_client
from offbeat.generate.client import EngineInfo, GeneratorSpec, RemoteGenerator
from offbeat.generate.router import Router
from offbeat.launch.codec import encode
from offbeat.launch.protocols import Scheduler, WorkerHandle, WorkerSpec
from offbeat.launch.scheduler import make_scheduler
from offbeat.observe.limits import RunSetup
from offbeat.observe.sinks import ConsoleSink, JsonlSink, SinkSet
from offbeat.observe.summary import RunStatus, Summary
from offbeat.pipeline.evaluate import EvalResult, Evaluator
from offbeat.pipeline.ledger import Ledger
from offbeat.pipeline.loop import Cadence, Loop, LoopPlan
from offbeat.pipeline.preflight import Inputs, prepare
from offbeat.pipeline.recorder import Recorder
from offbeat.protocols import Sink
from offbeat.train import client as train_client
from offbeat.train.client import RemoteTrainer, TrainerSpec
from offbeat.types import PolicyVersion

log = logging.getLogger(__name__)

UPDATE_TIMEOUT_SECONDS = 3600.0
"""Longest time one update may take before the trainer counts as hung."""

SMALL_MODEL_BYTES = 50_000_000
"""Below this size of the weights a matrix product is too small to share: a second thread costs more
than it gives, and many times as much when another process wants the core.
"""

DEATH_NOTICE_SECONDS = 0.5
"""After a failed call, how long to look for the worker whose death caused it."""


class PPOTrainer:
    """A training run. Create with ``from_config``; ``run`` blocks, ``arun`` is for an event loop.

    Example:
        >>> cfg = offbeat.load("recipes/reverse.yaml", ["total_train_steps=3"])
        >>> summary = PPOTrainer.from_config(cfg).run()
        >>> summary.eval.last
    """

    def __init__(self, cfg: RunConfig, inputs: Inputs, run_dir: Path) -> None:
        self.cfg = cfg
        self.run_dir = run_dir
        self.inputs = inputs

    @classmethod
    def from_config(cls, cfg: RunConfig | Mapping[str, object]) -> PPOTrainer:
        """Check ``cfg`` and what it names: model folder, data, workflow.

        Nothing is started or written yet.

        Raises:
            ConfigError, DataError, ModelError: what cannot be used, and the way out.
        """
        if not isinstance(cfg, RunConfig):
            cfg = from_mapping(cfg, "the mapping given")
        cfg = dataclasses.replace(cfg, trial_name=cfg.trial_name or time.strftime("%Y%m%d-%H%M%S"))
        run_dir = free_run_dir(cfg)
        return cls(cfg, prepare(cfg, reward_log=run_dir / "logs" / "rewards.log"), run_dir)

    def run(self) -> Summary:
        """Train to the end and return the summary; ``arun`` is for a running event loop."""
        return asyncio.run(self.arun())

    async def arun(self) -> Summary:
        """Train to the end and return the summary, also written to ``summary.json``.

        Raises:
            OffbeatError: what ended the run; the summary says ``failed`` and why.
        """
        with boundary(CheckpointError, f"creating the run directory {self.run_dir}"):
            (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
            # "x": of two runs that start in the same second under the same name, one is refused.
            with (self.run_dir / "config.yaml").open("x", encoding="utf-8") as file:
                file.write(to_yaml(self.cfg))
        with contextlib.closing(Ledger.open(self.run_dir / "run.db")) as ledger:
            setup = RunSetup.of(self.cfg, usable_cores(self.cfg.model.path))
            sinks = SinkSet(self._sinks())
            async with Recorder(self.run_dir, sinks, ledger, setup) as recorder:
                try:
                    with boundary(OffbeatError, "unexpected error"):
                        await self._train(recorder)
                except (asyncio.CancelledError, KeyboardInterrupt):
                    self._conclude(recorder, RunStatus.INTERRUPTED)
                    raise
                except OffbeatError as exc:
                    self._conclude(recorder, RunStatus.FAILED, f"{type(exc).__name__}: {exc}")
                    raise
                return self._conclude(recorder, RunStatus.COMPLETED)

    def _conclude(self, recorder: Recorder, status: RunStatus, error: str | None = None) -> Summary:
        """Write ``summary.json``; a run that went well does not fail for want of it."""
        summary = recorder.summary(status, error)
        try:
            summary.write(self.run_dir / "summary.json")
        except OSError as exc:
            log.error("%s could not be written: %s", self.run_dir / "summary.json", exc)
        return summary

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = [JsonlSink(self.run_dir / "metrics.jsonl")]
        if self.cfg.stats_logger.console:
            sinks.append(ConsoleSink(total_steps=self.inputs.steps))
        return sinks

    async def _train(self, recorder: Recorder) -> None:
        """Start what the run needs, run the loop, end everything in reverse order."""
        async with AsyncExitStack() as stack:
            # The reward function first: it fails fastest, and a run without rewards is no run.
            await stack.enter_async_context(self.inputs.reward)
            scheduler = make_scheduler(self.cfg.scheduler.type.value, self.run_dir / "logs")
            await stack.enter_async_context(scheduler)
            trainer, *generators = await _start_all(
                scheduler, [self._trainer_spec(), *self._generator_specs()]
            )
            replicas = {
                w.name: await stack.enter_async_context(self._generator(w)) for w in generators
            }
            _report_engine(await replicas[generators[0].name].info())
            saver = await self._saver()
            if saver is not None:
                await stack.enter_async_context(saver)
            loop = self._loop(recorder, trainer, replicas, saver)
            async with _while_alive([trainer, *generators]):
                await loop.run()

    async def evaluate(self) -> EvalResult:
        """Evaluate the model as it was loaded, without training. Needs a validation set."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.inputs.reward)
            scheduler = make_scheduler(self.cfg.scheduler.type.value, self.run_dir)
            await stack.enter_async_context(scheduler)
            generators = await _start_all(scheduler, self._generator_specs())
            replicas = [await stack.enter_async_context(self._generator(w)) for w in generators]
            evaluator = self._evaluator(Router(replicas))
            async with _while_alive(generators):
                return await evaluator.run(PolicyVersion(0))

    def _trainer_spec(self) -> WorkerSpec:
        cfg = self.cfg
        spec = TrainerSpec(
            model_path=cfg.model.path,
            dtype=cfg.model.dtype,
            device=cfg.model.device,
            seed=cfg.seed,
            temperature=cfg.gconfig.temperature,
            max_new_tokens=cfg.gconfig.max_new_tokens,
            total_steps=self.inputs.steps,
            actor=cfg.actor,
            onednn_linears=cfg.model.onednn_linears,
        )
        return WorkerSpec(
            name="trainer",
            target=train_client.TARGET,
            payload=encode(spec),
            threads=cfg.trainer_threads(usable_cores(cfg.model.path)),
        )

    def _generator_specs(self) -> list[WorkerSpec]:
        cfg = self.cfg
        spec = GeneratorSpec(
            model_path=cfg.model.path,
            dtype=cfg.generator.dtype or cfg.model.dtype,
            device=cfg.model.device,
            slots=cfg.generator.slots,
            max_len=self.inputs.max_len,
            onednn_linears=cfg.model.onednn_linears,
        )
        return [
            WorkerSpec(
                name=f"generator-{i}",
                target=generate_client.TARGET,
                payload=encode(spec),
                threads=cfg.generator_threads(usable_cores(cfg.model.path)),
            )
            for i in range(cfg.generator.replicas)
        ]

    def _generator(self, worker: WorkerHandle) -> RemoteGenerator:
        return RemoteGenerator(worker, request_timeout=self.cfg.rollout.request_timeout_seconds)

    async def _saver(self) -> Saver | None:
        c = self.cfg.saver
        if self._schedule(c).is_off and not c.at_end:
            return None
        return await Saver.open(
            mode=SaveMode(self.cfg.saver.mode.value),
            checkpoints_dir=self.run_dir / "checkpoints",
            template_dir=Path(self.cfg.model.path),
            keep_last=c.keep_last,
        )

    def _loop(
        self,
        recorder: Recorder,
        trainer: WorkerHandle,
        replicas: Mapping[str, RemoteGenerator],
        saver: Saver | None,
    ) -> Loop:
        cfg, inputs = self.cfg, self.inputs
        router = Router(list(replicas.values()))
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
        )
        cadence = Cadence(
            evaluate=self._schedule(cfg.evaluator),
            evaluate_at_start=cfg.evaluator.at_start,
            evaluate_at_end=cfg.evaluator.at_end,
            save=self._schedule(cfg.saver),
            save_at_end=cfg.saver.at_end,
        )
        return Loop(
            plan,
            cadence,
            generator=router,
            replicas=replicas,
            trainer=RemoteTrainer(trainer, update_timeout=UPDATE_TIMEOUT_SECONDS),
            workflow=inputs.workflow,
            stream=inputs.stream,
            codec=inputs.codec,
            recorder=recorder,
            evaluator=evaluator,
            saver=saver,
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
            concurrency=self.cfg.max_concurrent_rollouts,
        )

    def _schedule(self, section: SaverConfig | EvaluatorConfig) -> SaveSchedule:
        return SaveSchedule(
            freq_steps=section.freq_steps,
            freq_epochs=section.freq_epochs,
            freq_secs=section.freq_secs,
            now=time.monotonic(),
        )


def free_run_dir(cfg: RunConfig) -> Path:
    """The folder of a run that has a name. Raises ConfigError when something is in it."""
    run_dir = Path(cfg.fileroot) / cfg.experiment_name / (cfg.trial_name or "")
    if cfg.trial_name is not None and run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(
            f"trial_name: {run_dir} holds a run already; choose another trial_name, or leave it "
            "out to have one made from the clock"
        )
    return run_dir


async def evaluate_once(cfg: RunConfig) -> EvalResult:
    """Evaluate ``cfg.model`` on ``cfg.valid_dataset``, with generators only.

    Writes nothing but logs, to a scratch folder.

    Raises:
        ConfigError: there is no validation set.
        RewardError: not one reward could be computed.
    """
    if cfg.valid_dataset is None:
        raise ConfigError("valid_dataset: there is none to evaluate on; add one")
    with tempfile.TemporaryDirectory(prefix="offbeat-eval-") as scratch:
        inputs = prepare(cfg, reward_log=Path(scratch) / "rewards.log")
        trainer = PPOTrainer(cfg, inputs, Path(scratch))
        result = await trainer.evaluate()
    if not result.valid_fraction:
        first = inputs.reward.first_error
        why = f"; the first: {first.reason}" if first is not None else ""
        raise RewardError(f"none of the {result.samples} answers has a valid reward{why}")
    return result


def usable_cores(model_dir: str) -> int:
    """Cores that a process can use well: one for a small model, else all of this machine."""
    weights = sum(f.stat().st_size for f in Path(model_dir).glob("*.safetensors"))
    return 1 if weights < SMALL_MODEL_BYTES else len(os.sched_getaffinity(0))


async def _start_all(scheduler: Scheduler, specs: Sequence[WorkerSpec]) -> list[WorkerHandle]:
    """Start the workers at the same time; in the order of ``specs``."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scheduler.start(spec)) for spec in specs]
    except BaseExceptionGroup as errors:
        raise true_cause(errors) from errors
    return [t.result() for t in tasks]


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


@asynccontextmanager
async def _while_alive(workers: Sequence[WorkerHandle]) -> AsyncIterator[None]:
    """Cancel the block when a worker ends, also one of which the block asks nothing at the moment.

    Raises:
        WorkerError: names each worker that has ended; their deaths explain what the block raised.
    """

    async def watch(worker: WorkerHandle) -> None:
        raise WorkerError(await worker.wait())

    try:
        async with asyncio.TaskGroup() as watching:
            watchers = [watching.create_task(watch(w)) for w in workers]
            yield
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        cause = true_cause(errors)
        if isinstance(cause, OffbeatError):
            await _blame_the_dead(workers, cause)
        raise cause from errors


async def _blame_the_dead(workers: Sequence[WorkerHandle], error: OffbeatError) -> None:
    """Raise WorkerError naming each worker that has ended, if any: that explains ``error``."""

    async def death(worker: WorkerHandle) -> str | None:
        try:
            async with asyncio.timeout(DEATH_NOTICE_SECONDS):
                return await worker.wait()
        except TimeoutError:
            return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(death(w)) for w in workers]
    deaths = [d for t in tasks if (d := t.result()) is not None]
    if deaths:
        raise WorkerError("; ".join(deaths)) from error
