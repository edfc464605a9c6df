"""``offbeat model``: make or import a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.errors import ConfigError

app = typer.Typer(help="Make or import a model folder.", no_args_is_help=True)


@app.command("init")
def init(
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


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there.")
    ] = False,
) -> None:
    """Turn a GGUF file into a Hugging Face folder."""
    from offbeat.model.gguf import import_gguf

    typer.echo(f"{import_gguf(file, folder, overwrite=overwrite)}")
