"""``offbeat chaos``: a run under faults, for who works on offbeat or doubts it."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.cli.arguments import Config, Overrides
from offbeat.pipeline.chaos.faults import Fault


def chaos(
    config: Config,
    overrides: Overrides = None,
    faults: Annotated[
        str,
        typer.Option(help=f"Which ones, with commas between them: {', '.join(Fault)}; or: all."),
    ] = "all",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two faults.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of the choice of faults and moments.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="End the run so long after its first step; left out, it is as long as configured.",
        ),
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(
            help="The reward to come to: the best validation reward, or without a validation set "
            "the mean of the last ten steps; left out, none is asked for.",
        ),
    ] = None,
) -> None:
    """Train while processes are killed, stopped and fed errors, then check what is left.

    Exit code 0: every claim holds. 1: one fails, or the run did.
    """
    from offbeat.pipeline.chaos.soak import Plan, soak

    plan = Plan(
        config=config,
        overrides=overrides or [],
        faults=_chosen(faults),
        every=every,
        seed=seed,
        minutes=minutes,
        reach=reach,
    )
    report = soak(plan, typer.echo)
    typer.echo("\n" + report.text())
    raise typer.Exit(0 if report.sound else 1)


def _chosen(text: str) -> list[Fault]:
    if text == "all":
        return list(Fault)
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in list(Fault)]
    if unknown:
        known = ", ".join(Fault)
        raise typer.BadParameter(f"{unknown[0]!r} is no fault; there are {known}, or all of them")
    return [Fault(name) for name in names]
