"""What every trainer promises, through every scheduler."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from offbeat.config import ActorConfig, NormConfig, NormLevel, OptimizerConfig
from offbeat.errors import NonFiniteLoss, TrainingError, WeightSyncError, WorkerError
from offbeat.generate.engine.engine import Engine
from offbeat.launch.blob import write_blob
from offbeat.launch.codec import encode
from offbeat.launch.protocols import Scheduler, WorkerSpec
from offbeat.launch.scheduler import SCHEDULERS, make_scheduler
from offbeat.model.init import init_model
from offbeat.model.load import load_model
from offbeat.protocols import Trainer
from offbeat.train.actor import PPOActor
from offbeat.train.client import TARGET, RemoteTrainer, Restore, TrainerSpec
from offbeat.train.engine import SingleDeviceEngine
from offbeat.types import (
    GenerateRequest,
    GroupId,
    PolicyVersion,
    SamplingParams,
    StepReport,
    StopReason,
    TrainSample,
    WeightUpdate,
)
from offbeat.weights.memory import digest_of_params

V0, V1, V2, V3 = (PolicyVersion(v) for v in range(4))
CPU = torch.device("cpu")
ACTOR = ActorConfig(
    optimizer=OptimizerConfig(lr=1e-2),
    use_decoupled_loss=True,
    ppo_n_minibatches=2,
    max_tokens_per_mb=64,
    reward_norm=NormConfig(mean_level=NormLevel.GROUP, std_level=NormLevel.GROUP),
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "model"
    init_model(path, characters="abcd", layers=1, hidden=16, intermediate=24)
    return path


@pytest.fixture(scope="module")
def samples(model_path: Path) -> list[TrainSample]:
    """Two groups of two fresh rows of version 0."""
    model = load_model(str(model_path), dtype=torch.float32, device=CPU)
    engine = Engine(model, slots=4, max_len=32, eos_token_ids=[2], decode=lambda _: "")
    for group in range(2):
        for sibling in range(2):
            engine.submit(
                GenerateRequest(
                    request_id=f"{group}/{sibling}",
                    group_id=GroupId(group),
                    sibling=sibling,
                    turn=0,
                    prompt_ids=np.array([4, 5, 6 + group]),
                    params=SamplingParams(max_new_tokens=8),
                    seed=10 * group + sibling,
                )
            )
    done = []
    while engine.running or engine.waiting:
        done += engine.step()
    rows = []
    for request, completion in sorted(done, key=lambda pair: pair[0].request_id):
        prompt, n = request.prompt_ids, len(completion.token_ids)
        rows.append(
            TrainSample(
                group_id=request.group_id,
                sibling=request.sibling,
                tokens=np.concatenate([prompt, completion.token_ids]),
                loss_mask=np.repeat([False, True], [len(prompt), n]),
                behave_logp=np.pad(completion.logprobs, (len(prompt), 0)),
                versions=np.pad(completion.versions, (len(prompt), 0), constant_values=-1),
                reward=float(request.sibling),
                truncated=completion.stop_reason is StopReason.LENGTH,
            )
        )
    return rows


def worker_spec(model_path: Path, restore: Restore | None = None) -> WorkerSpec:
    spec = TrainerSpec(
        model_path=str(model_path),
        dtype=None,
        device="cpu",
        seed=1,
        temperature=1.0,
        max_new_tokens=8,
        total_steps=4,
        actor=ACTOR,
        # The rows and the updates computed here are of models as they are loaded.
        onednn_linears=False,
        restore=restore,
    )
    return WorkerSpec(name="trainer", target=TARGET, payload=encode(spec))


@pytest_asyncio.fixture(params=list(SCHEDULERS), loop_scope="module", scope="module")
async def scheduler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scheduler]:
    async with make_scheduler(request.param, tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trainer(scheduler: Scheduler, model_path: Path) -> RemoteTrainer:
    """A trainer at version 0, for the tests that leave it there."""
    worker = await scheduler.start(worker_spec(model_path))
    return RemoteTrainer(worker, update_timeout=30)


async def updated(
    trainer: Trainer, samples: list[TrainSample], produce: PolicyVersion
) -> StepReport:
    with write_blob(encode(samples)) as blob:
        return await trainer.update(blob.ref, produce)


def changed(samples: list[TrainSample], **values: object) -> list[TrainSample]:
    """``samples`` with other values in the first row."""
    return [dataclasses.replace(samples[0], **values), *samples[1:]]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def here(model_path: Path, samples: list[TrainSample]) -> list[tuple[StepReport, str]]:
    """Report and digest of versions 1 and 2, computed in this process."""
    engine = SingleDeviceEngine(
        load_model(str(model_path), dtype=torch.float32, device=CPU),
        compute_dtype=torch.float32,
        optimizer=ACTOR.optimizer,
        total_steps=8,
    )
    actor = PPOActor(engine, ACTOR, temperature=1.0, max_new_tokens=8, seed=1)
    return [(actor.update(samples, v), digest_of_params(dict(engine.weights()))) for v in (V1, V2)]


async def test_fresh_trainer_publishes_the_loaded_model_as_version_0(
    trainer: RemoteTrainer, model_path: Path
) -> None:
    model = load_model(str(model_path), dtype=torch.float32, device=CPU)
    published = await trainer.publish()
    assert published.version == V0
    assert published.digest == digest_of_params(dict(model.named_parameters()))


async def test_refused_batches_leave_version_and_weights(
    trainer: RemoteTrainer, samples: list[TrainSample]
) -> None:
    before = await trainer.publish()
    off = changed(samples, behave_logp=samples[0].behave_logp - np.float32(0.1))
    empty = [dataclasses.replace(s, loss_mask=s.loss_mask & False) for s in samples]
    with pytest.raises(WeightSyncError, match="trainer: asked to produce version 2"):
        await updated(trainer, samples, V2)
    with pytest.raises(NonFiniteLoss, match=r"groups 0; the rewards go from nan"):
        await updated(trainer, changed(samples, reward=float("nan")), V1)
    with pytest.raises(TrainingError, match="recorded by the generator"):
        await updated(trainer, off, V1)
    with pytest.raises(TrainingError, match="every answer is empty"):
        await updated(trainer, empty, V1)
    assert await trainer.publish() == before


async def test_batch_that_cannot_be_read_is_an_error_and_not_an_empty_one(
    trainer: RemoteTrainer, samples: list[TrainSample]
) -> None:
    with write_blob(encode(samples)) as blob:
        torn = dataclasses.replace(blob.ref, digest="0" * 32)
        with pytest.raises(WorkerError, match="digest"):
            await trainer.update(torn, V1)
    with pytest.raises(WorkerError):
        await trainer.update(blob.ref, V1)
    assert (await trainer.publish()).version == V0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trainer after versions 1 and 2, and what it said on the way."""

    trainer: RemoteTrainer
    reports: tuple[StepReport, ...]
    again: tuple[StepReport, ...]
    published: tuple[WeightUpdate, ...]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trained(trainer: RemoteTrainer, samples: list[TrainSample]) -> Trained:
    """The same worker later: every test that wants version 0 stands above this line."""
    reports, again, published = [], [], [await trainer.publish()]
    for version in (V1, V2):
        reports.append(await updated(trainer, samples, version))
        again.append(await updated(trainer, samples[:1], version))
        published.append(await trainer.publish())
    return Trained(
        trainer=trainer, reports=tuple(reports), again=tuple(again), published=tuple(published)
    )


@pytest.mark.invariant("I03")
async def test_updates_are_those_computed_here_bit_for_bit(
    trained: Trained, here: list[tuple[StepReport, str]]
) -> None:
    for report, published, (expected, digest) in zip(
        trained.reports, trained.published[1:], here, strict=True
    ):
        assert report.metrics == expected.metrics
        assert (report.version, report.rows, report.tokens) == (
            expected.version,
            expected.rows,
            expected.tokens,
        )
        assert published.digest == digest


async def test_update_is_idempotent_by_the_version_it_produces(trained: Trained) -> None:
    assert trained.again == trained.reports


@pytest.mark.invariant("I14")
async def test_every_publication_carries_its_version_and_other_weights(trained: Trained) -> None:
    assert [p.version for p in trained.published] == [V0, V1, V2]
    assert len({p.digest for p in trained.published}) == 3


async def test_published_file_loads_in_transformers(
    trained: Trained, model_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    published = await trained.trainer.publish()
    shutil.copytree(model_path, tmp_path / "copy")
    shutil.copyfile(published.uri, tmp_path / "copy" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert digest_of_params(dict(model.named_parameters())) == published.digest


@pytest.mark.invariant("I04")
async def test_trainer_restored_from_a_snapshot_is_where_the_other_one_was(
    scheduler: Scheduler,
    trained: Trained,
    here: list[tuple[StepReport, str]],
    samples: list[TrainSample],
    model_path: Path,
    tmp_path: Path,
) -> None:
    assert await trained.trainer.begin_snapshot() == V2
    state = await trained.trainer.snapshot()
    assert (state.tensors.version, state.optimizer_steps) == (V2, 4)
    file = tmp_path / "trainer.safetensors"
    shutil.copyfile(state.tensors.uri, file)
    place = Restore(path=str(file), version=V2, optimizer_steps=state.optimizer_steps)
    spec = dataclasses.replace(worker_spec(model_path, place), name="restored")
    other = RemoteTrainer(await scheduler.start(spec), update_timeout=30)
    published = await other.publish()
    assert (published.version, published.digest) == (V2, here[-1][1])
    with pytest.raises(WeightSyncError, match="asked to produce version 1"):
        await updated(other, samples, V1)
    assert await other.environment() == state.environment
    await updated(other, samples, V3)


async def test_publication_asked_for_during_an_update_has_one_of_the_two_versions(
    trained: Trained, samples: list[TrainSample]
) -> None:
    trainer, last = trained.trainer, trained.published[-1]
    with write_blob(encode(samples)) as blob:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            update = tasks.create_task(trainer.update(blob.ref, V3))
            during = tasks.create_task(trainer.publish())
        after = await trainer.publish()
    assert (update.result().version, after.version) == (V3, V3)
    expected = {V2: last.digest, V3: after.digest}
    assert during.result().digest == expected[during.result().version]
