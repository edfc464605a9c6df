"""``offbeat train``: a run, or with ``--dry-run`` what can be checked without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.arguments import Config, Overrides

if TYPE_CHECKING:
    from offbeat.config import RunConfig


def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything that can be checked without training, then stop."
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run of this trial_name, or else the newest of this experiment.",
        ),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume-from",
            metavar="SNAPSHOT",
            help="Continue a run from this snapshot of it, and set aside what came later.",
        ),
    ] = None,
) -> None:
    """Train a model; metrics, rollouts and checkpoints go to the run's folder."""
    from offbeat.config import load
    from offbeat.errors import OffbeatError
    from offbeat.pipeline.run import PPOTrainer

    cfg = load(config, overrides or [])
    if dry_run and (resume or resume_from):
        raise typer.BadParameter("--dry-run checks a run that starts; leave --resume out")
    if resume and resume_from:
        raise typer.BadParameter("--resume-from says where to resume; leave --resume out")
    if dry_run:
        _dry_run(cfg)
        return
    trainer = PPOTrainer.from_config(cfg, resume=resume, resume_from=resume_from)
    typer.echo(f"run folder {trainer.run_dir}")
    try:
        trainer.run()
    except (KeyboardInterrupt, SystemExit):
        _print_left(trainer.run_dir)
        raise
    except OffbeatError:
        if (trainer.run_dir / "rollouts").is_dir():  # it has trained
            _print_left(trainer.run_dir)
        raise
    _print_end(trainer.run_dir)


def _dry_run(cfg: RunConfig) -> None:
    """Check what a run would check, and the reward; say what it would do. Writes nothing."""
    from offbeat.launch import interrupts
    from offbeat.observe.trackers.kinds import check_installed
    from offbeat.pipeline.preflight import prepare, try_reward
    from offbeat.pipeline.run_folder import free_run_dir
    from offbeat.pipeline.workers import usable_cores
    from offbeat.types import Scored

    free_run_dir(cfg)
    check_installed(cfg.stats_logger)
    inputs = prepare(cfg, reward_log=None)
    prompt, reward = interrupts.run(try_reward(inputs))
    cores = usable_cores(cfg.model.path)
    value = f"{reward.value:g}" if isinstance(reward, Scored) else reward.reason
    validation = len(inputs.validation) if inputs.validation is not None else 0
    for line in (
        f"model       {cfg.model.path}, context {inputs.max_len} tokens",
        f"data        {len(inputs.stream)} training rows, {validation} validation rows",
        f"run         {inputs.steps} steps of {cfg.train_dataset.batch_size} prompts x "
        f"{cfg.gconfig.n_samples} answers",
        f"asynchrony  max_staleness {cfg.rollout.max_staleness}, at most {cfg.tickets} groups open",
        f"threads     trainer {cfg.trainer_threads(cores)}, each of {cfg.generator.replicas} "
        f"generator(s) {cfg.generator_threads(cores)}",
        f"row 1       {prompt.text!r} ({len(prompt.token_ids)} tokens)",
        f"reward      {value} for an empty answer to it",
        "everything that can be checked without training is fine",
    ):
        typer.echo(line)


def _print_left(run_dir: Path) -> None:
    """What a run that did not complete leaves behind, and how to go on."""
    from offbeat.checkpoint import snapshot as snapshots
    from offbeat.checkpoint.folders import CHECKPOINTS, step_folders

    checkpoint, snapshot = (
        next(iter(step_folders(run_dir / name)), None) for name in (CHECKPOINTS, snapshots.FOLDER)
    )
    lines = [
        f"newest checkpoint {checkpoint}"
        if checkpoint is not None
        else "no checkpoint was saved (saver.freq_steps, saver.freq_secs save on the way)",
        f"--resume continues from {snapshot}"
        if snapshot is not None
        else "no snapshot was taken, so --resume would start over (recover.freq_steps, "
        "recover.freq_secs take them on the way)",
        f"look at it: offbeat show {run_dir}",
    ]
    typer.echo("\n".join(lines), err=True)


def _print_end(run_dir: Path) -> None:
    from offbeat.observe import show as view

    typer.echo("\n" + view.run_text(view.load_run(run_dir)))
    typer.echo(f"\nlook at it: offbeat show {run_dir} --samples 3")
