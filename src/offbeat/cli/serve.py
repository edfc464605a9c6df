"""``offbeat serve``: a model behind OpenAI's protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli import answering
from offbeat.cli.arguments import Fileroot
from offbeat.launch import interrupts

if TYPE_CHECKING:
    import socket

    from offbeat.generate.session import SessionSpec


def serve(
    checkpoint: answering.Checkpoint,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            help="What clients must send (their API key); default the environment variable "
            "OFFBEAT_TOKEN, else none."
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model; default its experiment or its folder."),
    ] = None,
    slots: answering.Slots = 16,
    threads: answering.Threads = None,
    dtype: answering.Format = None,
    device: answering.Device = "auto",
    max_len: answering.MaxLen = None,
    fileroot: Fileroot = Path("runs"),
) -> None:
    """Answer over HTTP as OpenAI's API does: models, completions and chat completions."""
    from offbeat.generate.gateway.access import listening, resolve_token

    expected = resolve_token(host, token, key="--")
    folder = answering.model_folder(checkpoint, fileroot)
    spec = answering.session_spec(
        folder, slots=slots, threads=threads, dtype=dtype, device=device, max_len=max_len
    )
    name = served_name or _name(folder.resolve())
    with listening(host, port, key="--") as at:
        interrupts.run(_serve(spec, name, expected, at))


def _name(folder: Path) -> str:
    """The experiment of a run's checkpoint, else the folder's name."""
    from offbeat.checkpoint.folders import CHECKPOINTS

    in_run = folder.parent.name == CHECKPOINTS
    return folder.parents[2].name if in_run else folder.name


async def _serve(spec: SessionSpec, name: str, token: str | None, at: socket.socket) -> None:
    """Answer until something ends this: Ctrl-C, SIGTERM, the death of the engine."""
    from offbeat.generate.gateway.http import Gateway, serve_gateway
    from offbeat.generate.session import open_session

    async with open_session(spec) as session:
        gateway = Gateway(session.answers, name=name, token=token)
        async with serve_gateway(gateway, at) as url:
            typer.echo(
                f"model {name} at {url}: context {session.answers.max_len} tokens, "
                f"{spec.slots} answers at a time, {'with' if token else 'without'} a token"
            )
            await asyncio.Event().wait()
