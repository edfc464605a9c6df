"""The record of an update: a chain of digests, and text that loses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from offbeat.config import ActorConfig
from offbeat.errors import DataError
from offbeat.pipeline.update_record import UpdateRecord, UpdateRecorder
from offbeat.train.client import Restore, TrainerSpec
from offbeat.types import Environment, PolicyVersion, WeightUpdate
from offbeat.weights.layout import TensorSpec, digest_of, lay_out

HERE = Environment(torch="2.13", build="a\nb", threads=2, processor="x", cpu_flags=("avx", "sse"))
SPEC = TrainerSpec(
    model_path="models/tiny",
    dtype=None,
    device="cpu",
    seed=7,
    temperature=0.1 + 0.2,  # 0.30000000000000004
    max_new_tokens=4,
    total_steps=9,
    actor=ActorConfig(reward_scaling=1 / 3),
    restore=Restore(path="snapshots/step-000002", version=PolicyVersion(2), optimizer_steps=2),
    snapshots=True,
)


def published(folder: object, version: int) -> WeightUpdate:
    layout = lay_out([TensorSpec(name=name, dtype="F32", shape=(2,)) for name in ("a", "b")])
    content = layout.header + np.array([1, 1, version, version], dtype=np.float32).tobytes()
    path = f"{folder}/weights.safetensors"
    with open(path, "wb") as file:
        file.write(content)
    return WeightUpdate(
        version=PolicyVersion(version), uri=path, nbytes=len(content), digest=digest_of(content)
    )


@pytest.mark.invariant("I05")
async def test_each_record_begins_with_the_digest_at_which_the_one_before_ended(
    tmp_path: object,
) -> None:
    recorder = UpdateRecorder(SPEC, HERE, published(tmp_path, 2).digest)
    first = await recorder.record(published(tmp_path, 3))
    second = await recorder.record(published(tmp_path, 4))
    assert first.before == published(tmp_path, 2).digest
    assert first.digest == second.before == published(tmp_path, 3).digest
    assert second.digest == published(tmp_path, 4).digest
    assert (first.version, second.version) == (3, 4)
    # Of a and b, only b has changed.
    assert first.tensors[0] == second.tensors[0]
    assert first.tensors[1] != second.tensors[1]


@pytest.mark.invariant("I05")
async def test_record_is_read_back_as_it_was_down_to_the_last_bit(tmp_path: object) -> None:
    record = await UpdateRecorder(SPEC, HERE, "d").record(published(tmp_path, 3))
    assert UpdateRecord.from_json(record.to_json(), "here") == record


async def test_two_attempts_of_one_configuration_have_the_same_specification(
    tmp_path: object,
) -> None:
    fresh = dataclasses.replace(SPEC, restore=None, snapshots=False)
    update = published(tmp_path, 3)
    resumed = await UpdateRecorder(SPEC, HERE, "d").record(update)
    assert resumed == await UpdateRecorder(fresh, HERE, "d").record(update)


def test_text_that_is_no_record_names_its_file() -> None:
    with pytest.raises(DataError, match=r"step-000003\.parquet: the record of its update"):
        UpdateRecord.from_json("{}", "step-000003.parquet")
