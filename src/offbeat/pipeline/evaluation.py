"""An evaluation by itself: one model, any number of data sets, generators and rewards only.

Consumes a target and options; produces an ``Evaluation``. Waits for what an evaluation in a run
waits for, and is unblocked by the same deadlines. Writes nothing but logs, to a scratch folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from offbeat.config import DatasetConfig, RunConfig, from_mapping, load
from offbeat.data.stream import PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import ConfigError, DataError, RewardError
from offbeat.generate.router import Router
from offbeat.launch.alive import while_alive
from offbeat.launch.scheduler import make_scheduler
from offbeat.pipeline.evaluate import Answers, Evaluator
from offbeat.pipeline.evaluation_scores import Evaluation
from offbeat.pipeline.evaluation_target import Target
from offbeat.pipeline.preflight import (
    open_reward,
    open_stream,
    open_text,
    open_workflow,
    sampling_plan,
)
from offbeat.pipeline.workers import generator_specs, open_generator, start_all, usable_cores
from offbeat.protocols import Generator, Workflow
from offbeat.rollout.reward import AsyncRewardWrapper
from offbeat.types import PolicyVersion

VALID = "valid_dataset"
"""Name of the data set that a configuration has."""

OnProgress = Callable[[str, int, int], None]
"""Called with a data set's name, the prompts that are through, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """What a person asks for beside the target; None and empty leave it to the configuration.

    ``data`` maps names to paths as in ``train_dataset.path``; ``limit`` is rows of each; ``ks`` are
    the k of pass@k, for which a reward of ``threshold`` or more is a pass.
    """

    overrides: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    reward: str | None = None
    samples: int | None = None
    temperature: float | None = None
    limit: int | None = None
    ks: tuple[int, ...] = ()
    threshold: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What will be evaluated, resolved: ``cfg`` has the model, the sampling and the reward."""

    cfg: RunConfig
    datasets: Mapping[str, DatasetConfig]
    ks: tuple[int, ...]
    threshold: float


def plan_evaluation(target: Target, options: EvaluationOptions) -> EvaluationPlan:
    """Resolve what ``options`` leave open.

    Raises:
        ConfigError: no data, no reward, or pass@k with fewer than k answers.
    """
    cfg = _configuration(target, options)
    n = cfg.eval_gconfig.n_samples
    if options.ks and max(options.ks) > n:
        raise ConfigError(
            f"--k {max(options.ks)}: pass@{max(options.ks)} needs that many answers to each "
            f"prompt, and there {'is' if n == 1 else 'are'} {n}; add --samples {max(options.ks)}"
        )
    return EvaluationPlan(
        cfg=cfg, datasets=_datasets(cfg, options), ks=options.ks, threshold=options.threshold
    )


def _configuration(target: Target, options: EvaluationOptions) -> RunConfig:
    overrides = list(options.overrides)
    if target.config is not None and target.model is not None:
        overrides.append(f"model.path={target.model}")
    if target.config is not None and options.reward is not None:
        overrides.append(f"rollout.reward_fn={options.reward}")
    cfg = _read(target, options, overrides)
    temperature = options.temperature
    several = options.samples is not None and options.samples > 1
    if temperature is None and several and cfg.eval_gconfig.temperature == 0:
        temperature = cfg.gconfig.temperature  # greedy answers would all be the same
    sampling = {"n_samples": options.samples, "temperature": temperature}
    given = [f"eval_gconfig.{k}={v}" for k, v in sampling.items() if v is not None]
    return _read(target, options, [*overrides, *given]) if given else cfg


def _read(target: Target, options: EvaluationOptions, overrides: Sequence[str]) -> RunConfig:
    if target.config is not None:
        return load(target.config, overrides)
    if not options.data or options.reward is None:
        raise ConfigError(
            f"{target.model} is a model without a configuration: say what to ask it with --data "
            "NAME=PATH, and what scores the answers with --reward module:function"
        )
    dataset = {"path": next(iter(options.data.values()))}
    mapping = {
        "model": {"path": str(target.model)},
        "train_dataset": dataset,
        VALID: dataset,
        "rollout": {"reward_fn": options.reward},
    }
    return from_mapping(mapping, f"evaluation of {target.model}", Path.cwd(), overrides)


def _datasets(cfg: RunConfig, options: EvaluationOptions) -> dict[str, DatasetConfig]:
    if not options.data and cfg.valid_dataset is None:
        raise ConfigError(
            "valid_dataset: there is none to evaluate on; add one, or name data with --data "
            "NAME=PATH"
        )
    like = cfg.valid_dataset or cfg.train_dataset
    if options.data:
        datasets = {
            name: replace(like, path=path, args={}, limit=None)
            for name, path in options.data.items()
        }
    else:
        datasets = {VALID: like}
    if options.limit is not None:
        datasets = {n: replace(d, limit=options.limit) for n, d in datasets.items()}
    return datasets


async def evaluate(
    plan: EvaluationPlan, on_progress: OnProgress = lambda name, done, total: None
) -> Evaluation:
    """Ask every prompt of every data set, one data set after the other.

    Raises:
        ConfigError, DataError, ModelError: what cannot be used, and the way out.
        RewardError: not one reward could be computed.
    """
    codec, max_len = open_text(plan.cfg)
    streams = {
        name: _open_stream(plan.cfg, name, section, codec, max_len)
        for name, section in plan.datasets.items()
    }
    with tempfile.TemporaryDirectory(prefix="offbeat-eval-") as scratch:
        reward = open_reward(plan.cfg, Path(scratch) / "rewards.log")
        workflow = open_workflow(plan.cfg, reward)
        async with reward, _open_generator(plan.cfg, max_len, Path(scratch)) as generator:
            answers: dict[str, Answers] = {}
            for name, stream in streams.items():
                evaluator = _evaluator(plan.cfg, name, stream, generator, workflow, codec)
                answers[name] = await evaluator.answers(
                    PolicyVersion(0), partial(on_progress, name)
                )
        _need_a_reward(answers, reward)
    paths = {name: section.path for name, section in plan.datasets.items()}
    return Evaluation.of(plan.cfg, paths, answers, ks=plan.ks, threshold=plan.threshold)


def _open_stream(
    cfg: RunConfig, name: str, section: DatasetConfig, codec: TextCodec, max_len: int
) -> PromptStream:
    key = VALID if cfg.valid_dataset is not None else "train_dataset"
    try:
        return open_stream(cfg, section, cfg.eval_gconfig, codec, max_len, key)
    except DataError as exc:
        raise DataError(str(exc) if name == VALID else f"--data {name}: {exc}") from exc


def _evaluator(
    cfg: RunConfig,
    name: str,
    stream: PromptStream,
    generator: Generator,
    workflow: Workflow,
    codec: TextCodec,
) -> Evaluator:
    plan = sampling_plan(cfg, cfg.eval_gconfig, "eval")
    return Evaluator(
        generator=generator,
        workflow=workflow,
        stream=stream,
        codec=codec,
        plan=plan,
        concurrency=cfg.concurrent_prompts(plan.n_samples),
        name=name,
    )


@asynccontextmanager
async def _open_generator(cfg: RunConfig, max_len: int, logs: Path) -> AsyncIterator[Router]:
    """The generators of ``cfg`` as one; they have the whole machine, for nothing is trained."""
    cores = usable_cores(cfg.model.path)
    threads = cfg.generator.threads or max(1, cores // cfg.generator.replicas)
    async with AsyncExitStack() as stack:
        scheduler = make_scheduler(cfg.scheduler.type.value, logs)
        await stack.enter_async_context(scheduler)
        workers = await start_all(scheduler, generator_specs(cfg, max_len, threads))
        replicas = [await stack.enter_async_context(open_generator(cfg, w)) for w in workers]
        async with while_alive(workers):
            yield Router(replicas)


def _need_a_reward(answers: Mapping[str, Answers], reward: AsyncRewardWrapper) -> None:
    if any(item.rewards for found in answers.values() for item in found.items):
        return
    count = sum(len(item.rollouts) for found in answers.values() for item in found.items)
    first = reward.first_error
    why = f"; the first: {first.reason}" if first is not None else ""
    raise RewardError(f"none of the {count} answers has a valid reward{why}")
