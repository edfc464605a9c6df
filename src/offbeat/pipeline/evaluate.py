"""Evaluation: every row of a data set exactly once, on one policy version.

Consumes the prompts of the data set; produces their answers, and an ``EvalResult`` of them. The
loop promises that no commit happens while it runs; this checks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.data.stream import EVALUATION_GROUP, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.errors import DataError, PromptTooLong, RolloutError, WeightSyncError
from offbeat.pipeline.episodes import EVALUATING, GroupEngine, SamplingPlan, run_workflow
from offbeat.pipeline.task_runner import AsyncTaskRunner
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt with its answers, or with the ``error`` for which it has none."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...] = ()
    error: RolloutError | None = None

    @property
    def rewards(self) -> list[float]:
        """The valid rewards."""
        return [r.reward.value for r in self.rollouts if isinstance(r.reward, Scored)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one version answered to a data set; ``n_samples`` answers were asked of each prompt."""

    version: PolicyVersion
    n_samples: int
    items: tuple[Answered, ...]
    skipped: int
    seconds: float

    @property
    def asked(self) -> int:
        """Answers that there should be."""
        return len(self.items) * self.n_samples

    def result(self) -> EvalResult:
        """The scores over all answers."""
        rollouts = [r for item in self.items for r in item.rollouts]
        scored = [r.reward for r in rollouts if isinstance(r.reward, Scored)]
        last = [r.turns[-1].completion for r in rollouts]
        return EvalResult(
            version=self.version,
            prompts=len(self.items),
            samples=len(rollouts),
            skipped=self.skipped,
            reward_mean=_mean([r.value for r in scored]),
            valid_fraction=len(scored) / self.asked,
            truncated_fraction=_mean([float(c.stop_reason is StopReason.LENGTH) for c in last]),
            length_tokens=_mean([float(tokens_of(r)) for r in rollouts]),
            parts=_part_means(scored),
            seconds=self.seconds,
        )


class Evaluator:
    """Runs the workflow over a data set.

    Args:
        concurrency: prompts that run at the same time.
        name: what errors call the data set.
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
        name: str = "valid_dataset",
    ) -> None:
        self._generator = generator
        self._workflow = workflow
        self._stream = stream
        self._codec = codec
        self._plan = plan
        self._concurrency = concurrency
        self._name = name
        self._engines: set[GroupEngine] = set()
        self._asked = 0
        self.answered = 0
        """Rows that are through, of the evaluation that runs."""

    @property
    def is_generating(self) -> bool:
        """Whether a request has no answer yet; otherwise rewards or workflows are at work."""
        return any(engine.open_requests for engine in self._engines)

    @property
    def progress(self) -> str:
        """How far it is, for a person."""
        return f"the evaluation: {self.answered} of {self._asked} rows are through"

    async def run(self, version: PolicyVersion) -> EvalResult:
        """Scores of ``version``, which must stay live until this returns. Raises as ``answers``."""
        return (await self.answers(version)).result()

    async def answers(
        self,
        version: PolicyVersion,
        on_answered: Callable[[int, int], None] = lambda done, total: None,
    ) -> Answers:
        """Answers of ``version``, which must stay live until this returns.

        Args:
            on_answered: called after each prompt with how many are through, and how many there are.

        Raises:
            WeightSyncError: a token was written by another version.
            DataError: every row is too long.
            RolloutError: no row could be evaluated; it is the first row's error.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        prompts, skipped = self._prompts()
        self._asked, self.answered = len(prompts), 0

        async def one(prompt: Prompt) -> Answered:
            answered = await self._episode(prompt, version)
            self.answered += 1
            on_answered(self.answered, len(prompts))
            return answered

        async with AsyncTaskRunner(self._concurrency) as runner:
            items = tuple(await runner.wait(*(runner.submit(one, p) for p in prompts)))
        failed = [item.error for item in items if item.error is not None]
        if len(failed) == len(items):
            raise failed[0]
        return Answers(
            version=version,
            n_samples=self._plan.n_samples,
            items=items,
            skipped=skipped,
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
                f"all {len(self._stream)} rows of {self._name} are too long for the context"
            )
        return prompts, len(self._stream) - len(prompts)

    async def _episode(self, prompt: Prompt, version: PolicyVersion) -> Answered:
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
        self._engines.add(engine)
        evaluating = EVALUATING.set(True)
        try:
            rollouts = await run_workflow(self._workflow, engine, prompt, where)
        except RolloutError as exc:
            log.warning("%s has no answer: %s", where, exc)
            return Answered(prompt=prompt, error=exc)
        finally:
            EVALUATING.reset(evaluating)
            self._engines.remove(engine)
        for turn in (t for r in rollouts for t in r.turns):
            others = set(turn.completion.versions.tolist()) - {int(version)}
            if others:
                raise WeightSyncError(
                    f"{where}: tokens of versions {sorted(others)} in an evaluation of version "
                    f"{version}"
                )
        return Answered(prompt=prompt, rollouts=rollouts)


def tokens_of(rollout: Rollout) -> int:
    """Tokens that the policy wrote, over all turns."""
    return sum(len(turn.completion.token_ids) for turn in rollout.turns)


def _part_means(scored: Sequence[Scored]) -> dict[str, float]:
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for reward in scored:
        for name, value in reward.parts.items():
            parts[name].append(value)
    return {name: _mean(values) for name, values in parts.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
