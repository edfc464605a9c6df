"""When a snapshot that was taken is handed over to be written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from offbeat.checkpoint.saver import ScheduleState
from offbeat.checkpoint.snapshot import Counts, RunState
from offbeat.pipeline.snapshots import SnapshotTaker
from offbeat.types import GroupId, PolicyVersion, TrainerState

AT_THE_START = RunState(
    step=0,
    version=PolicyVersion(0),
    attempt=1,
    next_group_id=GroupId(2),
    open_groups=(GroupId(0), GroupId(1)),
    lookahead=2,
    counts=Counts(),
    saved=False,
    save=ScheduleState(),
    evaluate=ScheduleState(),
    snapshot=ScheduleState(),
)


class Kept:
    """A ``SnapshotWriter`` that keeps what it is given."""

    def __init__(self) -> None:
        self.runs: list[RunState] = []

    async def ready(self) -> None: ...

    async def write(self, run: RunState, trainer: TrainerState) -> None:
        self.runs.append(run)


@pytest.mark.invariant("I04")
async def test_snapshot_is_handed_over_only_once_its_step_is_recorded(
    open_rig: Callable[..., Awaitable[Any]], spin: Callable[[], Awaitable[None]]
) -> None:
    rig, kept = await open_rig(steps=1), Kept()
    taker = SnapshotTaker(kept, rig.trainer, rig.recorder, None)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        await taker.take(AT_THE_START, tasks)
        await spin()
        taker.recorded(1)
        await spin()
        assert kept.runs == []
        taker.recorded(0)
    assert kept.runs == [AT_THE_START]
