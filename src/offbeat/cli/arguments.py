"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path, typer.Argument(help="YAML configuration, for example recipes/reverse.yaml.")
]
OVERRIDES = "[KEY=VALUE]..."
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=OVERRIDES, help="Overrides, for example mode=sync actor.optimizer.lr=1e-4."
    ),
]
RUN_HELP = "A run's folder; EXPERIMENT, EXPERIMENT/TRIAL or TRIAL below --fileroot; or: latest."
Run = Annotated[str, typer.Argument(help=RUN_HELP)]
Fileroot = Annotated[Path, typer.Option(help="Folder that holds all experiments.")]
