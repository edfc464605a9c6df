"""The trainer's whole state as one file in memory, and back from a file.

Owns the copy that a snapshot is written from while training goes on: ``copy`` blocks for the time
of a memory copy and a digest, and the next one overwrites it. Knows no model: an engine names its
tensors. The only random state of the process is torch's own generator; minibatches are cut by the
seed and the version.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import CheckpointError, boundary
from offbeat.train.actor import PPOActor
from offbeat.train.client import Restore
from offbeat.train.engine import TrainEngine
from offbeat.types import Environment, TrainerState
from offbeat.weights.memory import MemoryPublisher

_RANDOM = "random_state"


class StateCopy:
    """Memory that holds the state of one actor; made at the first ``take``. Close it at the end."""

    def __init__(self, actor: PPOActor, engine: TrainEngine) -> None:
        self._actor = actor
        self._engine = engine
        self._random = torch.get_rng_state()
        self._tensors: dict[str, Tensor] = {}
        self._memory: MemoryPublisher | None = None

    def take(self) -> TrainerState:
        """Copy the state as it is now, over the copy before.

        Raises:
            TrainingError: the weights are between two versions.
            WeightSyncError: there is no memory for it.
        """
        version = self._actor.whole_version()
        self._random.copy_(torch.get_rng_state())
        tensors = {**dict(self._engine.state()), _RANDOM: self._random}
        if self._memory is None or not _same(tensors, self._tensors):
            # A parameter has got its first gradient, and the optimizer its moments.
            self.close()
            self._tensors, self._memory = tensors, MemoryPublisher(tensors.items())
        return TrainerState(
            tensors=self._memory.publish(version),
            optimizer_steps=self._engine.optimizer_steps,
            environment=environment(),
        )

    def close(self) -> None:
        """Give the memory up; a writer keeps what it has mapped. May be called twice."""
        if self._memory is not None:
            self._memory.close()


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name] is right[name] for name in left)


def restore(actor: PPOActor, engine: TrainEngine, place: Restore) -> None:
    """Bring a fresh actor and its engine to the state in a file.

    Raises:
        CheckpointError: it cannot be read, or is not the state of this model.
    """
    with boundary(CheckpointError, f"restore the trainer from {place.path}"):
        state = load_file(Path(place.path))
        engine.restore(state, place.optimizer_steps)
        torch.set_rng_state(state[_RANDOM])
    actor.resume(place.version)


def environment() -> Environment:
    """What the bits of this process's results depend on."""
    processor, flags = _processor()
    return Environment(
        torch=str(torch.__version__),
        build=torch.__config__.show(),
        threads=torch.get_num_threads(),
        processor=processor,
        cpu_flags=flags,
    )


def _processor() -> tuple[str, tuple[str, ...]]:
    """Name and instruction sets of the first core, where the system tells."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = found.get("flags", found.get("Features", ""))
    return found.get("model name", platform.machine()), tuple(sorted(flags.split()))
