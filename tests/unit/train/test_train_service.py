"""The trainer behind its service: what the specification decides, and what is never published."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offbeat.config import ActorConfig, NormConfig, OptimizerConfig
from offbeat.errors import ModelError, NonFiniteLoss, TrainingError
from offbeat.launch.blob import write_blob
from offbeat.launch.codec import encode
from offbeat.train.client import TrainerSpec
from offbeat.train.service import open_service
from offbeat.types import PolicyVersion, TrainSample

V1, V2 = PolicyVersion(1), PolicyVersion(2)


def spec(path: Path, *, lr: float, dtype: str | None = None, **actor: Any) -> bytes:
    config = ActorConfig(
        optimizer=OptimizerConfig(lr=lr, lr_scheduler_type="linear"),
        use_decoupled_loss=False,
        ppo_n_minibatches=2,
        max_tokens_per_mb=200,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
        **actor,
    )
    return encode(
        TrainerSpec(
            model_path=str(path),
            dtype=dtype,
            device="cpu",
            seed=3,
            temperature=0.8,
            max_new_tokens=12,
            total_steps=4,
            actor=config,
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_service_trains_as_its_specification_says(
    tiny: Path, make_trainer: Callable[..., Any], rollouts: list[TrainSample], dtype: str
) -> None:
    trainer = make_trainer(
        lr=1e-3,
        compute_dtype=getattr(torch, dtype),
        total_steps=4 * 2,
        optimizer={"lr_scheduler_type": "linear"},
        ppo_n_minibatches=2,
        loss_aggregation="constant",
    )
    payload = spec(tiny, lr=1e-3, dtype=dtype, loss_aggregation="constant")
    async with open_service(payload) as service:
        with write_blob(encode(rollouts)) as blob:
            for version in (V1, V2):
                report = await service.update(blob.ref, version)
                assert report.metrics == trainer.actor.update(rollouts, version).metrics


async def test_gradient_checkpointing_of_the_specification_reaches_the_model(
    tiny: Path, rollouts: list[TrainSample]
) -> None:
    async with open_service(spec(tiny, lr=1e-3, gradient_checkpointing=True)) as service:
        model = service._actor._engine._model
        assert model.is_gradient_checkpointing
        with write_blob(encode(rollouts)) as blob:
            assert (await service.update(blob.ref, V1)).version == V1


async def test_weights_between_two_versions_are_not_published(
    tiny: Path, rollouts: list[TrainSample]
) -> None:
    # The first of two minibatches sends the weights out of range, the second cannot be computed.
    async with open_service(spec(tiny, lr=1e30)) as service:
        before = await service.publish()
        with write_blob(encode(rollouts)) as blob:
            with pytest.raises(NonFiniteLoss, match="producing version 1"):
                await service.update(blob.ref, V1)
            with pytest.raises(TrainingError, match="failed between two optimizer steps"):
                await service.update(blob.ref, V1)
        with pytest.raises(TrainingError, match="neither trained on nor published"):
            await service.publish()
        assert before.version == 0


class WatchedEvent(threading.Event):
    """Says when somebody begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


@pytest.mark.invariant("I04")
async def test_an_update_does_not_step_while_the_state_before_it_is_copied(
    tiny: Path, rollouts: list[TrainSample]
) -> None:
    async with open_service(spec(tiny, lr=1e-2)) as service:
        before = load_file((await service.publish()).uri)
        held, copied = threading.Event(), WatchedEvent()
        service._state._copied = copied
        service._state._thread.submit(held.wait)  # the copy does not begin before this ends
        await service.begin_snapshot()
        with write_blob(encode(rollouts)) as blob:
            update = asyncio.ensure_future(service.update(blob.ref, V1))
            waits = asyncio.ensure_future(asyncio.to_thread(copied.waited_for.wait, 10))
            await asyncio.wait([update, waits], return_when=asyncio.FIRST_COMPLETED)
            waited = copied.waited_for.is_set()
            copied.waited_for.set()  # an update that does not wait shall not keep the test waiting
            held.set()
            assert (await update).version == V1
            await waits
        assert waited
        state = load_file((await service.snapshot()).tensors.uri)
    assert all(torch.equal(state[f"weights/{name}"], before[name]) for name in before)


async def test_model_that_is_not_there_is_named_before_serving(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        async with open_service(spec(tmp_path / "nothing", lr=1e-3)):
            pass
