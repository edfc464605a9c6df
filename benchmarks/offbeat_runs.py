"""``offbeat train`` as a user runs it, in a process of its own, and what its folder then says.

Consumes a recipe and overrides; produces an `OffbeatRun`. Reads metrics.jsonl, spans.jsonl and
rollouts/ through offbeat's own readers. Knows no peer and no formula of any benchmark.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from processes import Finished, clean_environment, run_watched

if TYPE_CHECKING:
    from offbeat.config import RunConfig
    from offbeat.observe.metrics import StepRecord
    from offbeat.observe.spans import Span

TINY_MODEL = (
    *("--characters", "0123456789abcdef=", "--hidden", "64", "--heads", "4", "--head-dim", "32"),
    *("--intermediate", "64", "--max-len", "64", "--rope-theta", "30"),
    *("--initializer-range", "0.12"),
)
"""`offbeat model init` options of recipes/reverse.yaml's model."""

NO_EVALUATION = ("evaluator.at_start=false", "evaluator.at_end=false", "evaluator.freq_steps=0")
"""Overrides that leave a run without evaluation."""

NO_SAVE = ("saver.at_end=false",)
"""Overrides that leave a run without checkpoints."""


def init_model(folder: Path, options: Sequence[str]) -> Path:
    """A model with random weights in ``folder``."""
    run_watched(
        [sys.executable, "-m", "offbeat", "model", "init", str(folder), *options],
        cores=_all_cores(),
        log=folder.with_suffix(".log"),
        env=clean_environment(),
    )
    return folder


def _all_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def resolved(recipe: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration that `train` would run."""
    import offbeat

    return offbeat.load(recipe, list(overrides))


def train(
    recipe: Path, overrides: Sequence[str], *, fileroot: Path, trial: str, cores: frozenset[int]
) -> OffbeatRun:
    """``offbeat train RECIPE overrides`` on ``cores``, run folders below ``fileroot``.

    Raises:
        ProcessFailed: the run failed; the message has the end of its output.
    """
    own = [*overrides, f"fileroot={fileroot}", f"trial_name={trial}"]
    process = run_watched(
        [sys.executable, "-m", "offbeat", "train", str(recipe), *own],
        cores=cores,
        log=fileroot / f"{trial}.log",
        env=clean_environment(),
    )
    cfg = resolved(recipe, own)
    return OffbeatRun(
        cfg=cfg, run_dir=fileroot / cfg.experiment_name / trial, process=process, cores=len(cores)
    )


@dataclass(frozen=True, kw_only=True)
class OffbeatRun:
    """A completed run. Times are CLOCK_MONOTONIC seconds, steps count from 1."""

    cfg: RunConfig
    run_dir: Path
    process: Finished
    cores: int

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Everything in spans.jsonl."""
        from offbeat.observe.spans import read_spans

        return read_spans(self.run_dir / "spans.jsonl")

    @cached_property
    def records(self) -> tuple[StepRecord, ...]:
        """The trained steps of metrics.jsonl."""
        from offbeat.observe.sinks import read_metrics

        return tuple(r for r in read_metrics(self.run_dir / "metrics.jsonl") if r.step > 0)

    @property
    def step_ends(self) -> list[float]:
        """When each step's weights were live on the generator: the end of its commit."""
        return [s.end for s in self.spans if s.name == "commit"]

    @property
    def rewards(self) -> list[float]:
        """Mean training reward of each step."""
        return [r.metrics["reward/mean"] for r in self.records]

    @property
    def lengths(self) -> list[float]:
        """Mean answer length of each step, tokens."""
        return [r.metrics["generate/length_tokens"] for r in self.records]

    def answer_lengths_of(self, steps: Container[int]) -> list[int]:
        """Tokens of every answer that ``steps`` trained on."""
        return [int(row.loss_mask.sum()) for row in self._rows if row.step in steps]

    def makespans(self, steps: Iterable[int]) -> list[float]:
        """Seconds from the first request of each step's batch to its last request's or reward's
        end.
        """
        starts: defaultdict[int, list[float]] = defaultdict(list)
        ends: defaultdict[int, list[float]] = defaultdict(list)
        step_of = {g: step for step, groups in self.groups_of_step.items() for g in groups}
        for span in self.spans:
            if span.name in ("generate", "reward") and span.group_id in step_of:
                step = step_of[span.group_id]
                ends[step].append(span.end)
                if span.name == "generate":
                    starts[step].append(span.start)
        return [max(ends[step]) - min(starts[step]) for step in steps]

    @cached_property
    def prompt_tokens_mean(self) -> float:
        """Mean prompt length of the trained answers, tokens."""
        return statistics.fmean(len(row.prompt_ids) for row in self._rows)

    @cached_property
    def groups_of_step(self) -> Mapping[int, frozenset[int]]:
        """Ids of the groups that each step trained on."""
        groups: defaultdict[int, set[int]] = defaultdict(set)
        for row in self._rows:
            groups[row.step].add(row.group_id)
        return {step: frozenset(ids) for step, ids in groups.items()}

    @cached_property
    def _rows(self) -> tuple:
        from offbeat.observe.rollouts import read_rollouts

        return tuple(
            row for record in self.records for row in read_rollouts(self.run_dir, record.step)
        )

    @property
    def threads(self) -> dict[str, int]:
        """See `threads_of`."""
        return threads_of(self.cfg, self.cores)


def threads_of(cfg: RunConfig, cores: int) -> dict[str, int]:
    """CPU threads of the trainer and of one generator that a run of ``cfg`` on ``cores`` takes."""
    from offbeat.pipeline.workers import usable_cores

    usable = min(cores, usable_cores(cfg.model.path))
    return {
        "trainer": cfg.trainer_threads(usable),
        "generator": cfg.generator_threads(usable),
        "generators": cfg.generator.replicas,
    }
