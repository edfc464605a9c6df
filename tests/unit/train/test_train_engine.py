"""The engine under the actor: precision, checkpointing, clipping, and the file it publishes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.train.batch import TrainBatch
from offbeat.types import PolicyVersion, TrainSample
from offbeat.weights.memory import MemoryPublisher, digest_of_params

V1 = PolicyVersion(1)


def gradient_norm(gradient: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradient.values()]).norm())


def test_bfloat16_products_stay_close_to_float32_over_float32_weights(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    exact, rough = make_trainer(), make_trainer(compute_dtype=torch.bfloat16)
    products: list[torch.dtype] = []
    layer = rough.engine.model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda *passed: products.append(passed[-1].dtype))
    report = rough.actor.update(rollouts, V1)
    exact.actor.update(rollouts, V1)
    assert 1e-4 < report.metrics["actor/logp_error_max"] < 0.3
    (a,), (b,) = exact.engine.gradients, rough.engine.gradients
    assert products == [torch.bfloat16]
    assert {g.dtype for g in b.values()} == {torch.float32}
    assert {p.dtype for _, p in rough.engine.weights()} == {torch.float32}
    difference = {n: b[n] - a[n] for n in a}
    assert 0.0 < gradient_norm(difference) < 0.1 * gradient_norm(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_computes_layers_twice_and_changes_no_bit(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], dtype: torch.dtype
) -> None:
    gradients, calls = [], []
    for recompute in (False, True):
        trainer = make_trainer(gradient_checkpointing=recompute, compute_dtype=dtype)
        seen: list[None] = []
        attention = trainer.engine.model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, seen=seen: seen.append(None))
        trainer.actor.update(rollouts, V1)
        gradients.append(trainer.engine.gradients[0])
        calls.append(len(seen))
    assert calls == [1, 2]
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_gradient_is_clipped_to_the_limit_and_reported_before(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # AdamW forgets the scale of a single gradient, so look at its first moment: (1 - beta1) · g.
    def moment(limit: float) -> tuple[float, float]:
        trainer = make_trainer(optimizer={"gradient_clipping": limit})
        report = trainer.actor.update(rollouts, V1)
        states = trainer.engine._optimizer.state.values()
        norm = torch.stack([s["exp_avg"].norm() for s in states]).norm()
        return float(norm) / (1 - 0.9), report.metrics["actor/grad_norm"]

    loose, norm = moment(1e6)
    assert loose == pytest.approx(norm, rel=1e-5)
    tight, still = moment(0.1)
    assert still == norm > 0.2
    assert tight == pytest.approx(0.1, rel=1e-4)


def test_entropy_is_that_of_the_scaled_distribution(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    engine = make_trainer().engine
    batch = TrainBatch.build(rollouts, engine.device)
    with torch.no_grad():
        logp, entropy = engine.logprobs(batch, 1.0)
        flat_logp, flat = engine.logprobs(batch, 1e4)
    assert float(flat.mean()) == pytest.approx(float(torch.log(torch.tensor(12.0))), rel=1e-4)
    assert torch.allclose(flat_logp, -flat, atol=1e-2)
    assert float(entropy.max()) < float(flat.min())
    assert not torch.allclose(logp, flat_logp, atol=0.1)


def test_positive_advantage_makes_the_answer_likelier_and_negative_less(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(reward_norm={"mean_level": "none", "std_level": "none"})
    pushed = [dataclasses.replace(s, reward=1.0 if s.sibling else -1.0) for s in rollouts]
    batch = TrainBatch.build(pushed, trainer.engine.device)
    trainer.actor.update(pushed, V1)
    with torch.no_grad():
        logp, _ = trainer.engine.logprobs(batch, 0.8)
    change, up = logp - batch.behave_logp, batch.rewards[batch.seq_id] > 0
    assert float(change[up].mean()) > 0 > float(change[~up].mean())


@pytest.mark.invariant("I14")
def test_published_file_has_the_trained_weights_and_loads_in_transformers(
    tiny: Path, tmp_path: Path, make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer()
    folder = tmp_path / "published"
    shutil.copytree(tiny, folder)
    with MemoryPublisher(trainer.engine.weights()) as publisher:
        before = publisher.publish(trainer.actor.whole_version())
        trainer.actor.update(rollouts, V1)
        update = publisher.publish(trainer.actor.whole_version())
        shutil.copyfile(update.uri, folder / "model.safetensors")
    assert update.digest == digest_of_params(dict(trainer.engine.weights())) != before.digest
    assert update.version == V1
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert loaded.keys() == trainer.engine.snapshot().keys()
    assert all(torch.equal(loaded[n], p) for n, p in trainer.engine.weights())
