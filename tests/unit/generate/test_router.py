"""Which replica a request goes to, and what becomes of an error of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from offbeat.errors import WeightSyncError
from offbeat.generate.router import Router
from offbeat.types import (
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    StopReason,
    WeightUpdate,
)

Ask = Callable[..., GenerateRequest]


class Replica:
    """A generator that answers at once and notes what it was asked."""

    def __init__(self, number: int = 0, fail: Exception | None = None) -> None:
        self.number, self.fail = number, fail
        self.seen: list[str] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.seen.append(request.request_id)
        none = np.zeros(0, dtype=np.int64)
        return Completion(
            token_ids=none,
            logprobs=none.astype(np.float32),
            versions=none,
            stop_reason=StopReason.STOP,
            text=str(self.number),
        )

    async def stage(self, update: WeightUpdate) -> None:
        self.seen.append(f"stage {update.version}")

    async def commit(self, version: PolicyVersion) -> float:
        if self.fail is not None:
            raise self.fail
        self.seen.append(f"commit {version}")
        return 0.1 * (self.number + 1)

    async def pause(self) -> None:
        self.seen.append("pause")

    async def resume(self) -> None:
        self.seen.append("resume")

    async def abort(self, request_ids: Sequence[str]) -> int:
        return len(set(request_ids) & set(self.seen))

    async def stats(self) -> GeneratorStats:
        n = self.number
        return GeneratorStats(
            version=PolicyVersion(5 - n),
            slots=4,
            running=1 + n,
            waiting=2,
            prefill_tokens=10,
            decode_tokens=20 + n,
            finished=3,
            aborted=n,
            paused=n == 1,
            peak_rss_bytes=100,
            decode_spans=((2.0 - n, 3.0),),
            prefill_spans=((float(n), 9.0),),
        )


async def test_siblings_stick_to_one_replica_and_groups_spread(ask: Ask) -> None:
    replicas = [Replica(i) for i in range(3)]
    router = Router(replicas)
    for group in range(7):
        texts = {
            (await router.generate(ask(group=group, sibling=s, name=f"{group}-{s}"))).text
            for s in range(4)
        }
        assert texts == {str(group % 3)}
    assert [len(r.seen) for r in replicas] == [12, 8, 8]


async def test_evaluation_requests_take_turns(ask: Ask) -> None:
    replicas = [Replica(i) for i in range(3)]
    router = Router(replicas)
    for _ in range(9):
        await router.generate(ask(group=-1))
    assert [len(r.seen) for r in replicas] == [3, 3, 3]


async def test_control_calls_go_to_all_and_answers_are_combined() -> None:
    replicas = [Replica(i) for i in range(3)]
    router = Router(replicas)
    await router.pause()
    await router.resume()
    update = WeightUpdate(version=PolicyVersion(2), uri="", nbytes=0, digest="")
    await router.stage(update)
    assert await router.commit(PolicyVersion(2)) == pytest.approx(0.3)
    assert all(r.seen == ["pause", "resume", "stage 2", "commit 2"] for r in replicas)
    assert await router.abort(["pause", "unknown"]) == 3

    stats = await router.stats()
    assert (stats.version, stats.slots, stats.running, stats.waiting) == (3, 12, 6, 6)
    assert (stats.prefill_tokens, stats.decode_tokens) == (30, 63)
    assert (stats.finished, stats.aborted, stats.paused) == (9, 3, True)
    assert stats.peak_rss_bytes == 300
    assert stats.decode_spans == ((0.0, 3.0), (1.0, 3.0), (2.0, 3.0))
    assert stats.prefill_spans == ((0.0, 9.0), (1.0, 9.0), (2.0, 9.0))


async def test_the_error_of_one_replica_is_raised_as_it_is() -> None:
    error = WeightSyncError("generator-1: commit of version 2: nothing is staged")
    router = Router([Replica(0), Replica(1, fail=error)])
    with pytest.raises(WeightSyncError, match="generator-1") as caught:
        await router.commit(PolicyVersion(2))
    assert caught.value is error


def test_a_router_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        Router([])
