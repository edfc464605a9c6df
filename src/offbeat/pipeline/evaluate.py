"""Evaluation: every validation row exactly once, on one policy version.

Consumes the validation set; produces an ``EvalResult``. The loop promises that no commit happens
while it runs; this checks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.data.stream import EVALUATION_GROUP, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import DataError, PromptTooLong, RolloutError, WeightSyncError, true_cause
from offbeat.pipeline.episodes import GroupEngine, SamplingPlan, run_workflow
from offbeat.protocols import Generator, Workflow
from offbeat.types import PolicyVersion, Prompt, Rollout, Scored, StopReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one version on the whole validation set.

    ``reward_mean`` is over the valid rewards; ``parts`` are the means of their named parts.
    ``samples`` are the answers; a row whose workflow failed has none, and counts as invalid in
    ``valid_fraction``. ``skipped`` rows were too long for the context.
    """

    version: PolicyVersion
    prompts: int
    samples: int
    skipped: int
    reward_mean: float
    valid_fraction: float
    truncated_fraction: float
    length_tokens: float
    parts: Mapping[str, float]
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The result under its metric names."""
        return {
            "eval/reward_mean": self.reward_mean,
            "eval/valid_fraction": self.valid_fraction,
            "eval/truncated_fraction": self.truncated_fraction,
            "eval/length_tokens": self.length_tokens,
            "eval/samples_count": float(self.samples),
            "eval/seconds": self.seconds,
            "eval/version": float(self.version),
            **{f"eval_part/{name}": value for name, value in self.parts.items()},
        }


class Evaluator:
    """Runs the workflow over the validation set.

    Args:
        concurrency: prompts that run at the same time.
    """

    def __init__(
        self,
        *,
        generator: Generator,
        workflow: Workflow,
        stream: PromptStream,
        codec: TextCodec,
        plan: SamplingPlan,
        concurrency: int,
    ) -> None:
        self._generator = generator
        self._workflow = workflow
        self._stream = stream
        self._codec = codec
        self._plan = plan
        self._concurrency = concurrency

    async def run(self, version: PolicyVersion) -> EvalResult:
        """Evaluate ``version``, which must stay live until this returns.

        Raises:
            WeightSyncError: a token was written by another version.
            DataError: every row is too long.
            RolloutError: no row could be evaluated; it is the first row's error.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        prompts, skipped = self._prompts()
        gate = asyncio.Semaphore(self._concurrency)

        async def one(prompt: Prompt) -> Sequence[Rollout] | RolloutError:
            async with gate:
                return await self._episode(prompt, version)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(p)) for p in prompts]
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors
        outcomes = [t.result() for t in tasks]
        failed = [o for o in outcomes if isinstance(o, RolloutError)]
        if len(failed) == len(outcomes):
            raise failed[0]
        rollouts = [r for o in outcomes if not isinstance(o, RolloutError) for r in o]
        return _result(
            version=version,
            prompts=len(prompts),
            skipped=skipped,
            asked=len(prompts) * self._plan.n_samples,
            rollouts=rollouts,
            seconds=loop.time() - started,
        )

    def _prompts(self) -> tuple[list[Prompt], int]:
        prompts: list[Prompt] = []
        for row in range(len(self._stream)):
            try:
                prompts.append(self._stream.evaluation_prompt(row))
            except PromptTooLong:
                continue
        if not prompts:
            raise DataError(
                f"all {len(self._stream)} rows of valid_dataset are too long for the context"
            )
        return prompts, len(self._stream) - len(prompts)

    async def _episode(
        self, prompt: Prompt, version: PolicyVersion
    ) -> Sequence[Rollout] | RolloutError:
        """The answers to one row, or why there are none: one bad row does not end a run."""
        where = f"validation row {prompt.row + 1}"
        engine = GroupEngine(
            self._generator,
            self._codec,
            self._plan,
            group_id=EVALUATION_GROUP,
            key=prompt.row,
            tag=f"eval-{version}",
        )
        try:
            rollouts = await run_workflow(self._workflow, engine, prompt, where)
        except RolloutError as exc:
            log.warning("%s has no answer: %s", where, exc)
            return exc
        for turn in (t for r in rollouts for t in r.turns):
            others = set(turn.completion.versions.tolist()) - {int(version)}
            if others:
                raise WeightSyncError(
                    f"{where}: tokens of versions {sorted(others)} in an evaluation of version "
                    f"{version}"
                )
        return rollouts


def _result(
    *,
    version: PolicyVersion,
    prompts: int,
    skipped: int,
    asked: int,
    rollouts: Sequence[Rollout],
    seconds: float,
) -> EvalResult:
    """``asked`` answers were wanted, ``rollouts`` came."""
    scored = [r.reward for r in rollouts if isinstance(r.reward, Scored)]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for reward in scored:
        for name, value in reward.parts.items():
            parts[name].append(value)
    last = [r.turns[-1].completion for r in rollouts]
    lengths = [sum(len(t.completion.token_ids) for t in r.turns) for r in rollouts]
    return EvalResult(
        version=version,
        prompts=prompts,
        samples=len(rollouts),
        skipped=skipped,
        reward_mean=_mean([r.value for r in scored]),
        valid_fraction=len(scored) / asked,
        truncated_fraction=_mean([float(c.stop_reason is StopReason.LENGTH) for c in last]),
        length_tokens=_mean([float(x) for x in lengths]),
        parts={name: _mean(values) for name, values in parts.items()},
        seconds=seconds,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
