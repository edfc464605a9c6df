"""The command line: verbs, exit codes, and errors written for a person.

Exit codes: 0 all went well · 1 the run failed · 2 usage, configuration, data or model cannot be
used · 130 interrupted · 143 interrupted by SIGTERM. Heavy modules are imported inside the commands,
so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from offbeat.cli import (
    chaos,
    chat,
    checkpoint,
    configuration,
    evaluate,
    generate,
    look,
    model,
    replay,
    serve,
    timeline,
    train,
)
from offbeat.errors import ConfigError, DataError, ModelError, OffbeatError, boundary

UNUSABLE = (ConfigError, DataError, ModelError)
INTERRUPTED = 130
TERMINATED = 143

DEAF_SECONDS = 1.0
"""After Ctrl-C, how long another one is taken for the same."""

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
app.command()(look.runs)
app.command()(look.show)
app.command()(timeline.timeline)
app.command()(replay.replay)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(chaos.chaos)
app.add_typer(configuration.app, name="config")
app.add_typer(model.app, name="model")
app.add_typer(checkpoint.app, name="checkpoint")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"offbeat {version('offbeat')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug messages.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
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


class _Signals:
    """Ctrl-C and SIGTERM: both end a command in the same way, and once however often they come.

    ``terminated`` tells the two apart afterwards. While an event loop runs, Ctrl-C belongs to
    `offbeat.launch.interrupts`.
    """

    def __init__(self) -> None:
        self.terminated = False
        self._deaf_until = 0.0

    def install(self) -> None:
        """From here on both signals come to this object."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell lets its background jobs ignore Ctrl-C. Blocked, it still does nothing, but
            # has a handler, which an event loop replaces by one that ends in order.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)

    def end(self) -> None:
        """The command is ending: from here on nothing disturbs it, to the end of the process."""
        self._deaf_until = math.inf
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # A second one would be raised into the end that the first one began. It is heard again
        # after a while: Python drops what is raised in a finalizer.
        now = time.monotonic()
        if now >= self._deaf_until:
            self._deaf_until = now + DEAF_SECONDS
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Goes on as SIGINT, to whatever handles that now."""
        self.terminated = True
        # Sent before it is unblocked, and to the process: one with a Ctrl-C that was held back.
        os.kill(os.getpid(), signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def main() -> None:
    """Run the command line; tracebacks only with ``--debug``, which may stand anywhere."""
    args = [arg for arg in sys.argv[1:] if arg != "--debug"]
    debug = len(args) < len(sys.argv) - 1
    signals = _Signals()
    signals.install()
    try:
        with boundary(OffbeatError, "unexpected error (--debug shows where)"):
            app(["--debug", *args] if debug else args)
    except OffbeatError as error:
        _fail(error, debug)
    except (SystemExit, KeyboardInterrupt) as left:
        if isinstance(left, SystemExit) and left.code != INTERRUPTED:
            raise
        signals.end()
        typer.echo("interrupted by SIGTERM" if signals.terminated else "interrupted", err=True)
        sys.exit(TERMINATED if signals.terminated else INTERRUPTED)
