"""The trainer's whole state as one file in memory, and back from a file.

Owns the copy that a snapshot is written from while training goes on, and the thread that makes it:

    begin()                     returns at once      … the thread copies, an update computes …
    maybe_wait_for_staging()    before its optimizer step, which would change what is copied
    staged                      … the thread takes the digest; then the copy can be read

Knows no model: an engine names its tensors. The only random state of the process is torch's own
generator; minibatches are cut by the seed and the version.
"""

from __future__ import annotations

import os
import platform
import threading
from concurrent.futures import Executor, Future
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import CheckpointError, boundary
from offbeat.train.actor import PPOActor
from offbeat.train.client import Restore
from offbeat.train.engine import TrainEngine
from offbeat.types import Environment, PolicyVersion, TrainerState
from offbeat.weights.memory import MemoryPublisher

_RANDOM = "random_state"


class StateCopy:
    """Memory that holds the state of one actor. Close it at the end, after its thread.

    Args:
        actor, engine: whose state it is.
        thread: fills the memory; has one worker.
    """

    def __init__(self, actor: PPOActor, engine: TrainEngine, thread: Executor) -> None:
        self._actor = actor
        self._engine = engine
        self._random = torch.get_rng_state()
        self._tensors: dict[str, Tensor] = {}
        self._memory: MemoryPublisher | None = None
        self._thread = thread
        self._copied = threading.Event()
        self._copied.set()
        self._staged: Future[TrainerState] | None = None

    def prepare(self) -> None:
        """Have the memory made now, in the thread, so that the first copy does not wait for it.

        To be called again when the state has grown: an optimizer has no moments before its first
        step.
        """
        self._thread.submit(self._room_for, self._state())

    def begin(self) -> PolicyVersion:
        """Begin to copy the state as it is now, over the copy before; returns its version.

        Raises:
            TrainingError: the weights are between two versions.
        """
        version = self._actor.whole_version()
        self._random.copy_(torch.get_rng_state())
        self._copied.clear()
        self._staged = self._thread.submit(
            self._stage, version, self._state(), self._engine.optimizer_steps, environment()
        )
        return version

    def maybe_wait_for_staging(self) -> None:
        """Return when nothing reads the live state any more. An error of the copy is raised by
        ``staged``, not here.
        """
        self._copied.wait()

    @property
    def staged(self) -> Future[TrainerState]:
        """The copy that was begun last; ends with a WeightSyncError when there is no memory.

        Raises:
            CheckpointError: none was begun.
        """
        if self._staged is None:
            raise CheckpointError("no snapshot of the trainer was begun")
        return self._staged

    def _state(self) -> dict[str, Tensor]:
        return {**dict(self._engine.state()), _RANDOM: self._random}

    def _room_for(self, tensors: dict[str, Tensor]) -> MemoryPublisher:
        if self._memory is None or not _same(tensors, self._tensors):
            # A parameter has got its first gradient, and the optimizer its moments.
            if self._memory is not None:
                self._memory.close()
            self._tensors, self._memory = tensors, MemoryPublisher(tensors.items())
        return self._memory

    def _stage(
        self,
        version: PolicyVersion,
        tensors: dict[str, Tensor],
        optimizer_steps: int,
        where: Environment,
    ) -> TrainerState:
        try:
            memory = self._room_for(tensors)
            memory.fill(version)
        finally:
            self._copied.set()
        return TrainerState(
            tensors=memory.announce(version), optimizer_steps=optimizer_steps, environment=where
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
