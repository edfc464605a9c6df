"""``offbeat config``: look at a configuration."""

from __future__ import annotations

import typer

from offbeat.cli.arguments import Config, Overrides

app = typer.Typer(help="Look at a configuration.", no_args_is_help=True)


@app.command("show")
def show(config: Config, overrides: Overrides = None) -> None:
    """Print every key with its resolved value and where that came from."""
    from offbeat.config import describe, load

    entries = describe(load(config, overrides or []))
    lines = [f"{entry.key}: {_yaml(entry.value)}" for entry in entries]
    width = min(60, max(map(len, lines)))
    for line, entry in zip(lines, entries, strict=True):
        typer.echo(f"{line:<{width}}  # {entry.note}" if entry.note else line)


def _yaml(value: object) -> str:
    """``value`` on one line, as the configuration file could have it."""
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
