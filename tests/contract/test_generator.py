"""What every Generator promises, run on: a service inline, one that computes the keys of running
requests anew after a commit, one in its own process, a Router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from offbeat.errors import GenerationError, PromptTooLong, WeightSyncError
from offbeat.generate.client import TARGET, GeneratorSpec, RemoteGenerator
from offbeat.generate.router import Router
from offbeat.launch.codec import encode
from offbeat.launch.inline import InlineScheduler
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerSpec
from offbeat.model.init import init_model
from offbeat.model.load import load_model
from offbeat.protocols import Generator
from offbeat.types import (
    Completion,
    GenerateRequest,
    GeneratorStats,
    GroupId,
    PolicyVersion,
    Progress,
    SamplingParams,
    StopReason,
)
from offbeat.weights.memory import MemoryPublisher

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

SLOTS = 4
MAX_LEN = 512


@dataclass(slots=True)
class Subject:
    """One implementation, and the trainer's side of its weights."""

    generator: Generator
    replicas: int
    recompute_kv: bool
    weights: dict[str, torch.Tensor]
    publisher: MemoryPublisher
    base: dict[str, torch.Tensor]
    _versions: count = field(default_factory=lambda: count(1))

    async def publish(self, scale: float = 1.0) -> PolicyVersion:
        """Stage and commit the initial weights times ``scale``."""
        version = await self.stage(scale)
        assert await self.generator.commit(version) >= 0
        return version

    async def stage(self, scale: float = 1.0) -> PolicyVersion:
        version = PolicyVersion(next(self._versions))
        for name, value in self.base.items():
            self.weights[name].copy_(value * scale)
        await self.generator.stage(self.publisher.publish(version))
        return version


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contract") / "tiny"
    return init_model(path, max_len=MAX_LEN, initializer_range=0.2).path


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["inline", "recompute", "local", "router"]
)
async def subject(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    recompute_kv = request.param == "recompute"
    spec = GeneratorSpec(
        model_path=str(folder),
        dtype=None,
        device="cpu",
        slots=SLOTS,
        max_len=MAX_LEN,
        recompute_kv=recompute_kv,
    )
    model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    weights = {k: v.detach() for k, v in model.named_parameters()}
    base = {k: v.clone() for k, v in weights.items()}
    replicas = 2 if request.param == "router" else 1
    async with AsyncExitStack() as stack:
        scheduler = (
            LocalScheduler(tmp_path_factory.mktemp("logs"))
            if request.param == "local"
            else InlineScheduler()
        )
        await stack.enter_async_context(scheduler)
        workers = [
            await scheduler.start(
                WorkerSpec(name=f"generator-{i}", target=TARGET, payload=encode(spec))
            )
            for i in range(replicas)
        ]
        remotes = [
            await stack.enter_async_context(
                RemoteGenerator(w, request_timeout=30, control_timeout=30)
            )
            for w in workers
        ]
        for remote in remotes:
            info = await remote.info()
            assert (info.device, info.dtype, info.bitwise) == ("cpu", "float32", True)
        generator = remotes[0] if replicas == 1 else Router(remotes)
        publisher = stack.enter_context(MemoryPublisher(weights.items()))
        yield Subject(generator, replicas, recompute_kv, weights, publisher, base)


@pytest.fixture
def generator(subject: Subject) -> Generator:
    assert isinstance(subject.generator, Generator)
    return subject.generator


_numbers = count()


def ask(prompt: int = 9, n: int = 8, *, group: int = 0, **fields: object) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=n, ignore_eos=True)
    base = GenerateRequest(
        request_id=f"r{next(_numbers)}",
        group_id=GroupId(group),
        sibling=0,
        turn=0,
        prompt_ids=np.random.default_rng(prompt).integers(7, 50, prompt),
        params=params,
        seed=7,
    )
    return replace(base, **fields)


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


async def when(generator: Generator, true: Callable[[GeneratorStats], bool]) -> GeneratorStats:
    """Return the first statistics of which ``true`` holds."""
    async with asyncio.timeout(20):
        while True:
            stats = await generator.stats()
            if true(stats):
                return stats
            await asyncio.sleep(0)


async def until(generator: Generator, tokens: int) -> GeneratorStats:
    """Return when ``tokens`` more have been decoded."""
    start = (await generator.stats()).decode_tokens
    return await when(generator, lambda stats: stats.decode_tokens >= start + tokens)


async def gather(*calls: Awaitable[Completion]) -> list[Completion]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [t.result() for t in tasks]


async def test_a_completion_is_stamped_complete_and_reproducible(
    generator: Generator,
) -> None:
    version = (await generator.stats()).version
    first, second, other = await gather(
        generator.generate(ask(n=12)),
        generator.generate(ask(n=12)),
        generator.generate(ask(n=12, seed=8)),
    )
    assert len(first.token_ids) == 12
    assert first.stop_reason is StopReason.LENGTH
    assert first.logprobs.dtype == np.float32
    assert (first.logprobs < 0).all()
    assert set(first.versions) == {version}
    assert same_bits(first, second)
    assert first.token_ids.tolist() != other.token_ids.tolist()


async def test_a_streamed_request_hands_out_the_beginning_of_its_completion(
    generator: Generator,
) -> None:
    whole = await generator.generate(ask(n=60))
    heard: list[Progress] = []
    beside: list[Progress] = []
    streamed, _, plain = await gather(
        generator.stream(ask(n=60), heard.append),
        generator.stream(ask(n=30, seed=1), beside.append),
        generator.generate(ask(n=60)),
    )
    assert same_bits(streamed, whole)
    assert same_bits(plain, whole)
    tokens = np.concatenate([p.token_ids for p in heard])
    scores = np.concatenate([p.logprobs for p in heard])
    assert len(heard) > 1
    assert len(beside) > 1
    assert 0 < len(tokens) < 60
    assert tokens.tolist() == whole.token_ids[: len(tokens)].tolist()
    assert scores.tolist() == whole.logprobs[: len(tokens)].tolist()


async def test_cancelling_a_streamed_request_frees_its_slot(generator: Generator) -> None:
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(generator.stream(ask(n=400), lambda _: begun.set()))
        await begun.wait()
        task.cancel()
    await when(generator, lambda stats: not stats.running)


async def test_long_and_short_requests_together_have_the_bits_they_have_alone(
    generator: Generator,
) -> None:
    long = ask(20, 120)
    shorts = [ask(5 + 7 * i, 5, group=i, seed=i) for i in range(5)]
    ended: list[str] = []

    async def note(request: GenerateRequest) -> Completion:
        answer = await generator.generate(request)
        ended.append(request.request_id)
        return answer

    together = await gather(note(long), *(note(r) for r in shorts))
    assert ended[-1] == long.request_id
    for request, answer in zip([long, *shorts], together, strict=True):
        assert same_bits(await generator.generate(request), answer)


async def test_siblings_share_the_prefill_and_differ(generator: Generator) -> None:
    before = await generator.stats()
    requests = [ask(36, 10, group=5, sibling=i, seed=i) for i in range(2 * SLOTS + 1)]
    answers = await gather(*(generator.generate(r) for r in requests))
    after = await generator.stats()
    assert after.prefill_tokens - before.prefill_tokens == 36
    assert after.finished - before.finished == len(requests)
    assert len({tuple(a.token_ids) for a in answers}) == len(requests)


async def test_a_commit_stamps_changes_and_forgets(subject: Subject) -> None:
    generator, request = subject.generator, ask(34, 10)
    before = await generator.generate(request)
    prefilled = (await generator.stats()).prefill_tokens
    version = await subject.publish(0.5)
    stats = await generator.stats()
    assert stats.version == version
    after = await generator.generate(request)
    assert set(after.versions) == {version}
    assert not same_bits(before, after)
    assert (await generator.stats()).prefill_tokens - prefilled == 34
    await subject.publish()
    assert same_bits(before, await generator.generate(request))


@pytest.mark.invariant("I06")
async def test_a_request_held_over_two_commits_has_three_versions(subject: Subject) -> None:
    generator, request = subject.generator, ask(11, 240)
    first = await subject.publish()
    alone = await generator.generate(request)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(generator.generate(request))
        for scale in (0.9, 0.8):
            await until(generator, 5)
            await generator.pause()
            await subject.publish(scale)
            await generator.resume()
    answer = call.result()
    assert len(answer.token_ids) == 240
    assert (np.diff(answer.versions) >= 0).all()
    assert sorted(set(answer.versions)) == [first, first + 1, first + 2]
    kept = int((answer.versions == first).sum())
    assert answer.token_ids[:kept].tolist() == alone.token_ids[:kept].tolist()
    assert answer.logprobs[:kept].tolist() == alone.logprobs[:kept].tolist()
    assert answer.token_ids[kept:].tolist() != alone.token_ids[kept:].tolist()
    await subject.publish()


async def test_commits_of_the_same_weights_change_nothing_about_an_answer_but_its_versions(
    subject: Subject,
) -> None:
    generator = subject.generator
    first = await subject.publish()
    # The prompt is longer than what fits into one pass beside decoding.
    requests = [ask(260, 120, group=i, sibling=i, seed=i) for i in range(2)]
    alone = [await generator.generate(r) for r in requests]
    before = (await generator.stats()).prefill_tokens
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(generator.generate(r)) for r in requests]
        for _ in range(2):
            await until(generator, 8)
            await generator.pause()
            await subject.publish()
            await generator.resume()
    for call, expected in zip(calls, alone, strict=True):
        answer = call.result()
        assert same_bits(answer, expected)
        assert (answer.stop_reason, answer.text) == (expected.stop_reason, expected.text)
        assert sorted(set(answer.versions)) == [first, first + 1, first + 2]
    computed = (await generator.stats()).prefill_tokens - before
    if subject.recompute_kv:
        # The prompt once for each commit, and some 8 and 16 tokens of each answer.
        assert computed > 2 * 260
    else:
        assert computed <= 260 * subject.replicas


async def test_a_commit_of_an_unstaged_version_is_refused(subject: Subject) -> None:
    generator = subject.generator
    version = await subject.publish()
    with pytest.raises(WeightSyncError, match=f"commit of version {version + 1}"):
        await generator.commit(PolicyVersion(version + 1))
    staged = await subject.stage(0.5)
    with pytest.raises(WeightSyncError, match=f"version {staged} is staged"):
        await generator.commit(PolicyVersion(staged + 5))
    assert (await generator.stats()).version == version
    await subject.publish()


async def test_an_update_that_is_not_what_was_announced_is_refused(subject: Subject) -> None:
    version = await subject.publish()
    update = subject.publisher.publish(PolicyVersion(version + 1))
    with pytest.raises(WeightSyncError, match="digest"):
        await subject.generator.stage(replace(update, digest="0" * 32))
    assert (await subject.generator.stats()).version == version


async def test_nothing_is_written_between_pause_and_resume(generator: Generator) -> None:
    request = ask(12, 80)
    alone = await generator.generate(request)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(generator.generate(request))
        await until(generator, 5)
        await generator.pause()
        held = await generator.stats()
        assert held.paused
        assert held.running == 1
        for _ in range(20):
            await generator.abort([])  # one round of the engine each
        later = await generator.stats()
        assert later.decode_tokens == held.decode_tokens
        assert later.decode_spans == ()
        assert not call.done()
        await generator.resume()
    assert not (await generator.stats()).paused
    assert same_bits(call.result(), alone)


async def test_abort_ends_running_and_waiting_requests(generator: Generator) -> None:
    requests = [ask(5 + i, 400, seed=i) for i in range(SLOTS + 2)]
    before = await generator.stats()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(generator.generate(r)) for r in requests]
        await until(generator, 10)
        found = await generator.abort([*(r.request_id for r in requests), "unknown"])
    answers = [c.result() for c in calls]
    assert found == len(requests)
    assert {a.stop_reason for a in answers} == {StopReason.ABORTED}
    assert sorted(len(a.token_ids) > 0 for a in answers) == [False] * 2 + [True] * SLOTS
    after = await generator.stats()
    assert (after.running, after.waiting, after.aborted - before.aborted) == (0, 0, found)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt_ids": np.arange(10) % 50, "n": 503}, PromptTooLong),
        ({"prompt_ids": np.zeros(0, dtype=np.int64)}, GenerationError),
        ({"prompt_ids": np.array([3, 50])}, GenerationError),
        ({"prompt_ids": np.array([-1, 3])}, GenerationError),
    ],
)
async def test_what_cannot_be_served_is_refused(
    generator: Generator, fields: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error, match="bad"):
        await generator.generate(ask(request_id="bad", **fields))
    assert len((await generator.generate(ask(request_id="bad"))).token_ids) == 8


async def test_a_request_id_in_use_is_refused(generator: Generator) -> None:
    request = ask(10, 300)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(generator.generate(request))
        await until(generator, 3)
        with pytest.raises(GenerationError, match="already running"):
            await generator.generate(request)
        assert not call.done()
        assert await generator.abort([request.request_id]) == 1
    assert call.result().stop_reason is StopReason.ABORTED


async def test_cancelling_a_call_frees_its_slot(generator: Generator) -> None:
    before = await generator.stats()
    calls = [
        asyncio.ensure_future(generator.generate(ask(5 + i, 450, seed=i))) for i in range(SLOTS)
    ]
    await until(generator, 10)
    for call in calls:
        call.cancel()
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    answer = await generator.generate(ask())
    assert answer.stop_reason is StopReason.LENGTH
    after = await when(generator, lambda stats: stats.running == 0)
    assert (after.aborted - before.aborted, after.finished - before.finished) == (SLOTS, 1)


async def test_non_finite_weights_fail_what_runs_and_good_ones_serve_again(
    subject: Subject,
) -> None:
    generator, request = subject.generator, ask(13, 12)
    await subject.publish()
    expected = await generator.generate(request)
    calls = [
        asyncio.ensure_future(generator.generate(ask(5 + i, 450, group=i, seed=i)))
        for i in range(SLOTS)
    ]
    await until(generator, 10)
    await generator.pause()
    await subject.publish(float("nan"))
    await generator.resume()
    for call in calls:
        with pytest.raises(GenerationError, match="non-finite log-probs"):
            await call
    with pytest.raises(GenerationError, match="non-finite log-probs"):
        await generator.generate(ask())
    version = await subject.publish()
    again = await generator.generate(request)
    assert same_bits(again, expected)
    assert set(again.versions) == {version}


async def test_stop_conditions_cross_the_wire(generator: Generator) -> None:
    whole = await generator.generate(ask(n=30))
    stop = int(whole.token_ids[6])
    place = whole.token_ids.tolist().index(stop)
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,), ignore_eos=True)
    answer = await generator.generate(ask(params=params))
    assert answer.stop_reason is StopReason.STOP
    assert answer.token_ids.tolist() == whole.token_ids[: place + 1].tolist()
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    first, second = await gather(
        generator.generate(ask(params=greedy, seed=1)),
        generator.generate(ask(params=greedy, seed=2)),
    )
    assert same_bits(first, second)
    assert not first.logprobs.any()


async def test_stats_count_slots_of_every_replica(subject: Subject) -> None:
    stats = await subject.generator.stats()
    assert stats.slots == SLOTS * subject.replicas
    assert (stats.running, stats.waiting, stats.paused) == (0, 0, False)
    assert stats.peak_rss_bytes > 10_000_000
