"""``offbeat timeline``: a picture of who worked when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.arguments import Fileroot, Run


def timeline(
    run: Run,
    file: Annotated[Path, typer.Argument(help="Picture to write: .png, .svg or .pdf.")],
    first_step: Annotated[
        int | None,
        typer.Option(min=1, help="First step in the picture; default the second of the recorded."),
    ] = None,
    last_step: Annotated[
        int | None,
        typer.Option(min=1, help="Last step in the picture; default the fourth after the first."),
    ] = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Draw who worked when in some steps of a run: generator, rewards, trainer, new weights.

    Needs the extra plot (matplotlib).
    """
    from offbeat.observe.find import find_run
    from offbeat.observe.gantt import draw, gantt, some_steps
    from offbeat.observe.spans import read_spans

    folder = find_run(run, fileroot)
    spans = read_spans(folder / "spans.jsonl")
    first, last = some_steps(spans, first_step, last_step)
    picture = gantt(spans, first, last)
    draw(picture, file, f"{folder.parent.name}/{folder.name}, steps {first} to {last}")
    typer.echo(f"{file}: {picture.seconds:.2f} s of {folder}")
