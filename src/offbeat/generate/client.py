"""The controller's side of a generator process; loads no torch.

Owns the start-up specification that crosses to the process, and the typed calls to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.launch.protocols import WorkerHandle
from offbeat.types import Completion, GenerateRequest, GeneratorStats, PolicyVersion, WeightUpdate

TARGET = "offbeat.generate.server:open_service"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """What a generator process needs to start.

    ``max_len`` is the most tokens (prompt plus answer) of one request; ``dtype`` null is the
    device's default; ``onednn_linears``: see ``ModelConfig``.
    """

    model_path: str
    dtype: str | None
    device: str
    slots: int
    max_len: int
    onednn_linears: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine found out about itself at start-up.

    ``bitwise``: cached decode and the packed training pass gave equal bits on this machine, with
    these threads; otherwise ``max_error`` is their largest difference in log-prob (nats).
    ``onednn``: linear layers go through oneDNN (``model/linear.py``).
    """

    device: str
    dtype: str
    threads: int
    bitwise: bool
    max_error: float
    parameters: int
    onednn: bool


class RemoteGenerator:
    """``Generator`` over a worker's HTTP endpoint.

    Args:
        worker: the generator process.
        request_timeout: seconds one completion may take, waiting included.
        control_timeout: seconds a control call (stage, commit, stats) may take.
    """

    def __init__(
        self, worker: WorkerHandle, *, request_timeout: float, control_timeout: float = 120.0
    ) -> None:
        self.name = worker.name
        self._client = worker.client
        self._request_timeout = request_timeout
        self._control_timeout = control_timeout

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._client.call(
            "generate", request, returns=Completion, timeout=self._request_timeout
        )

    async def stage(self, update: WeightUpdate) -> None:
        await self._client.call("stage", update, timeout=self._control_timeout)

    async def commit(self, version: PolicyVersion) -> float:
        return await self._client.call(
            "commit", version, returns=float, timeout=self._control_timeout
        )

    async def pause(self) -> None:
        await self._client.call("pause", timeout=self._control_timeout)

    async def resume(self) -> None:
        await self._client.call("resume", timeout=self._control_timeout)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return await self._client.call(
            "abort", list(request_ids), returns=int, timeout=self._control_timeout
        )

    async def stats(self) -> GeneratorStats:
        return await self._client.call(
            "stats", returns=GeneratorStats, timeout=self._control_timeout
        )

    async def info(self) -> EngineInfo:
        """What the engine found out about itself at start-up."""
        return await self._client.call("info", returns=EngineInfo, timeout=self._control_timeout)
