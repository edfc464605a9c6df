"""The controller's side of the trainer process; loads no torch.

Owns the start-up specification that crosses to the process, and the typed calls to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.config import ActorConfig
from offbeat.launch.protocols import WorkerHandle
from offbeat.types import (
    BlobRef,
    Environment,
    PolicyVersion,
    StepReport,
    TrainerState,
    WeightUpdate,
)

TARGET = "offbeat.train.service:open_service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What a trainer goes on from: the tensors of a ``TrainerState``, now a file."""

    path: str
    version: PolicyVersion
    optimizer_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a trainer process needs to start.

    ``dtype`` is what matrix products are computed in (weights and optimizer state are float32);
    ``onednn_linears``: see ``ModelConfig``;
    ``temperature`` and ``max_new_tokens`` are the rollouts'; ``total_steps`` is the number of
    updates of the run (learning-rate schedule); ``restore`` is what a resumed run goes on from;
    ``snapshots``: there will be some, so that memory for them is made early.
    """

    model_path: str
    dtype: str | None
    device: str
    seed: int
    temperature: float
    max_new_tokens: int
    total_steps: int
    actor: ActorConfig
    onednn_linears: bool | None = None
    restore: Restore | None = None
    snapshots: bool = False


class RemoteTrainer:
    """``Trainer`` over a worker's HTTP endpoint.

    Args:
        worker: the trainer process.
        update_timeout: seconds one update may take.
    """

    def __init__(self, worker: WorkerHandle, *, update_timeout: float) -> None:
        self.name = worker.name
        self._client = worker.client
        self._timeout = update_timeout

    async def update(self, batch: BlobRef, produce: PolicyVersion) -> StepReport:
        return await self._client.call(
            "update", batch, produce, returns=StepReport, timeout=self._timeout
        )

    async def publish(self) -> WeightUpdate:
        return await self._client.call("publish", returns=WeightUpdate, timeout=self._timeout)

    async def begin_snapshot(self) -> PolicyVersion:
        return await self._client.call(
            "begin_snapshot", returns=PolicyVersion, timeout=self._timeout
        )

    async def snapshot(self) -> TrainerState:
        return await self._client.call("snapshot", returns=TrainerState, timeout=self._timeout)

    async def environment(self) -> Environment:
        """What the bits of this trainer's results depend on."""
        return await self._client.call("environment", returns=Environment, timeout=self._timeout)
