"""``offbeat replay``: a run's updates once more, and whether they give the same weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import Fileroot, Run

if TYPE_CHECKING:
    from offbeat.pipeline.replay import Divergence, RecordedUpdate, Replay, ReplayPlan

CAUSES = """\
Usual causes, the likely ones first: another processor, torch build or number of threads than the
run's (a warning says so); another version of offbeat; a rollouts file that was changed. If it is
none of these, training or recording has a bug: please report it."""


def replay(
    run: Run,
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

    Nothing is generated or scored, and the run's folder stays as it is.

    Exit code 0: every digest agrees. 1: a step diverges, or the replay fails.
    2: something that it needs is missing or cannot be used.
    """
    from offbeat.launch import interrupts
    from offbeat.observe.find import find_run
    from offbeat.pipeline import replay as engine

    path = find_run(run, fileroot)
    plan = engine.plan_replay(path, from_step=from_step, to_step=to_step)
    last = plan.updates[-1].step
    # Before the weights are compared with those of the run: the trainer takes seconds to start.
    typer.echo(_first_line(plan, from_step))

    def tell(done: RecordedUpdate) -> None:
        if sys.stdout.isatty():
            typer.echo(f"step {done.step:>{len(str(last))}}/{last}  {done.record.digest}  agrees")

    found = interrupts.run(engine.replay(plan, tell))
    _print(plan, found)
    raise typer.Exit(0 if found.divergence is None else 1)


def _first_line(plan: ReplayPlan, from_step: int | None) -> str:
    first, last = plan.updates[0].step, plan.updates[-1].step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    line = f"replaying {steps} from {plan.started_from}"
    if from_step is None or from_step == first:
        return line
    if plan.start is None:
        return f"{line}: there is no snapshot before step {from_step} to start from"
    return f"{line}, the newest snapshot before step {from_step}"


def _print(plan: ReplayPlan, found: Replay) -> None:
    from offbeat.observe.rollouts import rollouts_path

    name = f"{plan.run_dir.parent.name}/{plan.run_dir.name}"
    if found.divergence is None:
        count = len(found.agreeing)
        typer.echo(f"replayed {count} of {plan.recorded} steps of {name}: every digest agrees")
        return
    step = found.divergence.step
    typer.echo(f"step {step} of {name} diverges{_agreeing(len(found.agreeing))}")
    typer.echo(_difference(found.divergence))
    typer.echo(f"  its file  {rollouts_path(plan.run_dir, step)}")
    typer.echo(CAUSES)


def _agreeing(count: int) -> str:
    if count == 0:
        return ""
    return "; the step before it agrees" if count == 1 else f"; the {count} steps before it agree"


def _difference(found: Divergence) -> str:
    name, (recorded, replayed) = next(iter(found.tensors.items()))
    return (
        f"{len(found.tensors)} of {found.tensor_count} tensors differ, the first is {name}\n"
        f"  recorded  {recorded}, all weights {found.recorded}\n"
        f"  replayed  {replayed}, all weights {found.replayed}"
    )
