"""Learning-rate schedules and weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offbeat.config import OptimizerConfig
from offbeat.train.optim import build_optimizer, build_scheduler
from offbeat.types import PolicyVersion, TrainSample


def rates(steps: int, **config: Any) -> list[float]:
    """The rate of each of ``steps`` optimizer steps."""
    model = torch.nn.Linear(2, 2)
    settings = OptimizerConfig(lr=1.0, **config)
    optimizer = build_optimizer(model, settings)
    scheduler = build_scheduler(optimizer, settings, steps)
    found = []
    for _ in range(steps):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def test_constant_rate_is_constant() -> None:
    assert rates(5) == [1.0] * 5


def test_linear_rate_falls_by_equal_parts_to_zero_after_the_last_step() -> None:
    assert rates(4, lr_scheduler_type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_cosine_rate_follows_half_a_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert rates(8, lr_scheduler_type="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_from_zero_over_its_share_of_the_steps(kind: str) -> None:
    found = rates(20, lr_scheduler_type=kind, warmup_steps_proportion=0.2)
    assert found[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert max(found[5:]) <= 1.0
    if kind == "constant":
        assert found[5:] == [1.0] * 15
    else:
        assert found[5:] == sorted(found[5:], reverse=True)
        assert found[-1] < 0.1


def test_rate_that_a_step_was_taken_with_is_reported_and_advances_per_minibatch(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(
        lr=1e-3, ppo_n_minibatches=2, total_steps=8, optimizer={"lr_scheduler_type": "linear"}
    )
    found = [
        trainer.actor.update(rollouts, PolicyVersion(v)).metrics["actor/lr"] for v in (1, 2, 3)
    ]
    # Two steps of eight per update; the last of each is reported.
    assert found == pytest.approx([7e-3 / 8, 5e-3 / 8, 3e-3 / 8])


def test_rate_of_zero_leaves_the_weights_alone(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(lr=0.0)
    before = trainer.engine.snapshot()
    trainer.actor.update(rollouts, PolicyVersion(1))
    after = trainer.engine.snapshot()
    assert all(torch.equal(before[n], after[n]) for n in before)


class Small(torch.nn.Module):
    """A matrix, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_weight_decay_shrinks_matrices_and_neither_biases_nor_norms() -> None:
    model = Small()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = {
        name: parameter.detach().unique().tolist() for name, parameter in model.named_parameters()
    }
    assert after.pop("linear.weight") == [pytest.approx(1 - 0.1 * 0.5)]
    assert after == {name: [1.0] for name in ("linear.bias", "norm.weight", "norm.bias", "frozen")}


def test_moments_and_epsilon_are_those_of_the_configuration() -> None:
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.7, eps=1e-3, weight_decay=0.0)
    (group,) = build_optimizer(torch.nn.Linear(2, 2, bias=False), config).param_groups
    assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.7), 1e-3, 0.1)


def test_decay_and_moments_reach_the_trained_weights(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    ends = []
    for decay in (0.0, 0.1):
        trainer = make_trainer(lr=1e-2, optimizer={"weight_decay": decay})
        before = trainer.engine.snapshot()
        trainer.actor.update(rollouts, PolicyVersion(1))
        ends.append(trainer.engine.snapshot())
    for name, plain in ends[0].items():
        expected = plain - 1e-2 * 0.1 * before[name] if before[name].ndim >= 2 else plain
        assert torch.allclose(ends[1][name], expected, atol=1e-6), name
