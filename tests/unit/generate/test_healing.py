"""A lost generator process is replaced before anybody gets a wrong or no answer."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from healing_service import BLOCK, HOLD, NEVER

from offbeat.errors import CheckpointError, StallError, WorkerError
from offbeat.generate import healing
from offbeat.generate.healing import HealingGenerator, while_healing
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerSpec
from offbeat.types import (
    OUTSIDE_GROUP,
    Completion,
    GenerateRequest,
    GroupId,
    PolicyVersion,
    SamplingParams,
    WeightUpdate,
)


def request(token: int, *, seed: int = 42, name: str = "r") -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        group_id=GroupId(0),
        sibling=0,
        turn=0,
        prompt_ids=np.array([token], dtype=np.int64),
        params=SamplingParams(max_new_tokens=3),
        seed=seed,
    )


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=PolicyVersion(version), uri="x", nbytes=0, digest="x")


@dataclass
class Rig:
    generator: HealingGenerator
    gate: asyncio.Lock
    folder: Path
    losses: list[str]

    async def until_seen(self) -> None:
        while not (self.folder / "seen").exists():  # noqa: ASYNC110  # made by another process
            await asyncio.sleep(0.01)

    async def publish(self, version: int) -> float:
        async with self.gate:
            await self.generator.stage(update(version))
            return await self.generator.commit(PolicyVersion(version))

    def kill(self) -> None:
        os.kill(self.generator.worker.pid, signal.SIGKILL)


@asynccontextmanager
async def rig(folder: Path, **options: float) -> AsyncIterator[Rig]:
    spec = WorkerSpec(
        name="generator-0",
        target="healing_service:open_service",
        payload=str(folder).encode(),
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )
    losses: list[str] = []
    gate = asyncio.Lock()
    async with LocalScheduler(folder / "logs", grace=0.1) as scheduler:
        replaced = HealingGenerator(
            await scheduler.start(spec),
            spec,
            scheduler,
            gate=gate,
            **{  # type: ignore[arg-type]  # of a test
                "heartbeat_seconds": 30.0,
                "max_restarts": 2,
                "request_timeout": 30.0,
                **options,
            },
            on_restart=lambda name, why: losses.append(why),
        )
        async with replaced as generator, while_healing([generator]):
            yield Rig(generator, gate, folder, losses)


@pytest.mark.invariant("I13")
async def test_a_killed_process_is_replaced_and_its_open_request_answered(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, asyncio.TaskGroup() as group:
        waiting = group.create_task(r.generator.generate(request(HOLD)))
        await r.until_seen()
        before = r.generator.worker.pid
        r.kill()
        answer = await waiting
        assert answer.token_ids.tolist() == [42, 42, 42]
        assert r.generator.restarts == len(r.losses) == 1
        assert "killed by SIGKILL" in r.losses[0]
        assert r.generator.worker.pid != before


@pytest.mark.invariant("I06")
async def test_a_new_process_has_the_live_weights_before_its_first_token(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert await r.publish(1) == 0.25
        assert await r.publish(2) == 0.25
        r.kill()
        answer = await r.generator.generate(request(1))
        assert answer.versions.tolist() == [2, 2, 2]


async def test_a_process_lost_while_weights_are_published_gets_the_new_ones(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as r:
        await r.publish(1)
        (tmp_path / "die-at-commit").touch()
        assert await r.publish(2) == 0.0
        answer: Completion = await r.generator.generate(request(1))
        assert answer.versions.tolist() == [2, 2, 2]
        assert await r.publish(3) == 0.25


async def test_a_new_process_reads_no_weights_while_others_are_being_written(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as r:
        await r.publish(1)
        async with r.gate:
            r.kill()
            await r.generator.stage(update(2))  # the old process is dead, or about to be found dead
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await r.generator.generate(request(1))
            await r.generator.commit(PolicyVersion(2))
        answer = await r.generator.generate(request(1))
        assert answer.versions.tolist() == [2, 2, 2]


@pytest.mark.invariant("I13")
async def test_a_stopped_process_misses_its_heartbeat_and_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, heartbeat_seconds=0.4) as r:
        answer = await r.generator.generate(request(BLOCK))
        assert answer.token_ids.tolist() == [42, 42, 42]
        assert r.losses == ["generator-0 has not answered for 0.4 s"]


@pytest.mark.invariant("I12")
async def test_a_process_that_lives_and_never_answers_a_request_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "DEATH_NOTICE_SECONDS", 0.1)
    async with rig(tmp_path, request_timeout=0.5) as r:
        answer = await r.generator.generate(request(HOLD))
        assert answer.token_ids.tolist() == [42, 42, 42]
        assert len(r.losses) == 1
        assert r.losses[0].startswith("generator-0: no answer to request r in 0.5 s")


@pytest.mark.invariant("I12")
async def test_what_the_next_process_does_not_answer_either_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "DEATH_NOTICE_SECONDS", 0.1)
    async with rig(tmp_path, request_timeout=0.5) as r:
        with pytest.raises(StallError, match=r"no answer to request r in 0\.5 s"):
            await r.generator.generate(request(NEVER))
        assert r.generator.restarts == 1


async def test_a_restart_is_one_whole_sentence_before_the_end_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path) as r:
        await r.generator.generate(request(1))  # who answers has written to its log
        pid = r.generator.worker.pid
        r.kill()
        await r.generator.generate(request(1))
        (line,) = [m for m in caplog.messages if "restarting" in m]
    log_file = tmp_path / "logs" / "generator-0.log"
    assert line.startswith(
        f"generator-0 (pid {pid}) was killed by SIGKILL (out of memory?); "
        f"restarting it (1 of 2); end of {log_file}:\n"
    )
    assert "generator-0 serves healing_service" in line


async def test_a_process_that_dies_while_it_starts_counts_as_another_loss(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        (tmp_path / "born-dead").touch()
        r.kill()
        assert (await r.generator.generate(request(1))).token_ids.tolist() == [42, 42, 42]
        assert r.generator.restarts == 2


async def test_too_many_losses_end_the_run_with_the_last_reason(tmp_path: Path) -> None:
    async def lose_two() -> None:
        async with rig(tmp_path, max_restarts=1) as r:
            for _ in range(2):
                r.kill()
                await r.generator.generate(request(1))

    with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
        await lose_two()
    assert "restarted 1 times already (generator.max_restarts)" in str(caught.value)


@pytest.mark.invariant("I13")
async def test_no_process_is_replaced_for_somebody_outside_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "DEATH_NOTICE_SECONDS", 0.1)
    outside = dataclasses.replace(request(NEVER), group_id=OUTSIDE_GROUP)
    async with rig(tmp_path, request_timeout=0.5) as r:
        with pytest.raises(StallError, match=r"no answer to request r in 0\.5 s"):
            await r.generator.generate(outside)
        assert r.generator.restarts == 0


@pytest.mark.invariant("I12")
async def test_a_successor_that_cannot_be_used_ends_the_run(tmp_path: Path) -> None:
    def full_disk(_: object) -> None:
        raise CheckpointError("run.db: No space left on device")

    async def lose() -> None:
        async with rig(tmp_path) as r:
            r.kill()
            await r.generator.generate(request(1))
            assert r.generator._generator is not None
            # As if its next lost reply could not be written to the ledger.
            r.generator._generator._say_repeated = full_disk  # type: ignore[method-assign,assignment]
            await r.generator.generate(request(NEVER, name="s"))

    with pytest.raises(CheckpointError, match="No space left"):
        async with asyncio.timeout(20):
            await lose()


async def test_who_counts_does_not_wait_for_a_successor(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        before = await r.generator.stats()
        async with r.gate:  # nobody can catch up while it is held
            r.kill()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await r.generator.generate(request(1))
            async with asyncio.timeout(5):
                again = await r.generator.stats()
        assert again.finished == before.finished
        assert again.decode_spans == ()
