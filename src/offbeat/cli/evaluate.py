"""``offbeat eval``: score a model without training it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import OVERRIDES, Fileroot
from offbeat.errors import ConfigError, OffbeatError, boundary
from offbeat.launch import interrupts

if TYPE_CHECKING:
    from offbeat.pipeline.evaluation_scores import Evaluation

PIPED_COLUMNS = 240
"""Width of the table where there is no terminal: lines are for a program and never folded."""


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A configuration (its model and valid_dataset); a run's folder, name or latest "
            "(its configuration and newest checkpoint); or a model's folder or name on the Hugging "
            "Face hub (then --data and --reward are needed).",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=OVERRIDES, help="Overrides, for example eval_gconfig.max_new_tokens=64."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Data set in place of valid_dataset, PATH as in train_dataset.path; repeatable. "
            "The other keys are those of valid_dataset, or else train_dataset, without args and "
            "limit.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="module:function", help="Reward in place of rollout.reward_fn."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Answers to each prompt; default eval_gconfig.n_samples."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k", metavar="K[,K]...", help="Show pass@k for these k; needs as many --samples."
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="A reward of this or more counts as a pass for pass@k; default 1.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Default eval_gconfig.temperature; where that is 0 (greedy) and there are several "
            "--samples, gconfig.temperature.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many rows of each data set.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="The run's checkpoint of this step; default the newest."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Model folder to evaluate in place of model.path.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the results and every prompt's rewards."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write every prompt, answer and reward."),
    ] = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Evaluate a model once: mean reward and pass@k on each data set."""
    from offbeat.pipeline import evaluation
    from offbeat.pipeline.evaluation_target import find_target

    if threshold is not None and k is None:
        raise ConfigError(f"--threshold {threshold:g} has no effect without --k")
    options = evaluation.EvaluationOptions(
        overrides=overrides or [],
        data=_datasets(data or []),
        reward=reward,
        samples=samples,
        temperature=temperature,
        limit=limit,
        ks=_ks(k) if k is not None else (),
        threshold=1.0 if threshold is None else threshold,
    )
    _check_writable(out, answers)
    found = find_target(target, fileroot=fileroot, step=step, checkpoint=checkpoint)
    plan = evaluation.plan_evaluation(found, options)
    with _progress() as on_progress:
        result = interrupts.run(evaluation.evaluate(plan, on_progress))
    _write(result, out, answers)
    _print(result, as_json)


def _datasets(given: Sequence[str]) -> dict[str, str]:
    """Paths by name."""
    datasets: dict[str, str] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not path or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"--data {text}: write NAME=PATH, NAME of letters, digits, '.', '_' and '-', for "
                "example --data gsm8k=test.jsonl"
            )
        if name in datasets:
            raise ConfigError(f"--data {text}: {name} is already {datasets[name]}")
        datasets[name] = path
    return datasets


def _ks(text: str) -> tuple[int, ...]:
    """The k of pass@k, smallest first."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ConfigError(f"--k {text}: write whole numbers of at least 1, for example --k 1,4,8")
    return tuple(sorted({int(part) for part in text.split(",")}))


def _check_writable(*files: Path | None) -> None:
    """A file that cannot be written is found before the work, not after it."""
    for file in filter(None, files):
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file in it")
        with boundary(ConfigError, f"writing {file}"):
            file.parent.mkdir(parents=True, exist_ok=True)


def _write(result: Evaluation, out: Path | None, answers: Path | None) -> None:
    for file, write in ((out, result.write), (answers, result.write_answers)):
        if file is not None:
            with boundary(OffbeatError, f"writing {file}"):
                write(file)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each data set on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks = {}

    def advance(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=total)
        bars.update(tasks[name], completed=done)

    with bars:
        yield advance


def _print(result: Evaluation, as_json: bool) -> None:
    for name, scores in result.datasets.items():
        if scores.invalid_rewards:
            typer.echo(
                f"warning: {name}: {scores.invalid_rewards} of "
                f"{scores.valid_rewards + scores.invalid_rewards} rewards are invalid and left "
                f"out; the first: {result.first_invalid(name)}",
                err=True,
            )
    if as_json:
        typer.echo(result.to_json(), nl=False)
        return
    from rich.console import Console

    from offbeat.cli.evaluation_table import caption, notes, table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_COLUMNS)
    typer.echo(caption(result))
    console.print(table(result, boxed=console.is_terminal))
    for line in notes(result):
        typer.echo(line)
