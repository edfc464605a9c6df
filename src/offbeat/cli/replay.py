"""``offbeat replay``: a run's updates once more, and whether they give the same weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import Fileroot

if TYPE_CHECKING:
    from offbeat.pipeline.replay import Divergence, RecordedUpdate, Replay, ReplayPlan

CAUSES = """\
Usual causes, the likely ones first: another processor, torch build or number of threads than the
run's (a warning says so); another version of offbeat; a rollouts file that was changed. If it is
none of these, training or recording has a bug: please report it."""


def replay(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its name below --fileroot, or: latest.")
    ],
    from_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start from the newest snapshot before this step; from the beginning where there "
            "is none.",
        ),
    ] = None,
    to_step: Annotated[
        int | None, typer.Option(min=1, help="Stop after this step; default the newest.")
    ] = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Train again from a run's recorded rollouts, and compare the weights of every step.

    Nothing is generated or scored, and the run's folder stays as it is. Exit code 0: every digest
    agrees. 1: a step diverges; it is named, with the first tensor that differs.
    """
    from offbeat.launch import interrupts
    from offbeat.observe.find import find_run
    from offbeat.pipeline import replay as engine

    path = find_run(run, fileroot)
    plan = engine.plan_replay(path, from_step=from_step, to_step=to_step)
    last = plan.updates[-1].step
    typer.echo(f"replaying steps {plan.updates[0].step} to {last} from {plan.started_from}")

    def tell(done: RecordedUpdate) -> None:
        if sys.stdout.isatty():
            typer.echo(f"step {done.step:>{len(str(last))}}/{last}  {done.record.digest}  agrees")

    found = interrupts.run(engine.replay(plan, tell))
    _print(plan, found)
    raise typer.Exit(0 if found.divergence is None else 1)


def _print(plan: ReplayPlan, found: Replay) -> None:
    name = f"{plan.run_dir.parent.name}/{plan.run_dir.name}"
    if found.divergence is None:
        count = len(found.agreeing)
        typer.echo(f"replayed {count} of {plan.recorded} steps of {name}: every digest agrees")
        return
    before = f"; the {len(found.agreeing)} steps before it agree" if found.agreeing else ""
    typer.echo(f"step {found.divergence.step} of {name} diverges{before}")
    typer.echo(_difference(found.divergence))
    typer.echo(CAUSES)


def _difference(found: Divergence) -> str:
    name, (recorded, replayed) = next(iter(found.tensors.items()))
    return (
        f"{len(found.tensors)} of {found.tensor_count} tensors differ, the first is {name}\n"
        f"  recorded  {recorded}, all weights {found.recorded}\n"
        f"  replayed  {replayed}, all weights {found.replayed}"
    )
