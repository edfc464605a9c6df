"""What an update reports about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.observe.metrics import METRICS, PROX_MEASURES, prox_name
from offbeat.train.batch import TrainBatch
from offbeat.types import PolicyVersion, TrainSample

V1, V2 = PolicyVersion(1), PolicyVersion(2)
APPROXIMATIONS = ("loglinear", "linear", "rollout")


def present_logp(trainer: Any, samples: list[TrainSample]) -> tuple[torch.Tensor, TrainBatch]:
    batch = TrainBatch.build(samples, trainer.engine.device)
    with torch.no_grad():
        logp, _ = trainer.engine.logprobs(batch, 0.8)
    return logp.double(), batch


def test_metrics_method_trains_as_recompute_and_reports_the_approximations(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    config = {"use_decoupled_loss": True, "ppo_n_minibatches": 2}
    plain, measured = moved(**config), moved(**config, prox_logp_method="metrics")
    reports = [t.actor.update(rollouts, V2).metrics for t in (plain, measured)]
    for name, weight in plain.engine.snapshot().items():
        assert torch.equal(weight, measured.engine.snapshot()[name])
    extra = {prox_name(name, m) for name in APPROXIMATIONS for m in PROX_MEASURES}
    extra.add("actor/prox_logp_mean")
    assert reports[1].keys() - reports[0].keys() == extra
    assert {n: v for n, v in reports[1].items() if n not in extra} == reports[0]


def test_errors_of_the_approximations_are_their_distance_from_the_recomputed_log_prob(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(use_decoupled_loss=True, prox_logp_method="metrics", max_tokens_per_mb=40)
    # With one minibatch the recomputed log-prob is the present one: p = ℓ.
    p, batch = present_logp(trainer, rollouts)
    o = batch.behave_logp.double()
    approximate = {
        "rollout": o,
        "loglinear": (o + p) / 2,  # lag 1: α = 1/2
        "linear": torch.log((o.exp() + p.exp()) / 2),
    }
    metrics = trainer.actor.update(rollouts, V2).metrics
    for name, guess in approximate.items():
        error, ratio = (guess - p).abs(), (p - guess).exp()
        weight, true_weight = (guess - o).exp(), (p - o).exp()
        expected = {
            "logp_mean": guess.mean(),
            "error_mean": error.mean(),
            "error_max": error.max(),
            "relative_error_mean": error.mean() / p.abs().mean(),
            "squared_error_mean": error.square().mean(),
            "behave_weight_mean": weight.mean(),
            "behave_error_mean": (weight - true_weight).abs().mean(),
            "behave_relative_error_mean": ((weight - true_weight).abs() / true_weight).mean(),
            "ratio_mean": ratio.mean(),
            "ratio_error_mean": (ratio - 1).abs().mean(),
            "ratio_relative_error_mean": (ratio - 1).abs().mean(),
        }
        assert expected.keys() == PROX_MEASURES.keys()
        for measure, value in expected.items():
            got = metrics[prox_name(name, measure)]
            assert got == pytest.approx(float(value), rel=1e-4, abs=1e-7), (name, measure)
    assert metrics["actor/prox_logp_mean"] == pytest.approx(float(p.mean()), rel=1e-5)
    assert metrics["actor/prox_error_rollout_mean"] > metrics["actor/prox_error_loglinear_mean"] > 0


def test_several_minibatches_measure_against_the_weights_at_the_start_of_the_step(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(
        use_decoupled_loss=True, prox_logp_method="metrics", ppo_n_minibatches=4, lr=0.01
    )
    p, batch = present_logp(trainer, rollouts)
    found = trainer.actor.update(rollouts, V2).metrics
    rollout = (batch.behave_logp.double() - p).abs()
    # p and o do not move with the minibatches; ℓ, and with it the other approximations, does.
    assert found["actor/prox_logp_mean"] == pytest.approx(float(p.mean()), rel=1e-4)
    assert found["actor/prox_error_rollout_mean"] == pytest.approx(float(rollout.mean()), rel=1e-4)
    one = moved(use_decoupled_loss=True, prox_logp_method="metrics").actor.update(rollouts, V2)
    moved_by = found["actor/prox_error_loglinear_mean"]
    assert abs(moved_by - one.metrics["actor/prox_error_loglinear_mean"]) > 1e-3 * moved_by
    assert found["actor/prox_ratio_rollout_mean"] != pytest.approx(
        one.metrics["actor/prox_ratio_rollout_mean"], rel=1e-6
    )


def test_fresh_rollouts_of_one_minibatch_have_no_approximation_error(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(use_decoupled_loss=True, prox_logp_method="metrics")
    p, batch = present_logp(trainer, rollouts)
    same = (batch.behave_logp.double() - p).abs().max()
    found = trainer.actor.update(rollouts, V1).metrics
    for name in APPROXIMATIONS:
        assert found[prox_name(name, "error_max")] <= float(same) + 1e-6
        assert found[prox_name(name, "ratio_mean")] == pytest.approx(1.0, abs=1e-4)


def test_distance_of_proximal_from_behavior_policy_is_reported(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(use_decoupled_loss=True, behave_imp_weight_cap=1.5, max_tokens_per_mb=40)
    p, batch = present_logp(trainer, rollouts)
    x = batch.behave_logp.double() - p
    rho = (-x).exp()
    weight = torch.where(rho > 1.5, 0.0, rho)
    expected = {
        "actor/behave_weight_mean": rho.mean(),
        "actor/behave_weight_min": rho.min(),
        "actor/behave_weight_max": rho.max(),
        "actor/masked_fraction": (rho > 1.5).double().mean(),
        "actor/kl_k1": x.mean(),
        "actor/kl_k3": ((-x).exp() - 1 + x).mean(),
        "actor/ess": weight.sum() ** 2 / (len(x) * weight.square().sum()),
        "lag/token_mean": torch.tensor(1.0),
        "lag/token_max": torch.tensor(1.0),
    }
    metrics = trainer.actor.update(rollouts, V2).metrics
    assert 0 < metrics["actor/masked_fraction"] < 1
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name


def test_clipped_fractions_and_ratios_are_those_of_the_naive_ratio(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(max_tokens_per_mb=40, c_clip=1.1)
    logp, batch = present_logp(trainer, rollouts)
    u = (logp - batch.behave_logp.double()).exp()
    mean = {
        g: np.mean([s.reward for s in rollouts if s.group_id == g])
        for g in {s.group_id for s in rollouts}
    }
    sign = torch.tensor([np.sign(s.reward - mean[s.group_id]) for s in rollouts])[batch.seq_id]
    clipped = ((sign > 0) & (u > 1.2)) | ((sign < 0) & (u < 0.8))
    dual = (sign < 0) & (u > 1.1)
    metrics = trainer.actor.update(rollouts, V2).metrics
    assert metrics["actor/clip_fraction"] == pytest.approx(float(clipped.double().mean()))
    assert metrics["actor/dual_clip_fraction"] == pytest.approx(float(dual.double().mean()))
    assert clipped.any()
    assert dual.any()
    assert metrics["actor/ratio_mean"] == pytest.approx(float(u.mean()), rel=1e-4)
    assert metrics["actor/ratio_min"] == pytest.approx(float(u.min()), rel=1e-4)
    assert metrics["actor/ratio_max"] == pytest.approx(float(u.max()), rel=1e-4)


def test_loss_and_entropy_do_not_depend_on_the_micro_batches(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    reports = [
        moved(max_tokens_per_mb=budget, entropy_coef=0.1).actor.update(rollouts, V2).metrics
        for budget in (18, 10_000)
    ]
    for name, value in reports[0].items():
        assert reports[1][name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


def test_loss_holds_the_entropy_bonus(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    plain, bonus = (
        make_trainer(entropy_coef=c).actor.update(rollouts, V1).metrics for c in (0.0, 0.5)
    )
    expected = plain["actor/loss"] - 0.5 * plain["actor/entropy"]
    assert bonus["actor/loss"] == pytest.approx(expected, rel=1e-5)


def test_loss_and_gradient_norm_are_means_over_optimizer_steps(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # With rate 0 and groups of one size, the mean over minibatches is the mean over all rows.
    one, four = (moved(lr=0.0, ppo_n_minibatches=n, max_tokens_per_mb=60) for n in (1, 4))
    whole, parts = (t.actor.update(rollouts, V2).metrics for t in (one, four))
    assert parts["actor/minibatches_count"] == 4.0
    assert parts["actor/loss"] == pytest.approx(whole["actor/loss"], rel=1e-4)
    norms = [
        float(torch.stack([g.norm() for g in gradient.values()]).norm())
        for gradient in four.engine.gradients
    ]
    assert parts["actor/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


def test_token_without_a_finite_recorded_log_prob_is_counted_and_leaves_every_mean(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    logp = first.behave_logp.copy()
    logp[-1] = -np.inf
    samples = [dataclasses.replace(first, behave_logp=logp), *rest]
    metrics = moved(use_decoupled_loss=True, prox_logp_method="metrics").actor.update(samples, V2)
    found = metrics.metrics
    assert found["actor/nonfinite_count"] == 1.0
    assert found["actor/tokens_count"] == sum(s.loss_mask.sum() for s in rollouts) - 1
    assert found["actor/masked_fraction"] * found["actor/tokens_count"] % 1 == pytest.approx(
        0, abs=1e-9
    )
    assert np.isfinite(list(found.values())).all()


def test_excluded_rows_leave_every_mean(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    cut = [dataclasses.replace(s, truncated=s.group_id == 1) for s in rollouts]
    with_them = make_trainer(exclude_truncated=True).actor.update(cut, V1).metrics
    rest = [s for s in cut if not s.truncated]
    without = make_trainer(exclude_truncated=True).actor.update(rest, V1).metrics
    for name in ("entropy", "ratio_mean", "ess", "masked_fraction", "tokens_count", "kl_k3"):
        assert with_them[f"actor/{name}"] == pytest.approx(without[f"actor/{name}"], rel=1e-6)
    assert with_them["actor/masked_fraction"] == 0.0
    assert with_them["actor/ess"] == 1.0


def test_advantages_are_reported_by_sample_and_are_those_of_its_reward(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    report = make_trainer(adv_norm=None).actor.update(rollouts, V1)
    rewards = np.array([s.reward for s in rollouts])
    groups = np.array([s.group_id for s in rollouts])
    ranked = [np.argsort(rewards[groups == g]) for g in np.unique(groups)]
    found = np.array(report.advantages)
    assert len(found) == len(rollouts)
    assert np.ptp(found) > 0
    for g, order in zip(np.unique(groups), ranked, strict=True):
        assert (np.diff(found[groups == g][order]) >= 0).all()


def test_every_reported_name_is_declared(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = moved(use_decoupled_loss=True, prox_logp_method="metrics")
    report = trainer.actor.update(rollouts, V2)
    assert report.metrics.keys() <= METRICS.keys()
    assert 0 <= report.ended - report.started < 60
