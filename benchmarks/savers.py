"""The contenders of ``checkpoint.py`` and the training that each of them interrupts.

Owns one process: a model that takes training steps, and one way to save its whole state. Every way
writes the same tensors, weights and optimizer moments, and counts as ended when they are on the
device.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from measure import Json, serve
from torch import Tensor
from trainers import Offbeat, Rows, step

from offbeat.train.engine import SingleDeviceEngine

DEADLINE_SECONDS = 600.0


class Contender(Protocol):
    """One way to save. ``begin`` and ``before_step`` are what training waits for."""

    def prepare(self) -> None:
        """What can be paid at the start of a run, after the first optimizer step."""

    def begin(self, number: int) -> None:
        """Save number ``number``, counted from 1; the one before is on the device."""

    def before_step(self) -> None:
        """Called before the optimizer changes what is saved."""

    @property
    def ended(self) -> Future[float]:
        """``time.perf_counter()`` at which the newest save was on the device."""

    def load(self) -> dict[str, Tensor]:
        """The newest save, by the names of ``TrainEngine.state``."""


class TorchSave:
    """``torch.save`` on the training thread, flushed and renamed."""

    def __init__(self, engine: SingleDeviceEngine, folder: Path) -> None:
        self._engine = engine
        self._path = folder / "state.pt"
        self.ended: Future[float] = Future()

    def prepare(self) -> None: ...

    def begin(self, number: int) -> None:
        aside = self._path.with_suffix(".tmp")
        with aside.open("wb") as file:
            torch.save(dict(self._engine.state()), file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
        self.ended = Future()
        self.ended.set_result(time.perf_counter())

    def before_step(self) -> None: ...

    def load(self) -> dict[str, Tensor]:
        return dict(torch.load(self._path))


class Snapshots:
    """Ours: staged by a thread, written by a process; ``wait`` makes training wait for its end."""

    def __init__(self, engine: SingleDeviceEngine, folder: Path, *, wait: bool) -> None:
        from offbeat.checkpoint.snapshot import Snapshots as Writer
        from offbeat.config import ActorConfig
        from offbeat.train.actor import PPOActor
        from offbeat.train.state import StateCopy

        actor = PPOActor(engine, ActorConfig(), temperature=1.0, max_new_tokens=1, seed=0)
        self._folder = folder
        self._copy = StateCopy(actor, engine, ThreadPoolExecutor(max_workers=1))
        self._writer = Writer(folder, keep=1)
        self._wait = wait
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.ended: Future[float] = Future()

    def prepare(self) -> None:
        self._copy.prepare()

    def begin(self, number: int) -> None:
        self._copy.begin()
        self.ended = asyncio.run_coroutine_threadsafe(self._write(number), self._loop)
        if self._wait:
            self.ended.result(timeout=DEADLINE_SECONDS)

    async def _write(self, number: int) -> float:
        staged = await asyncio.wrap_future(self._copy.staged)
        await self._writer.write(_run_state(number), staged)
        await self._writer.ready()
        return time.perf_counter()

    def before_step(self) -> None:
        self._copy.maybe_wait_for_staging()

    def load(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        from offbeat.checkpoint.snapshot import newest_snapshot

        found = newest_snapshot(self._folder)
        assert found is not None
        tensors = load_file(found.tensors)
        del tensors["random_state"]
        return tensors


def _run_state(number: int) -> object:
    from offbeat.checkpoint.saver import ScheduleState
    from offbeat.checkpoint.snapshot import Counts, RunState
    from offbeat.types import GroupId, PolicyVersion

    return RunState(
        step=number,
        version=PolicyVersion(0),
        attempt=1,
        next_group_id=GroupId(0),
        open_groups=(),
        lookahead=1,
        counts=Counts(),
        saved=False,
        save=ScheduleState(),
        evaluate=ScheduleState(),
        snapshot=ScheduleState(),
    )


class TorchAsync:
    """``torch.distributed.checkpoint.async_save`` through its process, staged by its thread."""

    def __init__(self, engine: SingleDeviceEngine, folder: Path) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._dcp, self._kind = dcp, AsyncCheckpointerType.PROCESS
        # Pinned memory and copies that do not block need an accelerator.
        self._stager = DefaultStager(StagingOptions(False, True, True, False))
        self._group = dist.new_group(backend="gloo")
        self._engine = engine
        self._folder = folder
        self._path = folder / "save-0"
        self._staged: Future[object] = Future()
        self._staged.set_result(None)
        self.ended: Future[float] = Future()

    def _save(self, state: dict[str, Tensor], path: Path) -> None:
        response = self._dcp.async_save(
            state,
            checkpoint_id=path,
            async_stager=self._stager,
            process_group=self._group,
            async_checkpointer_type=self._kind,
        )
        self._staged, ended = response.staging_completion, Future[float]()
        response.upload_completion.add_done_callback(
            lambda done: (
                ended.set_exception(done.exception())
                if done.exception()
                else ended.set_result(time.perf_counter())
            )
        )
        self.ended = ended

    def prepare(self) -> None:
        """Its process starts with the first save, and its buffers are made by the first copy."""
        self._save(dict(self._engine.state()), self._folder / "warm-up")
        self.ended.result(timeout=DEADLINE_SECONDS)
        shutil.rmtree(self._folder / "warm-up")

    def begin(self, number: int) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._path = self._folder / f"save-{number}"
        self._save(dict(self._engine.state()), self._path)

    def before_step(self) -> None:
        self._staged.result(timeout=DEADLINE_SECONDS)

    def load(self) -> dict[str, Tensor]:
        state = {name: torch.empty_like(t) for name, t in self._engine.state()}
        self._dcp.load(state, checkpoint_id=self._path, no_dist=True)
        return state


BUILDERS: dict[str, Callable[[SingleDeviceEngine, Path], Contender]] = {
    "torch_save": TorchSave,
    "sync": lambda engine, folder: Snapshots(engine, folder, wait=True),
    "async": lambda engine, folder: Snapshots(engine, folder, wait=False),
    "torch_async": TorchAsync,
}


class Training:
    """A model that trains on the same rows again and again, and one contender."""

    def __init__(self, name: str, model: str, folder: str) -> None:
        self._trainer = Offbeat(Path(model), "float32", 0)
        self._engine = self._trainer.engine
        self._contender = BUILDERS[name](self._engine, Path(folder))
        self._saves = 0

    def start(self, rows: Json) -> Json:
        """The first step, after which the optimizer has its moments."""
        self._rows = Rows(**rows)
        self._step(lambda: None)
        self._contender.prepare()
        self._step(lambda: None)
        return {"state_mb": sum(t.nbytes for _, t in self._engine.state()) / 1e6}

    def save(self, idle_steps: int) -> Json:
        """Steps without a save, then a save with as many steps as it takes to end."""
        idle = [self._step(lambda: None)[0] for _ in range(idle_steps)]
        self._saves += 1
        began = time.perf_counter()
        self._contender.begin(self._saves)
        blocked = time.perf_counter() - began
        busy = []
        while not self._contender.ended.done():
            seconds, waited = self._step(self._contender.before_step)
            busy.append(seconds)
            blocked += waited
        ended = self._contender.ended.result() - began
        slower = sum(busy) / len(busy) / (sum(idle) / len(idle)) if busy else 1.0
        return {"blocked": blocked, "ended": ended, "slower": slower, "steps": len(busy)}

    def verify(self) -> Json:
        """Save while training goes on; what lies on the device must be the state of before."""
        before = {name: t.clone() for name, t in self._engine.state()}
        self._saves += 1
        self._contender.begin(self._saves)
        self._step(self._contender.before_step)
        self._contender.ended.result(timeout=DEADLINE_SECONDS)
        return {"saved": _digest(self._contender.load()), "was": _digest(before)}

    def _step(self, before: Callable[[], None]) -> tuple[float, float]:
        """Seconds of one training step, and seconds that ``before`` took of it in addition."""
        began = time.perf_counter()
        step(self._trainer, self._rows)
        asked = time.perf_counter()
        before()
        waited = time.perf_counter() - asked
        self._engine.optimizer_step()
        return time.perf_counter() - began - waited, waited


def _digest(tensors: dict[str, Tensor]) -> str:
    from offbeat.weights.memory import digest_of_params

    return digest_of_params(tensors)


def main() -> None:
    """Serve one contender; see ``measure.serve``."""
    parser = argparse.ArgumentParser(description="A worker of checkpoint.py; not for use by hand.")
    parser.add_argument("name", choices=list(BUILDERS))
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training: list[Training] = []

    def load(model: str, folder: str) -> Json:
        training.append(Training(options.name, model, folder))
        gc.collect()
        return {"vocab": training[0]._trainer.model.get_input_embeddings().weight.shape[0]}

    serve(
        {
            "load": load,
            "start": lambda rows: training[0].start(rows),
            "save": lambda idle_steps: training[0].save(idle_steps),
            "verify": lambda: training[0].verify(),
        }
    )


if __name__ == "__main__":
    main()
