"""A training run without models: a generator and a trainer whose timing the test decides.

Everything else is the real thing: workflow, prompt stream, tokenizer, recorder, ledger and loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from offbeat.checkpoint.saver import Saver, SaveSchedule
from offbeat.checkpoint.snapshot import RunState, Snapshots
from offbeat.data.columns import ColumnMap
from offbeat.data.rows import Rows
from offbeat.data.stream import PromptOptions, PromptStream
from offbeat.data.tokens import TextCodec
from offbeat.launch.blob import read_blob
from offbeat.launch.codec import decode
from offbeat.model.init import write_tokenizer
from offbeat.observe.ledger import LedgerRow, read_groups
from offbeat.observe.limits import RunSetup
from offbeat.observe.metrics import StepRecord
from offbeat.observe.sinks import JsonlSink, SinkSet, read_metrics
from offbeat.observe.spans import Span, SpanName, read_spans
from offbeat.pipeline.cadence import Cadence
from offbeat.pipeline.episodes import SamplingPlan
from offbeat.pipeline.evaluate import Evaluator
from offbeat.pipeline.ledger import Ledger
from offbeat.pipeline.loop import Loop, LoopPlan
from offbeat.pipeline.no_signal import SignalRules
from offbeat.pipeline.recorder import Recorder
from offbeat.pipeline.snapshots import SnapshotTaker
from offbeat.pipeline.staleness import Policy
from offbeat.pipeline.update_record import UpdateRecorder
from offbeat.protocols import EpisodeEngine, Generator, Trainer, Workflow
from offbeat.types import (
    BlobRef,
    Completion,
    Environment,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    Prompt,
    Reward,
    Rollout,
    SamplingParams,
    Scored,
    StepReport,
    StopReason,
    TrainerState,
    TrainSample,
    Turn,
    WeightUpdate,
)
from offbeat.weights.layout import TensorSpec, digest_of, lay_out

SETUP = RunSetup(
    max_staleness=0,
    cores=1,
    trainer_threads=1,
    generator_threads=1,
    trains_in_bfloat16=False,
    generates_in_bfloat16=False,
    prefix_sharing=True,
    gradient_checkpointing=False,
    prox_pass=False,
)


async def spin_loop(turns: int = 50) -> None:
    """Let everything that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


class FakeGenerator:
    """Answers are a function of the request's seed; when they come is the test's business.

    A request of a group, or of a (group, sibling), in ``hold`` waits for its event; every request
    waits ``turns(request)`` turns of the event loop. A token is stamped with the version at the
    time it is "written": the first when the request starts, the rest when it ends.
    """

    def __init__(self) -> None:
        self.version = PolicyVersion(0)
        self.staged: PolicyVersion | None = None
        self.hold: dict[int | tuple[int, int], asyncio.Event] = {}
        self.turns: Callable[[GenerateRequest], int] = lambda request: 1
        self.fail: Callable[[GenerateRequest], Exception | None] = lambda request: None
        self.stamp: Callable[[int], int] = lambda version: version
        self.requests: list[GenerateRequest] = []
        self.ended: list[GenerateRequest] = []
        self.changed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        before = self.version
        for key in (request.group_id, (request.group_id, request.sibling)):
            if key in self.hold:
                await self.hold[key].wait()
        for _ in range(self.turns(request)):
            await asyncio.sleep(0)
        error = self.fail(request)
        if error is not None:
            raise error
        self.ended.append(request)
        self.changed.set()
        return self.answer(request, before)

    def answer(self, request: GenerateRequest, before: int) -> Completion:
        random = np.random.default_rng(request.seed)
        n = int(random.integers(2, request.params.max_new_tokens + 1))
        versions = np.full(n, self.stamp(self.version), dtype=np.int64)
        versions[0] = self.stamp(before)
        return Completion(
            token_ids=random.integers(4, 14, n),
            logprobs=-random.random(n, dtype=np.float32),
            versions=versions,
            stop_reason=StopReason.STOP,
            text="",
        )

    async def stage(self, update: WeightUpdate) -> None:
        self.staged = update.version
        self.changed.set()

    async def commit(self, version: PolicyVersion) -> float:
        assert self.staged == version == self.version + 1
        # Long enough for a request that was admitted too early to be written by the old version.
        await spin_loop()
        self.version = version
        self.changed.set()
        return 0.001

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    async def stats(self) -> GeneratorStats:
        return GeneratorStats(
            version=self.version,
            slots=8,
            running=0,
            waiting=0,
            prefill_tokens=0,
            decode_tokens=0,
            finished=len(self.ended),
            aborted=0,
            paused=False,
            peak_rss_bytes=0,
        )

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return when ``predicate()`` holds; asked whenever something happened here."""
        while not predicate():
            self.changed.clear()
            await self.changed.wait()


class FakeTrainer:
    """Keeps every batch; an update in ``hold`` (by the version it makes) waits for its event.

    ``publish`` writes one tensor, filled with the version, as a real trainer lays out its weights.
    """

    def __init__(self, weights: Path) -> None:
        self.weights = weights
        self.version = PolicyVersion(0)
        self.batches: list[bytes] = []
        self.hold: dict[int, asyncio.Event] = {}
        self.entered: dict[int, asyncio.Event] = {}
        self.fail: dict[int, Exception] = {}
        self.produces: Callable[[int], int] = lambda version: version

    @property
    def samples(self) -> list[list[TrainSample]]:
        return [decode(b, list[TrainSample]) for b in self.batches]

    async def update(self, batch: BlobRef, produce: PolicyVersion) -> StepReport:
        started = time.monotonic()
        self.batches.append(read_blob(batch))
        self.entered.setdefault(produce, asyncio.Event()).set()
        if produce in self.hold:
            await self.hold[produce].wait()
        if produce in self.fail:
            raise self.fail[produce]
        self.version = produce
        tokens = sum(int(s.loss_mask.sum()) for s in self.samples[-1])
        return StepReport(
            version=PolicyVersion(self.produces(produce)),
            tokens=tokens,
            rows=len(self.samples[-1]),
            started=started,
            ended=time.monotonic(),
            metrics={"actor/tokens_count": float(tokens), "lag/token_mean": 0.0},
        )

    async def publish(self) -> WeightUpdate:
        return self._write(self.weights)

    def _write(self, file: Path) -> WeightUpdate:
        layout = lay_out([TensorSpec(name="w", dtype="F32", shape=(4,))])
        content = layout.header + np.full(4, self.version, dtype=np.float32).tobytes()
        file.write_bytes(content)
        return WeightUpdate(
            version=self.version,
            uri=str(file),
            nbytes=len(content),
            digest=digest_of(content),
        )

    async def begin_snapshot(self) -> PolicyVersion:
        return self.version

    async def snapshot(self) -> TrainerState:
        here = Environment(torch="", build="", threads=1, processor="", cpu_flags=())
        tensors = self._write(self.weights.with_name("state.safetensors"))
        return TrainerState(tensors=tensors, optimizer_steps=0, environment=here)

    async def until_entered(self, version: int) -> None:
        await self.entered.setdefault(version, asyncio.Event()).wait()


class OneTurn:
    """A user's workflow: one answer per sibling, scored by ``score``."""

    def __init__(self, score: Callable[[Completion], Reward] | None = None) -> None:
        self.score = score or (lambda c: Scored(value=float(c.token_ids[0])))

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        async with asyncio.TaskGroup() as siblings:
            tasks = [
                siblings.create_task(self.one(engine, data, i)) for i in range(engine.n_samples)
            ]
        return [t.result() for t in tasks]

    async def one(self, engine: EpisodeEngine, data: Prompt, sibling: int) -> Rollout:
        completion = await engine.agenerate(data.token_ids.tolist(), sibling=sibling)
        turn = Turn(prompt_ids=data.token_ids, completion=completion)
        return Rollout(sibling=sibling, turns=(turn,), reward=self.score(completion))


@dataclass(kw_only=True)
class Options:
    """What a test may change about a run; ``prompts`` are the rows."""

    steps: int = 3
    g: int = 2
    total: int | None = None
    eta: int = 0
    n: int = 2
    capacity: int = 64
    prompts: Sequence[str] = tuple(f"{i}+{i}=" for i in range(10))
    max_prompt_len: int | None = None
    valid: Sequence[str] = ()
    eval_steps: int = 0
    eval_at_start: bool = False
    eval_at_end: bool = False
    save_steps: int = 0
    save_at_end: bool = False
    saver: Saver | None = None
    snapshot_steps: int = 0
    start: RunState | None = None
    updates: UpdateRecorder | None = None
    stall_seconds: float = 20.0
    max_failure_rate: float = 0.5
    max_consecutive_failures: int = 5
    policy: Policy = Policy.PACE
    adaptive_lookahead: bool = False
    group_deadline_seconds: float | None = None
    dynamic_sampling: bool = False
    max_groups_without_signal: int | None = None
    workflow: Workflow = field(default_factory=OneTurn)


@dataclass(kw_only=True)
class Rig:
    """One run that is ready to go, and what it left behind."""

    generator: FakeGenerator
    trainer: FakeTrainer
    loop: Loop
    recorder: Recorder
    ledger: Ledger
    run_dir: Path
    snapshots: SnapshotTaker

    async def run(self) -> None:
        async with asyncio.timeout(20):
            try:
                await self.loop.run()
            finally:
                await self.recorder.flush()

    def groups(self) -> tuple[LedgerRow, ...]:
        return read_groups(self.run_dir / "run.db")

    def fates(self) -> Counter[str]:
        return Counter(r.reason or r.fate or "open" for r in self.groups())

    def records(self) -> tuple[StepRecord, ...]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def spans(self, name: SpanName) -> list[Span]:
        return [s for s in read_spans(self.run_dir / "spans.jsonl") if s.name is name]


def _stream(codec: TextCodec, prompts: Sequence[str], limit: int | None) -> PromptStream:
    rows = Rows(name="toy", items=[{"prompt": p} for p in prompts])
    options = PromptOptions(
        columns=ColumnMap(), shuffle=False, chat=False, max_prompt_len=limit, max_new_tokens=6
    )
    return PromptStream(rows, codec, options, seed=1)


def _plan(stream: str, n: int) -> SamplingPlan:
    return SamplingPlan(stream=stream, seed=1, n_samples=n, params=SamplingParams(max_new_tokens=6))


def _cadence(o: Options) -> Cadence:
    return Cadence(
        steps=o.steps,
        evaluate=SaveSchedule(freq_steps=o.eval_steps, now=0.0),
        evaluate_at_start=o.eval_at_start,
        evaluate_at_end=o.eval_at_end,
        save=SaveSchedule(freq_steps=o.save_steps, now=0.0),
        save_at_end=o.save_at_end,
        snapshot=SaveSchedule(
            freq_steps=o.snapshot_steps,
            now=0.0,
            since=None if o.start is None else o.start.snapshot,
        ),
    )


def _loop(
    o: Options,
    codec: TextCodec,
    recorder: Recorder,
    gen: Generator,
    tr: Trainer,
    snapshots: SnapshotTaker,
) -> Loop:
    plan = LoopPlan(
        steps=o.steps,
        groups_per_step=o.g,
        total_groups=o.total or o.steps * o.g,
        max_staleness=o.eta,
        capacity=o.capacity,
        sampling=_plan("rollout", o.n),
        max_failure_rate=o.max_failure_rate,
        max_consecutive_failures=o.max_consecutive_failures,
        stall_seconds=o.stall_seconds,
        signal=SignalRules(group_baseline=True, truncated_count=True),
        policy=o.policy,
        adaptive_lookahead=o.adaptive_lookahead,
        group_deadline_seconds=o.group_deadline_seconds,
        dynamic_sampling=o.dynamic_sampling,
        max_groups_without_signal=o.max_groups_without_signal,
    )
    evaluator = None
    if o.valid:
        evaluator = Evaluator(
            generator=gen,
            workflow=o.workflow,
            stream=_stream(codec, o.valid, o.max_prompt_len),
            codec=codec,
            plan=_plan("eval", 1),
            concurrency=2,
        )
    return Loop(
        plan,
        _cadence(o),
        generator=gen,
        replicas={"generator-0": gen},
        trainer=tr,
        workflow=o.workflow,
        stream=_stream(codec, o.prompts, o.max_prompt_len),
        codec=codec,
        recorder=recorder,
        evaluator=evaluator,
        saver=o.saver,
        weights_gate=asyncio.Lock(),
        snapshots=snapshots if o.snapshot_steps else None,
        updates=o.updates,
        start=o.start,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of a tiny model, and a configuration; no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    return TextCodec.open(model_folder)


@pytest.fixture
async def open_rig(
    tmp_path: Path, codec: TextCodec
) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Make a run from ``Options``; any number of them per test, each in a folder of its own, or one
    that goes on in the folder of the run ``again``.
    """
    async with AsyncExitStack() as stack:
        count = 0

        async def make(again: Rig | None = None, **keywords: object) -> Rig:
            nonlocal count
            count += 1
            options = Options(**keywords)  # type: ignore[arg-type]  # a test's keywords
            if again is None:
                run_dir = tmp_path / f"run-{count}"
                run_dir.mkdir()
                ledger = stack.enter_context(closing(Ledger.open(run_dir / "run.db")))
            else:
                run_dir, ledger = again.run_dir, again.ledger
            sinks = SinkSet([JsonlSink(run_dir / "metrics.jsonl")])
            counts = None if options.start is None else options.start.counts
            recorder = await stack.enter_async_context(
                Recorder(
                    run_dir,
                    sinks,
                    ledger,
                    dataclasses.replace(SETUP, max_staleness=options.eta),
                    counts=counts,
                )
            )
            generator = FakeGenerator()
            trainer = FakeTrainer(run_dir / "weights.safetensors")
            written = await stack.enter_async_context(Snapshots(run_dir / "snapshots", keep=2))
            snapshots = SnapshotTaker(written, trainer, recorder, options.saver)
            loop = _loop(options, codec, recorder, generator, trainer, snapshots)
            return Rig(
                generator=generator,
                trainer=trainer,
                loop=loop,
                recorder=recorder,
                ledger=ledger,
                run_dir=run_dir,
                snapshots=snapshots,
            )

        yield make


@pytest.fixture
def on_the_beat() -> RunSetup:
    return SETUP


@pytest.fixture
def one_turn() -> type[OneTurn]:
    return OneTurn


@pytest.fixture
def spin() -> Callable[[], Awaitable[None]]:
    return spin_loop
