"""Evaluation: every validation row exactly once, on one policy version.

Consumes the validation set; produces an ``EvalResult``. The loop promises that no commit happens while it runs; this checks it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.data.stream import EVALUATION_GROUP, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import (
    DataError,
    PromptTooLong,
    RolloutError,
    WeightSyncError,
    boundary,
    true_cause,
)
from offbeat.pipeline.episodes import GroupEngine, SamplingPlan
from offbeat.protocols import Generator, Workflow
from offbeat.types import PolicyVersion, Prompt, Rollout, Scored, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one version on the whole validation set.

    ``reward_mean`` is over the valid rewards; ``parts`` are the means of their named parts. ``skipped`` rows were too long for the
    context.
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
            RolloutError: no row could be evaluated.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        prompts, skipped = self._prompts()
        gate = asyncio.Semaphore(self._concurrency)

        async def one(prompt: Prompt) -> Sequence[Rollout]:
            async with gate:
                return await self._episode(prompt, version)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(p)) for p in prompts]
        except BaseExceptionGroup as errors:
            raise true_cause(errors) from errors
        rollouts = [r for t in tasks for r in t.result()]
        return _result(version, len(prompts), skipped, rollouts, loop.time() - started)

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

    async def _episode(self, prompt: Prompt, version: PolicyVersion) -> Sequence[Rollout]:
        engine = GroupEngine(
            self._generator,
            self._codec,
            self._plan,
            group_id=EVALUATION_GROUP,
            key=prompt.row,
            tag=f"eval-{version}",
        )
        with boundary(RolloutError, f"workflow, validation row {prompt.row + 1}"):
            rollouts = await self._workflow.arun_episode(engine, prompt)
        for rollout in rollouts:
            for turn in rollout.turns:
                others = set(turn.completion.versions.tolist()) - {int(version)}
                if others:
                    raise WeightSyncError(
                        f"validation row {prompt.row + 1}: tokens of versions {sorted(others)} in an evaluation of "
                        f"version {version}"
                    )
        return rollouts


def _result(
    version: PolicyVersion,
    prompts: int,
    skipped: int,
    rollouts: Sequence[Rollout],
    seconds: float,
) -> EvalResult:
    scored = [r.reward for r in rollouts if isinstance(r.reward, Scored)]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for reward in scored:
        for name, value in reward.parts.items():
            parts[name].append(value)
    last = [r.turns[-1].completion for r in rollouts]
    lengths = [sum(len(t.completion.token_ids) for t in r.turns) for r in rollouts]
    n = max(len(rollouts), 1)
    return EvalResult(
        version=version,
        prompts=prompts,
        samples=len(rollouts),
        skipped=skipped,
        reward_mean=_mean([r.value for r in scored]),
        valid_fraction=len(scored) / n,
        truncated_fraction=sum(c.stop_reason is StopReason.LENGTH for c in last) / n,
        length_tokens=_mean([float(x) for x in lengths]),
        parts={name: _mean(values) for name, values in parts.items()},
        seconds=seconds,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
