"""``offbeat model``: make or import a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.errors import ConfigError

NewFolder = Annotated[Path, typer.Argument(help="Folder to create, also those above it.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model that the folder has; never others.")
]

app = typer.Typer(help="Make or import a model folder.", no_args_is_help=True)


@app.command("init")
def init(
    folder: NewFolder,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 2,
    hidden: Annotated[
        int, typer.Option(min=1, help="Width, numbers per token; a multiple of --heads.")
    ] = 64,
    intermediate: Annotated[
        int, typer.Option(min=1, help="Width inside the MLP, numbers per token.")
    ] = 176,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of a layer.")] = 4,
    kv_heads: Annotated[
        int, typer.Option(min=1, help="Key and value heads of a layer; divides --heads.")
    ] = 4,
    head_dim: Annotated[
        int | None,
        typer.Option(min=2, help="Width of a head, an even number; default --hidden / --heads."),
    ] = None,
    characters: Annotated[
        str | None,
        typer.Option(
            help="Alphabet of the tokenizer, each character once; default the digits, lower-case "
            "letters, space and +-*/=?.,:"
        ),
    ] = None,
    max_len: Annotated[int, typer.Option(min=8, help="Longest prompt plus answer, tokens.")] = 256,
    rope_theta: Annotated[
        float, typer.Option(help="Base of the rotary embedding; a small one suits short contexts.")
    ] = 100.0,
    initializer_range: Annotated[
        float, typer.Option(help="Standard deviation of the random weights.")
    ] = 0.02,
    tie: Annotated[bool, typer.Option(help="Share input and output embedding.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the random weights; the same seed gives the same file.")
    ] = 1,
    overwrite: Overwrite = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do nothing when the folder has a model already.")
    ] = False,
) -> None:
    """Make a tiny Llama-style model with random weights and a character tokenizer."""
    if keep and overwrite:
        raise ConfigError("--keep and --overwrite exclude each other; leave one out")
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


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A GGUF file, with weights and tokenizer.")],
    folder: NewFolder,
    overwrite: Overwrite = False,
) -> None:
    """Turn a GGUF file into a Hugging Face folder in float32. Needs the extra gguf."""
    from offbeat.model.gguf import import_gguf

    typer.echo(f"{import_gguf(file, folder, overwrite=overwrite)}")
