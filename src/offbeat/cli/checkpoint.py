"""``offbeat checkpoint``: what a run has saved, and whether it still is what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.arguments import RUN_HELP, Fileroot, Run
from offbeat.cli.look import AsJson

DAMAGED = 1
"""Exit code when a folder is not what was saved."""

app = typer.Typer(help="List and verify what a run has saved.", no_args_is_help=True)


@app.command("ls")
def ls(
    run: Run = "latest",
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Of snapshots also the optimizer step, open groups, threads and torch."
        ),
    ] = False,
    as_json: AsJson = False,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """List the model folders and snapshots of a run."""
    from offbeat.checkpoint import inspection
    from offbeat.observe.find import find_run
    from offbeat.observe.show import as_json as json_text

    found = inspection.list_saved(find_run(run, fileroot))
    if as_json:
        typer.echo(json_text(inspection.inventory_content(found)))
    else:
        typer.echo(inspection.inventory_text(found, long=long))


@app.command("verify")
def verify(
    target: Annotated[
        str,
        typer.Argument(metavar="[RUN|FOLDER]", help=f"{RUN_HELP} Or one model folder or snapshot."),
    ] = "latest",
    as_json: AsJson = False,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Read every file and compare it with what was saved; exit code 1 when one differs."""
    from offbeat.checkpoint import inspection
    from offbeat.observe.find import find_run
    from offbeat.observe.show import as_json as json_text

    folder = Path(target)
    if inspection.is_saved_folder(folder):
        folders = [folder]
    else:
        folders = inspection.saved_folders(find_run(target, fileroot))
    verdicts = []
    for verdict in inspection.check_all(folders):
        verdicts.append(verdict)
        if not as_json:
            typer.echo(inspection.verdict_line(verdict))
    if as_json:
        typer.echo(json_text([inspection.verdict_content(verdict) for verdict in verdicts]))
    else:
        for line in inspection.closing_lines(verdicts):
            typer.echo(line)
    if any(verdict.state is not inspection.State.OK for verdict in verdicts):
        raise typer.Exit(DAMAGED)
