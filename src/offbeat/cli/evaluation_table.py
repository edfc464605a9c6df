"""The scores of an evaluation as a person reads them: one row for each data set."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.table import Table

from offbeat.pipeline.estimators import Estimate
from offbeat.pipeline.evaluation_scores import DatasetScores, Evaluation


def caption(result: Evaluation) -> str:
    """What was evaluated, and how its answers were drawn."""
    greedy = result.temperature == 0
    how = "greedy" if greedy else f"temperature {result.temperature:g}"
    number = "1 answer" if result.samples == 1 else f"{result.samples} answers"
    return f"{result.model}: {number} to each prompt, {how}, seed {result.seed}"


def table(result: Evaluation, *, boxed: bool) -> Table:
    """The scores; without a box the columns are separated by blanks alone."""
    shape = box.SIMPLE if boxed else None
    grid = Table(box=shape, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    ks = sorted({k for scores in result.datasets.values() for k in scores.pass_at_k})
    names = ["prompts", "answers", f"avg@{result.samples}", *(f"pass@{k}" for k in ks)]
    grid.add_column("data set", no_wrap=True)
    for name in (*names, "length", "truncated", "invalid", "skipped"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, scores in result.datasets.items():
        grid.add_row(name, *_cells(scores, ks))
    return grid


def _cells(scores: DatasetScores, ks: list[int]) -> Iterator[str]:
    yield str(scores.prompts)
    yield str(scores.answers)
    yield _estimate(scores.average)
    for k in ks:
        yield _estimate(scores.pass_at_k[k])
    yield _number(scores.length_tokens, ".1f")
    yield _number(scores.truncated_fraction, ".1%")
    yield str(scores.invalid_rewards)
    yield str(scores.skipped_prompts)


def _estimate(found: Estimate) -> str:
    return f"{_number(found.mean, '.3f')} ± {_number(found.standard_error, '.3f')}"


def _number(value: float, pattern: str) -> str:
    return "-" if math.isnan(value) else format(value, pattern)


def notes(result: Evaluation) -> Iterator[str]:
    """What the table does not say."""
    for name, scores in result.datasets.items():
        if scores.reward_parts:
            parts = ", ".join(f"{part} {value:.4g}" for part, value in scores.reward_parts.items())
            yield f"{name}: means of the reward's parts: {parts}"
        for k, found in scores.pass_at_k.items():
            if found.prompts < scores.prompts:
                yield (
                    f"{name}: pass@{k} is over the {found.prompts} of {scores.prompts} prompts "
                    f"that have {k} valid rewards"
                )
    yield "±: standard error over prompts (analytic: sample standard deviation / √prompts)"
    if result.threshold is not None:
        yield f"pass@k: unbiased estimate; a reward of {result.threshold:g} or more is a pass"
    yield f"{result.seconds:.1f} s"
