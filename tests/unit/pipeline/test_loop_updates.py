"""What the loop records of its updates is enough to take them again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from offbeat.config import ActorConfig
from offbeat.launch.codec import encode
from offbeat.observe.rollouts import read_rollouts, read_update
from offbeat.pipeline.update_record import UpdateRecord, UpdateRecorder
from offbeat.rollout.samples import recorded_samples
from offbeat.train.client import TrainerSpec
from offbeat.types import Completion, Environment, Invalid, Reward, Scored
from offbeat.weights.digests import tensor_digests

OpenRig: TypeAlias = Callable[..., Awaitable[Any]]

SPEC = TrainerSpec(
    model_path="models/tiny",
    dtype=None,
    device="cpu",
    seed=1,
    temperature=1.0,
    max_new_tokens=6,
    total_steps=5,
    actor=ActorConfig(),
)
HERE = Environment(torch="", build="", threads=1, processor="", cpu_flags=())


def sometimes_invalid(completion: Completion) -> Reward:
    first = int(completion.token_ids[0])
    return Scored(value=first / 7) if first % 3 else Invalid(reason="no luck")


@pytest.mark.invariant("I05")
@pytest.mark.parametrize("eta", [0, 2])
async def test_each_file_has_the_batch_that_was_trained_and_the_weights_that_came_out(
    open_rig: OpenRig, one_turn: Any, eta: int
) -> None:
    rig = await open_rig(
        steps=5,
        g=3,
        n=3,
        eta=eta,
        workflow=one_turn(sometimes_invalid),
        valid=("9+9=",),
        eval_steps=2,  # their records wait for the evaluation
        updates=UpdateRecorder(SPEC, HERE, "of version 0"),
    )
    await rig.run()
    await rig.recorder.flush()
    before = "of version 0"
    for step, batch in enumerate(rig.trainer.batches, start=1):
        rows = read_rollouts(rig.run_dir, step)
        assert encode(recorded_samples(rows)) == batch
        text = read_update(rig.run_dir, step)
        assert text is not None
        record = UpdateRecord.from_json(text, step)
        assert (record.version, record.before) == (step, before)
        before = record.digest
    assert {row.reward is None for row in rows} == {True, False}
    last = await rig.trainer.publish()
    assert before == last.digest
    assert record.tensors == tuple(tensor_digests(last).values())
