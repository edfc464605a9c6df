"""The worker processes of a run: what each is started with, and on how many threads.

Makes specifications from a configuration and starts what they name; knows no order of events, and
ends nothing: that is the scheduler's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from offbeat.checkpoint.snapshot import Snapshot
from offbeat.config import KVOnUpdate, RunConfig
from offbeat.errors import true_cause
from offbeat.generate import client as generate_client
from offbeat.generate.client import EngineInfo, GeneratorSpec, RemoteGenerator
from offbeat.launch.codec import encode
from offbeat.launch.protocols import Scheduler, WorkerHandle, WorkerSpec
from offbeat.train import client as train_client
from offbeat.train.client import Restore, TrainerSpec

UPDATE_TIMEOUT_SECONDS = 3600.0
"""Longest time one update may take before the trainer counts as hung."""

SMALL_MODEL_BYTES = 50_000_000
"""Below this size of the weights a matrix product is too small to share: a second thread costs more
than it gives, and many times as much when another process wants the core.
"""


def trainer_worker(spec: TrainerSpec, threads: int) -> WorkerSpec:
    """The process of a trainer."""
    return WorkerSpec(
        name="trainer", target=train_client.TARGET, payload=encode(spec), threads=threads
    )


def place_of(found: Snapshot) -> Restore:
    """Where a trainer goes on that is restored from ``found``."""
    return Restore(
        path=str(found.tensors),
        version=found.state.run.version,
        optimizer_steps=found.state.optimizer_steps,
    )


def generator_specs(cfg: RunConfig, max_len: int, threads: int) -> list[WorkerSpec]:
    """The generators of ``cfg.model``, each with so many CPU threads."""
    spec = GeneratorSpec(
        model_path=cfg.model.path,
        dtype=cfg.generator.dtype or cfg.model.dtype,
        device=cfg.model.device,
        slots=cfg.generator.slots,
        max_len=max_len,
        onednn_linears=cfg.model.onednn_linears,
        recompute_kv=cfg.generator.kv_on_update is KVOnUpdate.RECOMPUTE,
    )
    return [
        WorkerSpec(
            name=f"generator-{i}",
            target=generate_client.TARGET,
            payload=encode(spec),
            threads=threads,
        )
        for i in range(cfg.generator.replicas)
    ]


def open_generator(cfg: RunConfig, worker: WorkerHandle) -> RemoteGenerator:
    """The controller's end of a generator that was started."""
    return RemoteGenerator(worker, request_timeout=cfg.rollout.request_timeout_seconds)


def usable_cores(model_dir: str) -> int:
    """Cores that a process can use well: one for a small model, else all of this machine."""
    weights = sum(f.stat().st_size for f in Path(model_dir).glob("*.safetensors"))
    return 1 if weights < SMALL_MODEL_BYTES else len(os.sched_getaffinity(0))


async def start_all(scheduler: Scheduler, specs: Sequence[WorkerSpec]) -> list[WorkerHandle]:
    """Start the workers at the same time; in the order of ``specs``."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scheduler.start(spec)) for spec in specs]
    except BaseExceptionGroup as errors:
        raise true_cause(errors) from errors
    return [t.result() for t in tasks]


def why_not_repeatable(infos: Sequence[EngineInfo]) -> str:
    """Why generators that say this of themselves may not write the same bits twice, or nothing."""
    first = infos[0]
    if (first.device, first.dtype) != ("cpu", "float32"):
        return f"answers are computed in {first.dtype} on {first.device}, not in float32 on a CPU"
    if any(info != first for info in infos):
        return "the generators do not compute alike (threads, oneDNN or agreement differ)"
    if not first.bitwise:
        return (
            f"cached decode and training pass agree to {first.max_error:.0e} nats only, so an "
            "answer may depend on what is computed beside it"
        )
    return ""
