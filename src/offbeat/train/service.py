"""The trainer process: the actor behind RPC, its torch work on one thread of its own.

Consumes batches as ``BlobRef``s; produces ``StepReport``s and published weights. Updates and
publications are serialized by the single executor thread, so weights are never read while an
optimizer writes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing

import torch

from offbeat.launch.blob import read_blob
from offbeat.launch.codec import decode
from offbeat.model.linear import prepare_for_training, use_onednn
from offbeat.model.load import load_model, resolve_device, resolve_dtype
from offbeat.train.actor import PPOActor
from offbeat.train.client import TrainerSpec
from offbeat.train.engine import SingleDeviceEngine
from offbeat.train.state import StateCopy, environment, restore
from offbeat.types import (
    BlobRef,
    Environment,
    PolicyVersion,
    StepReport,
    TrainerState,
    TrainSample,
    WeightUpdate,
)
from offbeat.weights.memory import MemoryPublisher


class TrainerService:
    """Serves one actor. Create with ``open_service``."""

    METHODS = ("update", "publish", "begin_snapshot", "snapshot", "environment")

    def __init__(
        self,
        actor: PPOActor,
        publisher: MemoryPublisher,
        state: StateCopy,
        executor: ThreadPoolExecutor,
        *,
        snapshots: bool,
    ) -> None:
        self._actor = actor
        self._publisher = publisher
        self._state = state
        self._executor = executor
        self._unprepared = snapshots

    async def update(self, batch: BlobRef, produce: PolicyVersion) -> StepReport:
        def work() -> StepReport:
            samples = decode(read_blob(batch), list[TrainSample])
            report = self._actor.update(
                samples, produce, before_step=self._state.maybe_wait_for_staging
            )
            if self._unprepared:  # now the optimizer has its moments
                self._unprepared = False
                self._state.prepare()
            return report

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def publish(self) -> WeightUpdate:
        def work() -> WeightUpdate:
            return self._publisher.publish(self._actor.whole_version())

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def begin_snapshot(self) -> PolicyVersion:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._state.begin)

    async def snapshot(self) -> TrainerState:
        return await asyncio.wrap_future(self._state.staged)

    async def environment(self) -> Environment:
        # Asked of the thread that computes: the number of threads is its own.
        return await asyncio.get_running_loop().run_in_executor(self._executor, environment)


def _load(
    spec: TrainerSpec, staging: ThreadPoolExecutor
) -> tuple[PPOActor, MemoryPublisher, StateCopy]:
    device = resolve_device(spec.device)
    compute_dtype = resolve_dtype(spec.dtype, device)
    model = load_model(spec.model_path, dtype=torch.float32, device=device)
    if compute_dtype is torch.float32 and use_onednn(spec.onednn_linears, compute_dtype, model):
        prepare_for_training(model)
    engine = SingleDeviceEngine(
        model,
        compute_dtype=compute_dtype,
        optimizer=spec.actor.optimizer,
        total_steps=spec.total_steps * spec.actor.ppo_n_minibatches,
        gradient_checkpointing=spec.actor.gradient_checkpointing,
    )
    actor = PPOActor(
        engine,
        spec.actor,
        temperature=spec.temperature,
        max_new_tokens=spec.max_new_tokens,
        seed=spec.seed,
        compute_dtype=compute_dtype,
    )
    if spec.restore is not None:
        restore(actor, engine, spec.restore)
    return actor, MemoryPublisher(engine.weights()), StateCopy(actor, engine, staging)


@asynccontextmanager
async def open_service(payload: bytes) -> AsyncIterator[TrainerService]:
    """Load the model and serve its actor; ``payload`` is an encoded ``TrainerSpec``."""
    spec = decode(payload, TrainerSpec)
    with ExitStack() as stack:
        executor, staging = (
            stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix=name))
            for name in ("trainer", "staging")
        )
        loop = asyncio.get_running_loop()
        actor, publisher, state = await loop.run_in_executor(executor, _load, spec, staging)
        stack.enter_context(publisher)
        stack.enter_context(closing(state))
        stack.callback(staging.shutdown)  # a copy under way ends before its memory goes
        yield TrainerService(actor, publisher, state, executor, snapshots=spec.snapshots)
