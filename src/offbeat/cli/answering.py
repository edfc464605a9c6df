"""What the verbs that ask a model share: which model, its process, and how to sample."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.config.generation import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    MOST_TOP_K,
    temperature_problem,
)
from offbeat.config.model import DType
from offbeat.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from offbeat.generate.session import SessionSpec
    from offbeat.types import SamplingParams

DEFAULT_TOKENS = 256
"""Longest answer where none is given and the context has room for it."""

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model folder, a model of the Hugging Face hub (ORGANIZATION/MODEL), or a run: its "
        "folder, its name below --fileroot, or: latest. Of a run, the newest checkpoint is taken.",
    ),
]
Slots = Annotated[
    int, typer.Option(min=1, help="Answers written at the same time; more wait in order.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; default what suits the model.")
]
Format = Annotated[
    DType | None, typer.Option(help="Number format; default float32 on the CPU, else bfloat16.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")]
MaxLen = Annotated[
    int | None,
    typer.Option(min=2, help="Longest prompt plus answer, tokens; default the model's own limit."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Longest answer, tokens; default {DEFAULT_TOKENS}, or less where less fits."
    ),
]
Temperature = Annotated[
    float,
    typer.Option(min=0, help=f"0 is greedy, else {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}."),
]
TopP = Annotated[float, typer.Option(min=1e-6, max=1, help="1 is off.")]
TopK = Annotated[int, typer.Option(min=0, max=MOST_TOP_K, help="0 is off.")]
MinP = Annotated[float, typer.Option(min=0, max=1, help="0 is off.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="A string that ends an answer; may be given again.")
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same answers; default a fresh one.")
]


def model_folder(name: str, fileroot: Path) -> Path:
    """The model folder that ``name`` means.

    Raises:
        DataError: there is no such folder and no such run.
        ModelError: the run has no checkpoint, the hub's model cannot be fetched, or ``name`` is a
            configuration.
        CorruptCheckpoint: the checkpoint is not what was saved.
    """
    from offbeat.pipeline.evaluation_target import find_target

    found = find_target(name, fileroot=fileroot).model
    if found is None:
        raise ModelError(f"{name} is a configuration; name a model folder, a run, or: latest")
    return found


def session_spec(
    folder: Path,
    *,
    slots: int,
    threads: int | None,
    dtype: DType | None,
    device: str,
    max_len: int | None,
) -> SessionSpec:
    """How to start the model of ``folder``."""
    from offbeat.generate.session import SessionSpec
    from offbeat.pipeline.workers import usable_cores

    return SessionSpec(
        model_dir=folder,
        slots=slots,
        threads=usable_cores(str(folder)) if threads is None else threads,
        dtype=dtype,
        device=device,
        max_len=max_len,
    )


def sampling(
    *, temperature: float, top_p: float, top_k: int, min_p: float, stop: list[str] | None
) -> SamplingParams:
    """How to sample, but for the length.

    Raises:
        ConfigError: no answer can be sampled at this temperature.
    """
    from offbeat.types import SamplingParams

    wrong = temperature_problem(temperature)
    if wrong is not None:
        raise ConfigError(f"--temperature: {wrong}")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=tuple(s for s in stop or () if s),
    )


def shown(text: str) -> str:
    """``text`` as standard output takes it; what could command a terminal is escaped there."""
    from offbeat.observe.terminal import encodable, harmless

    if sys.stdout.isatty():
        text = "\t".join(map(harmless, text.split("\t")))
    return encodable(text, sys.stdout.encoding)
