"""A model folder that answers: one generator process, without a run around it.

Owns the start and the end of that process; knows no HTTP and no console.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.data.tokens import TextCodec
from offbeat.errors import ConfigError, ModelError
from offbeat.generate.client import TARGET, EngineInfo, GeneratorSpec, RemoteGenerator
from offbeat.generate.gateway.answers import Answers
from offbeat.launch.alive import while_alive
from offbeat.launch.codec import encode
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerSpec

ANSWER_SECONDS = 3600.0
"""Longest time one answer may take, waiting for a slot included."""

STOP_SECONDS = 0.5
"""What the process may take to stop by itself; it has nothing to lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What to start. ``max_len`` null: the context that the model was made for."""

    model_dir: Path
    slots: int
    threads: int
    dtype: str | None = None
    device: str = "auto"
    max_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model that can be asked, and what its engine found out at the start."""

    answers: Answers
    info: EngineInfo


@asynccontextmanager
async def open_session(spec: SessionSpec) -> AsyncIterator[Session]:
    """Start the process; the block ends with it.

    Raises:
        ModelError: the folder cannot be used.
        ConfigError: ``max_len`` is longer than the model's context, or missing.
        WorkerError: the process died; the message has the end of its log.
    """
    codec = TextCodec.open(spec.model_dir)
    max_len = _max_len(spec, codec)
    worker_spec = WorkerSpec(
        name="generator",
        target=TARGET,
        payload=encode(
            GeneratorSpec(
                model_path=str(spec.model_dir),
                dtype=spec.dtype,
                device=spec.device,
                slots=spec.slots,
                max_len=max_len,
            )
        ),
        threads=spec.threads,
    )
    with tempfile.TemporaryDirectory(prefix="offbeat-") as logs:
        async with LocalScheduler(Path(logs), grace=STOP_SECONDS) as scheduler:
            worker = await scheduler.start(worker_spec)
            async with (
                RemoteGenerator(worker, request_timeout=ANSWER_SECONDS) as generator,
                while_alive([worker]),
            ):
                yield Session(
                    answers=Answers(generator, codec=codec, max_len=max_len),
                    info=await generator.info(),
                )


def _max_len(spec: SessionSpec, codec: TextCodec) -> int:
    own = codec.context_length
    if own is None and spec.max_len is None:
        raise ModelError(
            f"{spec.model_dir}/config.json does not say how long a context is; give --max-len"
        )
    if own is not None and spec.max_len is not None and spec.max_len > own:
        raise ConfigError(
            f"--max-len: {spec.max_len} is more than the {own} tokens that {spec.model_dir} was "
            "made for"
        )
    return spec.max_len or own or 0
