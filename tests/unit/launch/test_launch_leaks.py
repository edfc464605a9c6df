"""What is left after a scheduler has ended: nothing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.errors import ModelError, StallError
from offbeat.launch.protocols import WorkerSpec
from offbeat.launch.scheduler import SCHEDULERS, make_scheduler

MakeSpec = Callable[..., WorkerSpec]


@pytest.mark.parametrize("kind", list(SCHEDULERS))
async def test_nothing_is_left_behind(kind: str, tmp_path: Path, make_spec: MakeSpec) -> None:
    async def once() -> None:
        async with make_scheduler(kind, tmp_path / "logs") as scheduler:
            handle = await scheduler.start(make_spec())
            await handle.client.call("add", 1, returns=int, timeout=5)
            with pytest.raises(ModelError):
                await scheduler.start(make_spec("open_model_error", name="echo-1"))
            with pytest.raises(StallError):
                await handle.client.call("hang", "late", timeout=0.05)

    await once()
    before = sorted(os.listdir("/proc/self/fd"))
    await once()
    await asyncio.sleep(0)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert len(asyncio.all_tasks()) == 1
