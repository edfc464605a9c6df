"""``offbeat show``: a run, whether it goes on, ended or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.arguments import Fileroot


def show(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its name below --fileroot, or: latest.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    samples: Annotated[int, typer.Option(min=0, help="Print this many rollouts of --step.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the samples; default the newest.")
    ] = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Look at a run: running, finished or failed."""
    from offbeat.observe import show as view

    path = view.find_run(run, fileroot)
    found = view.load_run(path)
    rows = view.read_samples(path, samples, step) if samples else ()
    if as_json:
        typer.echo(view.run_json(found, rows))
        return
    typer.echo(view.run_text(found))
    if rows:
        typer.echo("\n" + view.samples_text(rows))
