"""The service around the engine: what its calls wait for, and what they leave behind.

A forward pass is held open by a hook of the model, so that no test depends on time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from offbeat.errors import GenerationError, PromptTooLong, WeightSyncError
from offbeat.generate.client import EngineInfo
from offbeat.generate.engine.engine import Engine
from offbeat.generate.server import GeneratorService
from offbeat.types import Completion, GenerateRequest, PolicyVersion, StopReason
from offbeat.weights.memory import MemoryPublisher, MemorySubscriber, digest_of_params

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)

INFO = EngineInfo(
    device="cpu",
    dtype="float32",
    threads=1,
    bitwise=True,
    max_error=0.0,
    parameters=1,
    onednn=False,
)


class Gate:
    """Holds every forward pass of a model while closed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._open, self._entered = threading.Event(), threading.Event()
        self._open.set()
        model.base_model.register_forward_pre_hook(self._pass)

    def _pass(self, *_: object) -> None:
        self._entered.set()
        self._open.wait(30)

    def close(self) -> None:
        self._entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def entered(self) -> None:
        """Return when a pass is held."""
        assert await asyncio.to_thread(self._entered.wait, 10)


@pytest.fixture
def gate(model: PreTrainedModel) -> Iterator[Gate]:
    gate = Gate(model)
    yield gate
    gate.open()


@pytest.fixture
async def service(
    model: PreTrainedModel, gate: Gate, make_engine: MakeEngine
) -> AsyncIterator[GeneratorService]:
    subscriber = MemorySubscriber(dict(model.named_parameters()))
    service = GeneratorService(make_engine(slots=2, model=model), subscriber, INFO)
    async with asyncio.timeout(30):
        yield service
        gate.open()
        await service.close()
    subscriber.close()


@asynccontextmanager
async def running(*calls: Awaitable[Completion]) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    async with asyncio.TaskGroup() as group:
        yield [group.create_task(call) for call in calls]


async def turns(service: GeneratorService, n: int = 20) -> None:
    """Let the engine thread go round ``n`` times; it steps in each, unless paused."""
    for _ in range(n):
        await service.abort([])


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


async def test_stats_and_info_answer_while_a_forward_pass_runs(
    service: GeneratorService, gate: Gate, ask: Ask
) -> None:
    gate.close()
    async with running(service.generate(ask(9, 4))):
        await gate.entered()
        async with asyncio.timeout(5):
            stats = await service.stats()
            assert await service.info() == INFO
        assert (stats.running, stats.prefill_tokens, stats.finished) == (1, 0, 0)
        gate.open()
    stats = await service.stats()
    assert (stats.running, stats.prefill_tokens, stats.finished) == (0, 9, 1)
    assert stats.prefill_spans


async def test_pause_returns_with_the_running_pass_and_none_starts_after_it(
    service: GeneratorService, gate: Gate, ask: Ask, make_engine: MakeEngine, run: Run
) -> None:
    request = ask(9, 40)
    gate.close()
    async with running(service.generate(request)) as (call,):
        await gate.entered()
        pause = asyncio.ensure_future(service.pause())
        await asyncio.sleep(0)
        assert (await service.stats()).paused
        assert not pause.done()
        gate.open()
        await pause
        held = await service.stats()
        await turns(service)
        later = await service.stats()
        assert (later.decode_tokens, later.prefill_tokens) == (
            held.decode_tokens,
            held.prefill_tokens,
        )
        assert (later.running, later.decode_spans, later.paused) == (1, (), True)
        assert not call.done()
        await service.resume()
    assert not (await service.stats()).paused
    assert same_bits(call.result(), run(make_engine(), request)[request.request_id])


async def test_requests_sent_while_paused_wait(service: GeneratorService, ask: Ask) -> None:
    await service.pause()
    async with running(*(service.generate(ask(9 + i, 4)) for i in range(3))) as calls:
        await turns(service)
        stats = await service.stats()
        assert (stats.waiting, stats.running, stats.prefill_tokens) == (3, 0, 0)
        await service.resume()
    assert [c.result().stop_reason for c in calls] == [StopReason.LENGTH] * 3


async def test_a_commit_waits_for_the_running_pass(
    service: GeneratorService, model: PreTrainedModel, gate: Gate, ask: Ask
) -> None:
    doubled = {k: 2 * v for k, v in model.named_parameters()}
    head = model.get_output_embeddings().weight
    before = head.detach().clone()
    with MemoryPublisher(doubled.items()) as publisher:
        gate.close()
        async with running(service.generate(ask(9, 6))) as (call,):
            await gate.entered()
            await service.stage(publisher.publish(V1))
            commit = asyncio.ensure_future(service.commit(V1))
            await asyncio.sleep(0)
            assert (await service.stats()).version == 0
            assert not commit.done()
            assert torch.equal(head, before)
            gate.open()
            assert await commit >= 0
            assert torch.equal(head, 2 * before)
    versions = call.result().versions
    # The pass that was held belongs to version 0 and wrote at least one token.
    assert versions[0] == 0
    assert (np.diff(versions) >= 0).all()
    assert (await service.stats()).version == 1


@pytest.mark.invariant("I14")
async def test_live_weights_have_the_digest_of_the_committed_update(
    service: GeneratorService, model: PreTrainedModel
) -> None:
    live = dict(model.named_parameters())
    tripled = {k: 3 * v.detach() for k, v in live.items()}
    with MemoryPublisher(tripled.items()) as publisher:
        update = publisher.publish(V1)
        assert digest_of_params(live) != update.digest
        await service.stage(update)
        assert digest_of_params(live) != update.digest
        await service.commit(V1)
        assert digest_of_params(live) == update.digest


async def test_a_commit_of_what_is_not_staged_changes_nothing(
    service: GeneratorService, model: PreTrainedModel
) -> None:
    live = dict(model.named_parameters())
    digest = digest_of_params(live)
    with MemoryPublisher({k: 3 * v.detach() for k, v in live.items()}.items()) as publisher:
        with pytest.raises(WeightSyncError, match="nothing is staged"):
            await service.commit(V1)
        await service.stage(publisher.publish(V1))
        with pytest.raises(WeightSyncError, match="version 1 is staged"):
            await service.commit(V2)
    assert (await service.stats()).version == 0
    assert digest_of_params(live) == digest


async def test_bad_weights_fail_every_request_and_good_ones_serve_again(
    service: GeneratorService, model: PreTrainedModel, gate: Gate, ask: Ask
) -> None:
    good = {k: v.detach().clone() for k, v in model.named_parameters()}
    first = await service.generate(ask(9, 6, seed=5))
    bad = {k: torch.full_like(v, torch.nan) for k, v in good.items()}
    with MemoryPublisher(good.items()) as goods, MemoryPublisher(bad.items()) as bads:
        gate.close()
        calls = [asyncio.ensure_future(service.generate(ask(9 + i, 30))) for i in range(4)]
        await gate.entered()
        await service.stage(bads.publish(V1))
        commit = asyncio.ensure_future(service.commit(V1))
        gate.open()
        await commit
        for call in calls:
            with pytest.raises(GenerationError, match="non-finite log-probs at version 1"):
                await call
        stats = await service.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        await service.stage(goods.publish(V2))
        await service.commit(V2)
    again = await service.generate(ask(9, 6, seed=5))
    assert same_bits(first, again)
    assert set(again.versions) == {2}


async def test_a_row_that_is_not_finite_fails_its_caller_only(
    service: GeneratorService, model: PreTrainedModel, gate: Gate, ask: Ask
) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = torch.nan
        head.weight[3] = 0.0
    gate.close()
    async with running(service.generate(ask(9, 4, temperature=0.0))) as (neighbor,):
        await gate.entered()
        bad = asyncio.ensure_future(service.generate(ask([7, 3], 4, name="bad")))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(GenerationError, match="request bad: non-finite"):
            await bad
    assert len(neighbor.result().token_ids) == 4
    assert len((await service.generate(ask(9, 4, name="bad", temperature=0.0))).token_ids) == 4


async def test_a_request_that_comes_with_a_failing_pass_is_not_failed_with_it(
    service: GeneratorService, model: PreTrainedModel, gate: Gate, ask: Ask
) -> None:
    """It was never in the engine: it is served by the pass after the failed one."""
    gate.close()
    failing = asyncio.ensure_future(service.generate(ask(9, 6)))
    await gate.entered()
    late = asyncio.ensure_future(service.generate(ask(10, 6)))
    await asyncio.sleep(0)
    good = {k: v.detach().clone() for k, v in model.named_parameters()}
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    with MemoryPublisher(good.items()) as publisher:
        await service.stage(publisher.publish(V1))
        # Runs after the submission of ``late`` and before the pass that serves it.
        commit = asyncio.ensure_future(service.commit(V1))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(GenerationError, match="non-finite"):
            await failing
        await commit
    answer = await late
    assert (answer.stop_reason, set(answer.versions)) == (StopReason.LENGTH, {1})
    stats = await service.stats()
    assert (stats.running, stats.finished) == (0, 1)


async def test_cancelling_a_call_frees_its_slot(
    service: GeneratorService, gate: Gate, ask: Ask
) -> None:
    gate.close()
    calls = [asyncio.ensure_future(service.generate(ask(9 + i, 400))) for i in range(2)]
    await gate.entered()
    waiting = asyncio.ensure_future(service.generate(ask(20, 3)))
    for call in calls:
        call.cancel()
    gate.open()
    assert (await waiting).stop_reason is StopReason.LENGTH
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    stats = await service.stats()
    assert (stats.running, stats.waiting, stats.finished, stats.aborted) == (0, 0, 1, 2)


async def test_a_cancelled_request_sent_again_gets_its_own_answer(
    service: GeneratorService, gate: Gate, ask: Ask, make_engine: MakeEngine, run: Run
) -> None:
    request = ask(9, 30, name="again")
    gate.close()
    first = asyncio.ensure_future(service.generate(request))
    await gate.entered()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.ensure_future(service.generate(request))
    await asyncio.sleep(0)
    gate.open()
    answer = await second
    assert answer.stop_reason is StopReason.LENGTH
    assert same_bits(answer, run(make_engine(), request)["again"])


async def test_a_request_id_in_use_is_refused_and_the_first_call_goes_on(
    service: GeneratorService, gate: Gate, ask: Ask
) -> None:
    gate.close()
    async with running(service.generate(ask(9, 4, name="same"))) as (call,):
        await gate.entered()
        with pytest.raises(GenerationError, match="same is already running"):
            await service.generate(ask(9, 4, name="same"))
        gate.open()
    assert len(call.result().token_ids) == 4
    assert len((await service.generate(ask(9, 4, name="same"))).token_ids) == 4


async def test_a_refused_request_leaves_its_id_free(service: GeneratorService, ask: Ask) -> None:
    with pytest.raises(PromptTooLong):
        await service.generate(ask(9, 1000, name="same"))
    assert len((await service.generate(ask(9, 4, name="same"))).token_ids) == 4


async def test_abort_of_waiting_and_running_requests_answers_their_callers(
    service: GeneratorService, gate: Gate, ask: Ask
) -> None:
    gate.close()
    requests = [ask(9 + i, 50, name=f"r{i}") for i in range(4)]
    async with running(*(service.generate(r) for r in requests)) as calls:
        await gate.entered()
        found = asyncio.ensure_future(service.abort(["r0", "r3", "unknown"]))
        await asyncio.sleep(0)
        gate.open()
        assert await found == 2
    reasons = [c.result().stop_reason for c in calls]
    assert [r is StopReason.ABORTED for r in reasons] == [True, False, False, True]
    assert len(calls[0].result().token_ids) > 0
    assert len(calls[3].result().token_ids) == 0
    assert (await service.stats()).aborted == 2


async def test_closing_ends_the_engine_thread(
    model: PreTrainedModel, make_engine: MakeEngine, ask: Ask
) -> None:
    service = GeneratorService(
        make_engine(model=model), MemorySubscriber(dict(model.named_parameters())), INFO
    )
    await service.generate(ask(9, 2))
    names = {t.name for t in threading.enumerate()}
    assert "engine" in names
    await service.close()
    assert "engine" not in {t.name for t in threading.enumerate()}
