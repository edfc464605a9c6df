"""``offbeat eval``: score a model without training it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import Config, Overrides

if TYPE_CHECKING:
    from offbeat.pipeline.evaluate import EvalResult


def evaluate(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Model folder to evaluate in place of model.path.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model once on the configuration's valid_dataset."""
    import asyncio

    from offbeat.config import load
    from offbeat.pipeline.run import evaluate_once

    replaced = [f"model.path={checkpoint}"] if checkpoint is not None else []
    cfg = load(config, [*(overrides or []), *replaced])
    _print_eval(asyncio.run(evaluate_once(cfg)), as_json)


def _print_eval(result: EvalResult, as_json: bool) -> None:
    import json

    metrics = {name: value for name, value in result.metrics().items() if name != "eval/version"}
    if as_json:
        counts = {"eval/prompts": result.prompts, "eval/skipped": result.skipped}
        typer.echo(json.dumps({**metrics, **counts}, allow_nan=False))
        return
    for name, value in metrics.items():
        typer.echo(f"{name:<28} {value:.4g}")
