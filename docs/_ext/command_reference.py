"""The command reference, from the typer application: the same words as ``--help``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from offbeat.cli import app


def markdown() -> str:
    """One part per command: usage, what it does, its arguments and options."""
    root = typer.main.get_command(app)
    return "\n".join(
        part for name, command in _leaves("offbeat", root) for part in _part(name, command)
    )


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands that do something, with all the words that call them."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, below in command.commands.items():
        yield from _leaves(f"{name} {word}", below)


def _part(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    yield f"## `{name}`\n\n{command.help}\n\n```text\n{usage}\n```\n"
    records = [record for p in command.params if (record := p.get_help_record(context))]
    if records:
        yield "| argument or option | meaning |\n| --- | --- |"
        yield from (f"| `{_cell(what)}` | {_cell(meaning)} |" for what, meaning in records)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
