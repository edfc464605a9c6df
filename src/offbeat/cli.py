"""The command line: verbs, exit codes, and errors written for a person.

Exit codes: 0 all went well · 1 the run failed · 2 usage, configuration, data or model cannot be
used · 130 interrupted. Heavy modules are imported inside the commands, so that ``--help`` and
mistakes answer at once.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from offbeat.errors import ConfigError, DataError, ModelError, OffbeatError, boundary

if TYPE_CHECKING:
    from offbeat.config import RunConfig
    from offbeat.observe.summary import Summary
    from offbeat.pipeline.evaluate import EvalResult

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
config_app = typer.Typer(help="Look at a configuration.", no_args_is_help=True)
model_app = typer.Typer(help="Make or import a model folder.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")

Config = Annotated[
    Path, typer.Argument(help="YAML configuration, for example recipes/reverse.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides, for example mode=sync actor.optimizer.lr=1e-4."
    ),
]
Fileroot = Annotated[Path, typer.Option(help="Folder that holds all experiments.")]


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


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything that can be checked without training, then stop."
        ),
    ] = False,
) -> None:
    """Train a model; metrics, rollouts and checkpoints go to the run's folder."""
    from offbeat.config import load
    from offbeat.pipeline.run import PPOTrainer

    cfg = load(config, overrides or [])
    if dry_run:
        _dry_run(cfg)
        return
    trainer = PPOTrainer.from_config(cfg)
    typer.echo(f"run folder {trainer.run_dir}")
    summary = trainer.run()
    _print_end(trainer.run_dir, summary)


@app.command("eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Model folder to evaluate in place of model.path.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model once on the configuration's valid_dataset."""
    import asyncio

    from offbeat.config import load
    from offbeat.pipeline.run import evaluate_once

    replaced = [f"model.path={checkpoint}"] if checkpoint is not None else []
    cfg = load(config, [*(overrides or []), *replaced])
    _print_eval(asyncio.run(evaluate_once(cfg)), as_json)


@app.command()
def show(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its name below --fileroot, or: latest.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    samples: Annotated[int, typer.Option(min=0, help="Print this many rollouts of --step.")] = 0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the samples; default the newest.")
    ] = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Look at a run: running, finished or failed."""
    from offbeat.observe import show as view

    path = view.find_run(run, fileroot)
    found = view.load_run(path)
    rows = view.read_samples(path, samples, step) if samples else ()
    if as_json:
        typer.echo(view.run_json(found, rows))
        return
    typer.echo(view.run_text(found))
    if rows:
        typer.echo("\n" + view.samples_text(rows))


@config_app.command("show")
def config_show(config: Config, overrides: Overrides = None) -> None:
    """Print every key with its resolved value and where that came from."""
    from offbeat.config import describe, load

    entries = describe(load(config, overrides or []))
    lines = [f"{entry.key}: {_yaml(entry.value)}" for entry in entries]
    width = min(60, max(map(len, lines)))
    for line, entry in zip(lines, entries, strict=True):
        typer.echo(f"{line:<{width}}  # {entry.note}" if entry.note else line)


@model_app.command("init")
def model_init(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    layers: Annotated[int, typer.Option(min=1)] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width; a multiple of the heads.")] = 64,
    intermediate: Annotated[int, typer.Option(min=1, help="Width inside the MLP.")] = 176,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[
        int | None, typer.Option(min=2, help="Size of a head; default hidden / heads.")
    ] = None,
    characters: Annotated[
        str | None, typer.Option(help="Alphabet of the tokenizer, each character once.")
    ] = None,
    max_len: Annotated[int, typer.Option(min=8, help="Context, tokens.")] = 256,
    rope_theta: Annotated[float, typer.Option(help="Base of the rotary embedding.")] = 100.0,
    initializer_range: Annotated[
        float, typer.Option(help="Standard deviation of the weights.")
    ] = 0.02,
    tie: Annotated[bool, typer.Option(help="Share input and output embedding.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do nothing when the folder is there.")
    ] = False,
) -> None:
    """Make a tiny Llama-style model with random weights and a character tokenizer."""
    if keep and overwrite:
        raise ConfigError("--keep and --overwrite exclude each other")
    if keep and (folder / "config.json").is_file():
        typer.echo(f"{folder} is there already")
        return
    from offbeat.model.init import CHARACTERS, init_model

    made = init_model(
        folder,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        characters=CHARACTERS if characters is None else characters,
        max_len=max_len,
        rope_theta=rope_theta,
        initializer_range=initializer_range,
        tie=tie,
        seed=seed,
        overwrite=overwrite,
    )
    typer.echo(f"{made.path}: {made.parameters:,} parameters, {made.vocab_size} tokens")


@model_app.command("import")
def model_import(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there.")
    ] = False,
) -> None:
    """Turn a GGUF file into a Hugging Face folder."""
    from offbeat.model.gguf import import_gguf

    typer.echo(f"{import_gguf(file, folder, overwrite=overwrite)}")


def _yaml(value: object) -> str:
    """``value`` on one line, as the configuration file could have it."""
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _dry_run(cfg: RunConfig) -> None:
    """Check what a run would check, and the reward; say what it would do. Writes nothing."""
    import asyncio

    from offbeat.pipeline.preflight import prepare, try_reward
    from offbeat.pipeline.run import free_run_dir, usable_cores
    from offbeat.types import Scored

    free_run_dir(cfg)
    inputs = prepare(cfg, reward_log=None)
    prompt, reward = asyncio.run(try_reward(inputs))
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


def _print_end(run_dir: Path, summary: Summary) -> None:
    from offbeat.observe import show as view

    typer.echo("\n" + view.run_text(view.load_run(run_dir)))
    typer.echo(f"\nlook at it: offbeat show {run_dir} --samples 3")


def _print_eval(result: EvalResult, as_json: bool) -> None:
    import json

    metrics = {name: value for name, value in result.metrics().items() if name != "eval/version"}
    if as_json:
        counts = {"eval/prompts": result.prompts, "eval/skipped": result.skipped}
        typer.echo(json.dumps({**metrics, **counts}, allow_nan=False))
        return
    for name, value in metrics.items():
        typer.echo(f"{name:<28} {value:.4g}")


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
