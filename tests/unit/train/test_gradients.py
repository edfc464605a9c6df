"""The gradient of a step: against an oracle, and against everything it must not depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.config import NormConfig
from offbeat.seeds import derive
from offbeat.train.batch import TrainBatch
from offbeat.train.pack import split_minibatches
from offbeat.types import PolicyVersion, TrainSample

V1, V2 = PolicyVersion(1), PolicyVersion(2)
FLOAT32 = 1e-5
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to each tensor's norm."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


@pytest.fixture
def gradient(make_trainer: Callable[..., Any], moved: Callable[..., Any]) -> Callable[..., Any]:
    """``gradient(samples, lag=…, **config)``: what the first optimizer step is taken with."""

    def of(samples: Sequence[TrainSample], *, lag: int = 0, **config: Any) -> Any:
        trainer = moved(**config) if lag else make_trainer(**config)
        trainer.actor.update(samples, PolicyVersion(1 + lag))
        return trainer.engine.gradients[0]

    return of


# I07, I08


@pytest.mark.invariant("I07")
def test_recomputed_log_probs_equal_the_recorded_ones_bit_for_bit(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    engine = make_trainer().engine
    batch = TrainBatch.build(rollouts, engine.device)
    with torch.no_grad():
        together, _ = engine.logprobs(batch, 0.8)
        alone = [engine.logprobs(batch.select([r]), 0.8)[0] for r in range(batch.rows)]
    assert torch.equal(together, batch.behave_logp)
    assert torch.equal(torch.cat(alone), batch.behave_logp)
    assert len(together) > 50


@pytest.mark.invariant("I08")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"recompute_logprob": True},
        {"recompute_logprob": True, "ppo_n_minibatches": 4},
        {"use_decoupled_loss": True},
        {"use_decoupled_loss": True, "prox_logp_method": "loglinear"},
        {"use_decoupled_loss": True, "behave_imp_weight_mode": "sequence_truncate"},
    ],
)
def test_first_optimizer_step_on_fresh_rollouts_has_ratio_and_weight_one_and_no_kl(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], config: dict[str, Any]
) -> None:
    # With lr 0 the later minibatches are first ones too.
    metrics = make_trainer(lr=0.0, **config).actor.update(rollouts, V1).metrics
    ones = ("ratio_mean", "ratio_min", "ratio_max", "behave_weight_mean", "behave_weight_min")
    assert [metrics[f"actor/{n}"] for n in (*ones, "behave_weight_max", "ess")] == [1.0] * 7
    zeros = ("kl_k1", "kl_k3", "clip_fraction", "dual_clip_fraction", "masked_fraction")
    assert [metrics[f"actor/{n}"] for n in (*zeros, "logp_error_max")] == [0.0] * 6
    assert (metrics["lag/token_mean"], metrics["lag/token_max"]) == (0.0, 0.0)


# Oracle


def oracle(path: Path, weights: Any, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """Gradient of the decoupled loss at lag 1, row by row in float64, by transformers alone.

    loss = -mean over rows of the row's mean of w · u · A, with u = exp(ℓ - sg(ℓ)) = 1, w = p/o, and
    w = 0 above the cap of 5.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    model.load_state_dict({n: w.double() for n, w in weights.items()}, strict=False)
    for sample in samples:
        logits = model(torch.from_numpy(sample.tokens.copy())[None]).logits[0] / 0.8
        group = [s.reward for s in samples if s.group_id == sample.group_id]
        advantage = (sample.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-5)
        places = np.flatnonzero(sample.loss_mask)
        total = torch.zeros((), dtype=torch.float64)
        for t in places.tolist():
            logp = torch.log_softmax(logits[t - 1], -1)[int(sample.tokens[t])]
            weight = float(torch.exp(logp.detach() - float(sample.behave_logp[t])))
            if weight <= 5.0:
                total = total - weight * advantage * torch.exp(logp - logp.detach())
        (total / len(places) / len(samples)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_gradient_is_the_one_of_a_float64_loop_over_rows(
    tiny: Path, moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(use_decoupled_loss=True)
    weights = trainer.engine.snapshot()
    trainer.actor.update(rollouts, V2)
    expected = oracle(tiny, weights, rollouts)
    got = {n: g.double() for n, g in trainer.engine.gradients[0].items()}
    assert distance(got, expected) < FLOAT32


# I09


@pytest.mark.invariant("I09")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("budget", [18, 40, 10_000])
def test_gradient_does_not_depend_on_the_micro_batch_budget(
    gradient: Callable[..., Any], rollouts: list[TrainSample], aggregation: str, budget: int
) -> None:
    config = {"use_decoupled_loss": True, "loss_aggregation": aggregation, "entropy_coef": 0.01}
    whole = gradient(rollouts, lag=1, **config)
    cut = gradient(rollouts, lag=1, max_tokens_per_mb=budget, **config)
    assert distance(cut, whole) < FLOAT32


@pytest.mark.invariant("I09")
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_gradient_does_not_depend_on_the_order_of_rows(
    gradient: Callable[..., Any], rollouts: list[TrainSample], minibatches: int, mode: str
) -> None:
    config = {
        "use_decoupled_loss": True,
        "behave_imp_weight_mode": mode,
        "ppo_n_minibatches": minibatches,
        "max_tokens_per_mb": 60,
    }
    order = np.random.default_rng(5).permutation(len(rollouts))
    assert [rollouts[i].group_id for i in order] != sorted(s.group_id for s in rollouts)
    shuffled = [rollouts[i] for i in order]
    in_order = gradient(rollouts, lag=1, **config)
    assert distance(gradient(shuffled, lag=1, **config), in_order) < FLOAT32


@pytest.mark.invariant("I09")
def test_log_probs_of_a_row_do_not_depend_on_the_rows_packed_beside_it(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    engine = make_trainer().engine
    batch = TrainBatch.build(rollouts, engine.device)
    with torch.no_grad():
        alone = engine.logprobs(batch.select([4]), 0.8)[0]
        beside = engine.logprobs(batch.select([7, 4, 0]), 0.8)[0]
    at = int(batch.row_tokens[7])
    assert torch.equal(beside[at : at + len(alone)], alone)


@pytest.mark.invariant("I09")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_minibatch_gradients_average_to_the_one_of_the_whole_batch(
    gradient: Callable[..., Any],
    make_trainer: Callable[..., Any],
    rollouts: list[TrainSample],
    aggregation: str,
) -> None:
    # With lr 0 every minibatch sees the same weights; each has its own tokens as denominator.
    trainer = make_trainer(lr=0.0, ppo_n_minibatches=4, loss_aggregation=aggregation)
    trainer.actor.update(rollouts, V1)
    tokens = {g: sum(s.loss_mask.sum() for s in rollouts if s.group_id == g) for g in range(4)}
    order = [
        rollouts[rows[0]].group_id
        for rows in split_minibatches([s.group_id for s in rollouts], 4, derive(3, "minibatch", 1))
    ]
    assert len(set(tokens.values())) > 1
    whole = gradient(rollouts, loss_aggregation=aggregation)
    share = {g: n / sum(tokens.values()) for g, n in tokens.items()}
    if aggregation != "token_mean":
        share = dict.fromkeys(range(4), 0.25)
    parts = list(zip(order, trainer.engine.gradients, strict=True))
    mean = {n: torch.stack([share[g] * part[n] for g, part in parts]).sum(0) for n in whole}
    assert distance(mean, whole) < FLOAT32


# What the gradient must depend on


def test_decoupled_and_naive_loss_differ_on_a_batch_of_lag_one(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # Where nothing is clipped the two are the same function; clipping decides about the rest.
    naive = gradient(rollouts, lag=1, eps_clip=0.05)
    recompute = gradient(rollouts, lag=1, eps_clip=0.05, use_decoupled_loss=True)
    loglinear = gradient(
        rollouts, lag=1, eps_clip=0.05, use_decoupled_loss=True, prox_logp_method="loglinear"
    )
    assert distance(recompute, naive) > 0.01
    assert distance(loglinear, naive) > 0.01
    assert distance(loglinear, recompute) > 0.01


def test_recomputed_but_not_decoupled_differs_from_both(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    plain = gradient(rollouts, lag=1, recompute_logprob=True)
    assert distance(plain, gradient(rollouts, lag=1)) > 0.01
    assert distance(plain, gradient(rollouts, lag=1, use_decoupled_loss=True)) > 0.01


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    "change",
    [
        {"loss_aggregation": "token_mean"},
        {"eps_clip": 0.01},
        {"eps_clip": 0.01, "eps_clip_higher": 0.5},
        {"behave_imp_weight_cap": 1.05},
        {"behave_imp_weight_floor": 0.95},
        {"behave_imp_weight_mode": "token_truncate", "behave_imp_weight_cap": 1.05},
        {"behave_imp_weight_mode": "sequence_mask"},
        {"entropy_coef": 0.05},
        {"exclude_truncated": True},
        {"mask_no_eos_with_zero": True},
        {"reward_clip": 1.0},
        {"reward_clip": 1.0, "reward_bias": -1.0},
        {"reward_clip": 1.0, "reward_scaling": 0.3},
        {"adv_norm": NormConfig()},
        {"reward_norm": NormConfig(mean_level="batch", std_level="group")},
        {"reward_norm": NormConfig(mean_level="group", std_level="batch")},
        {"reward_norm": NormConfig(mean_level="group", std_level="none")},
        {"reward_norm": NormConfig(mean_level="group", mean_leave_one_out=True, std_level="none")},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_option_of_the_objective_changes_the_gradient(
    gradient: Callable[..., Any], rollouts: list[TrainSample], change: dict[str, Any]
) -> None:
    # The last option of a case is the one under test. Naive at lag 1 for those of the clip: with
    # one minibatch the decoupled ratio is 1 and nothing is clipped.
    clip = "eps_clip" in change
    base: dict[str, Any] = {} if clip else {"use_decoupled_loss": True}
    without = {k: v for k, v in change.items() if k != list(change)[-1]}
    reference = gradient(rollouts, lag=1, **base, **without)
    assert distance(gradient(rollouts, lag=1, **base, **change), reference) > 1e-3


@pytest.mark.invariant("I10")
def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    assert distance(gradient(rollouts, lag=1, c_clip=1.01), gradient(rollouts, lag=1)) > 1e-3


@pytest.mark.invariant("I10")
def test_reward_and_recorded_log_prob_of_one_row_change_the_gradient(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    config = {"use_decoupled_loss": True, "loss_aggregation": "token_mean"}
    first, *rest = rollouts
    reference = gradient(rollouts, lag=1, **config)
    rewarded = dataclasses.replace(first, reward=6.5)
    likelier = dataclasses.replace(first, behave_logp=first.behave_logp + np.float32(0.1))
    assert distance(gradient([rewarded, *rest], lag=1, **config), reference) > 1e-3
    assert distance(gradient([likelier, *rest], lag=1, **config), reference) > 1e-3


@pytest.mark.invariant("I10")
def test_how_stale_a_token_is_changes_the_interpolated_proximal_log_prob(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    gradients = []
    for version in (0, 1):
        trainer = moved(use_decoupled_loss=True, prox_logp_method="loglinear")
        trainer.actor.version = V2
        stamped = [
            dataclasses.replace(s, versions=np.where(s.loss_mask, version, -1)) for s in rollouts
        ]
        trainer.actor.update(stamped, PolicyVersion(3))
        gradients.append(trainer.engine.gradients[0])
    assert distance(*gradients) > 1e-3


def test_unnormalized_rewards_are_biased_scaled_and_clipped_in_that_order(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    plain = NormConfig(mean_level="none", std_level="none")
    shaped = [
        dataclasses.replace(s, reward=float(np.clip((s.reward - 2.0) * 0.5, -1.0, 1.0)))
        for s in rollouts
    ]
    by_config = gradient(
        rollouts, reward_norm=plain, reward_bias=-2.0, reward_scaling=0.5, reward_clip=1.0
    )
    assert distance(by_config, gradient(shaped, reward_norm=plain)) == 0.0


def test_leave_one_out_mean_scales_the_gradient_by_n_over_n_minus_one(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    centered, left_out = (
        gradient(
            rollouts,
            reward_norm=NormConfig(mean_level="group", mean_leave_one_out=flag, std_level="none"),
        )
        for flag in (False, True)
    )
    assert distance({n: g * 1.5 for n, g in centered.items()}, left_out) < FLOAT32


def test_excluded_and_zeroed_truncated_rows_give_no_push_but_keep_the_denominator(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # Without entropy a token outside the loss and one of advantage 0 are the same.
    excluded = gradient(rollouts, exclude_truncated=True)
    assert distance(gradient(rollouts, mask_no_eos_with_zero=True), excluded) < FLOAT32
    with_entropy = gradient(rollouts, exclude_truncated=True, entropy_coef=0.05)
    zeroed = gradient(rollouts, mask_no_eos_with_zero=True, entropy_coef=0.05)
    assert distance(zeroed, with_entropy) > 1e-3


def test_group_whose_rewards_are_equal_gives_no_gradient_whatever_the_others_do(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    level = [dataclasses.replace(s, reward=0.1 if s.group_id == 2 else s.reward) for s in rollouts]
    # Rows of group 2 with any other equal reward: exactly the same step.
    other = [dataclasses.replace(s, reward=1e6 if s.group_id == 2 else s.reward) for s in rollouts]
    assert distance(gradient(level), gradient(other)) == 0.0


def test_group_statistics_follow_the_group_id_when_rows_are_interleaved(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    interleaved = sorted(rollouts, key=lambda s: (s.sibling, -s.group_id))
    assert [s.group_id for s in interleaved[:4]] == [3, 2, 1, 0]
    assert distance(gradient(interleaved), gradient(rollouts)) < FLOAT32


def test_groups_of_different_size_are_each_normalized_by_themselves(
    gradient: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    uneven = [s for s in rollouts if not (s.group_id == 1 and s.sibling == 0)]
    z = {
        g: (np.mean(r), np.std(r, ddof=1) + 1e-5)
        for g in range(4)
        for r in [[s.reward for s in uneven if s.group_id == g]]
    }
    by_hand = [
        dataclasses.replace(s, reward=float((s.reward - z[s.group_id][0]) / z[s.group_id][1]))
        for s in uneven
    ]
    plain = NormConfig(mean_level="none", std_level="none")
    assert distance(gradient(uneven), gradient(by_hand, reward_norm=plain)) < FLOAT32
