"""The command line: verbs, exit codes, and errors written for a person.

Exit codes: 0 all went well · 1 the run failed · 2 usage, configuration, data or model cannot be
used · 130 interrupted. Heavy modules are imported inside the commands, so that ``--help`` and
mistakes answer at once.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from offbeat.cli import configuration, evaluate, look, model, timeline, train
from offbeat.errors import ConfigError, DataError, ModelError, OffbeatError, boundary

UNUSABLE = (ConfigError, DataError, ModelError)
INTERRUPTED = 130

app = typer.Typer(
    help="Reinforcement learning for language models, on the beat (synchronous) or off it "
    "(asynchronous).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(look.show)
app.command()(timeline.timeline)
app.add_typer(configuration.app, name="config")
app.add_typer(model.app, name="model")


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug messages.")
    ] = False,
) -> None:
    """Options of every command."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("offbeat").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _fail(error: OffbeatError, debug: bool) -> NoReturn:
    """Report an error and leave with its exit code; its traceback only with ``debug``."""
    if debug:
        traceback.print_exception(error)
    typer.echo(f"error: {error}", err=True)
    for note in getattr(error, "__notes__", ()):
        if "\n" not in note:  # the others are tracebacks of other processes
            typer.echo(note, err=True)
        elif not debug:
            typer.echo(f"(--debug shows the traceback {note.partition(':')[0]})", err=True)
    sys.exit(2 if isinstance(error, UNUSABLE) else 1)


def main() -> None:
    """Run the command line; tracebacks only with ``--debug``, which may stand anywhere."""
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    debug = len(args) < len(sys.argv) - 1
    try:
        with boundary(OffbeatError, "unexpected error (--debug shows where)"):
            app(["--debug", *args] if debug else args)
    except OffbeatError as error:
        _fail(error, debug)
    except (SystemExit, KeyboardInterrupt) as left:
        if isinstance(left, SystemExit) and left.code != INTERRUPTED:
            raise
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
