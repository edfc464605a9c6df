"""One update: versions, proximal log-probs, and what is left after an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.errors import NonFiniteLoss, TrainingError, WeightSyncError
from offbeat.types import PolicyVersion, TrainSample

V0, V1, V2, V3 = (PolicyVersion(v) for v in range(4))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def spoil(trainer: Any, *, backward: int, value: float = float("nan")) -> Any:
    """Make the gradient of one backward pass non-finite; returns the handle that undoes it."""
    parameter = next(p for n, p in trainer.engine.weights() if n.endswith("q_proj.weight"))
    passes = iter(range(1, 100))
    return parameter.register_hook(lambda g: g * value if next(passes) == backward else g)


# Versions


def test_update_changes_weights_and_the_same_call_again_returns_the_stored_report(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer()
    before = trainer.engine.snapshot()
    report = trainer.actor.update(rollouts, V1)
    after = trainer.engine.snapshot()
    assert not same(before, after)
    assert (report.version, trainer.actor.version, report.rows) == (V1, V1, len(rollouts))
    assert report.tokens == sum(len(s.tokens) for s in rollouts)
    assert trainer.actor.update(rollouts[:3], V1) is report
    assert same(after, trainer.engine.snapshot())


@pytest.mark.parametrize("produce", [0, 2, -1])
def test_any_other_version_than_the_next_is_refused_and_changes_nothing(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], produce: int
) -> None:
    trainer = make_trainer()
    before = trainer.engine.snapshot()
    with pytest.raises(WeightSyncError, match=f"version {produce}, but the trainer holds.* 0"):
        trainer.actor.update(rollouts, PolicyVersion(produce))
    assert same(before, trainer.engine.snapshot())
    assert trainer.actor.update(rollouts, V1).version == V1


def test_report_of_an_older_version_is_not_given_out_again(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer()
    for version in (V1, V2):
        trainer.actor.update(rollouts, version)
    with pytest.raises(WeightSyncError, match="version 1, but the trainer holds version 2"):
        trainer.actor.update(rollouts, V1)


@pytest.mark.invariant("I03")
def test_two_trainers_end_with_the_same_bits(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    ends, reports = [], []
    for _ in range(2):
        trainer = make_trainer(ppo_n_minibatches=2, use_decoupled_loss=True, entropy_coef=0.01)
        updates = [trainer.actor.update(rollouts, version) for version in (V1, V2)]
        reports.append([u.metrics for u in updates])
        ends.append(trainer.engine.snapshot())
    assert same(*ends)
    assert reports[0] == reports[1]


def test_token_from_the_future_is_refused(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    newer = dataclasses.replace(first, versions=np.where(first.loss_mask, 1, -1))
    with pytest.raises(WeightSyncError, match="carries version 1, but the trainer holds version 0"):
        make_trainer().actor.update([newer, *rest], V1)


def test_token_that_was_never_stamped_is_refused(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    unstamped = dataclasses.replace(first, versions=np.full_like(first.versions, -1))
    with pytest.raises(TrainingError, match="never stamped"):
        make_trainer().actor.update([unstamped, *rest], V1)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_token_that_the_model_does_not_know_is_refused_and_changes_nothing(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], token: int
) -> None:
    trainer, (*others, last) = make_trainer(ppo_n_minibatches=2), rollouts
    before = trainer.engine.snapshot()
    foreign = dataclasses.replace(last, tokens=np.append(last.tokens[:-1], token))
    with pytest.raises(TrainingError, match=f"group {last.group_id} has token ids from .*{token}"):
        trainer.actor.update([*others, foreign], V1)
    assert same(before, trainer.engine.snapshot())


# Proximal log-probs


def test_one_minibatch_needs_no_extra_pass_and_several_recompute_once(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    def passes(**config: Any) -> int:
        trainer = make_trainer(max_tokens_per_mb=10_000, use_decoupled_loss=True, **config)
        trainer.actor.update(rollouts, V1)
        return trainer.engine.passes

    assert passes(ppo_n_minibatches=1) == 1
    assert passes(ppo_n_minibatches=4) == 1 + 4
    assert passes(ppo_n_minibatches=4, prox_logp_method="loglinear") == 4


def test_short_batch_of_one_group_is_one_minibatch_without_an_extra_pass(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(ppo_n_minibatches=4, use_decoupled_loss=True)
    report = trainer.actor.update(rollouts[:3], V1)
    assert (trainer.engine.passes, report.metrics["actor/minibatches_count"]) == (1, 1.0)


def test_proximal_log_probs_of_later_minibatches_are_those_of_the_start_of_the_step(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # On fresh rollouts p under the starting weights is the recorded log-prob: the decoupled step
    # must be the naive one, weights moving under it or not.
    naive = make_trainer(ppo_n_minibatches=4, lr=5e-3)
    decoupled = make_trainer(ppo_n_minibatches=4, lr=5e-3, use_decoupled_loss=True)
    reports = [t.actor.update(rollouts, V1) for t in (naive, decoupled)]
    assert same(naive.engine.snapshot(), decoupled.engine.snapshot())
    assert reports[1].metrics["actor/ratio_max"] > 1.01
    assert reports[1].metrics["actor/behave_weight_max"] == 1.0


def test_groups_go_to_minibatches_in_an_order_of_their_own_at_each_version(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(lr=0.0, ppo_n_minibatches=4)
    for version in (V1, V2, V3):
        trainer.actor.update(rollouts, version)
    first = [float(g["lm_head.weight"].norm()) for g in trainer.engine.gradients]
    orders = [tuple(np.argsort(first[i : i + 4]).tolist()) for i in (0, 4, 8)]
    assert len(set(orders)) > 1


# Recorded against recomputed


def test_recorded_log_probs_that_are_off_stop_before_the_weights_change(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer, fresh = make_trainer(), make_trainer()
    before = trainer.engine.snapshot()
    off = [dataclasses.replace(s, behave_logp=s.behave_logp + np.float32(0.01)) for s in rollouts]
    with pytest.raises(TrainingError, match=r"differ by 1\.00e-02 nats on tokens of version 0"):
        trainer.actor.update(off, V1)
    assert same(before, trainer.engine.snapshot())
    # The refused batch leaves nothing behind: the next try is the first.
    trainer.actor.update(rollouts, V1)
    fresh.actor.update(rollouts, V1)
    assert same(trainer.engine.snapshot(), fresh.engine.snapshot())


@pytest.mark.parametrize("group", range(4))
def test_recompute_finds_one_row_that_is_off_in_whatever_minibatch_it_is(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], group: int
) -> None:
    trainer = make_trainer(ppo_n_minibatches=4, use_decoupled_loss=True)
    before = trainer.engine.snapshot()
    off = list(rollouts)
    at = next(i for i, s in enumerate(off) if s.group_id == group)
    off[at] = dataclasses.replace(off[at], behave_logp=off[at].behave_logp + np.float32(0.01))
    with pytest.raises(TrainingError, match="recorded by the generator"):
        trainer.actor.update(off, V1)
    assert same(before, trainer.engine.snapshot())


def test_difference_within_the_tolerance_is_reported_whatever_row_it_is_in(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    for at, row in enumerate(rollouts):
        off = list(rollouts)
        off[at] = dataclasses.replace(row, behave_logp=row.behave_logp - np.float32(5e-4))
        # One row in most micro-batches.
        report = make_trainer(max_tokens_per_mb=18).actor.update(off, V1)
        assert report.metrics["actor/logp_error_max"] == pytest.approx(5e-4, rel=1e-2)


def test_one_recorded_log_prob_that_is_not_finite_does_not_hide_the_others(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    logp = first.behave_logp + np.float32(0.01)
    logp[-1] = np.nan
    with pytest.raises(TrainingError, match="recorded by the generator"):
        make_trainer().actor.update([dataclasses.replace(first, behave_logp=logp), *rest], V1)


def test_row_that_a_weight_swap_overtook_is_left_out_of_the_comparison(
    moved: Callable[..., Any],
    one_step_on: dict[str, torch.Tensor],
    overtaken: Callable[..., list[TrainSample]],
) -> None:
    samples = overtaken(one_step_on)
    mixed = [s for s in samples if len(set(s.versions[s.loss_mask].tolist())) == 2]
    assert 0 < len(mixed) < len(samples)
    report = moved(use_decoupled_loss=True).actor.update(samples, V2)
    assert report.metrics["actor/logp_error_max"] == 0.0
    # They are indeed not what one pass under the new weights computes.
    stamped = [dataclasses.replace(s, versions=s.loss_mask * 2 - 1) for s in samples]
    with pytest.raises(TrainingError, match="tokens of version 1"):
        moved(use_decoupled_loss=True).actor.update(stamped, V2)


def test_batch_without_a_fresh_row_reports_no_difference_instead_of_zero(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    report = moved(use_decoupled_loss=True).actor.update(rollouts, V2)
    assert "actor/logp_error_max" not in report.metrics
    assert (report.metrics["lag/token_mean"], report.metrics["lag/token_max"]) == (1.0, 1.0)


# Errors


@pytest.mark.parametrize("minibatches", [1, 4])
def test_row_longer_than_the_budget_is_found_before_any_pass(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], minibatches: int
) -> None:
    longest = max(len(s.tokens) for s in rollouts)
    trainer = make_trainer(max_tokens_per_mb=longest - 1, ppo_n_minibatches=minibatches)
    before = trainer.engine.snapshot()
    with pytest.raises(TrainingError, match=f"{longest} tokens, more than .* {longest - 1}"):
        trainer.actor.update(rollouts, V1)
    assert trainer.engine.passes == 0
    assert same(before, trainer.engine.snapshot())


def test_batch_of_empty_answers_says_so(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    empty = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in rollouts]
    with pytest.raises(TrainingError, match=r"12 rollouts.* every answer is empty"):
        make_trainer().actor.update(empty, V1)
    with pytest.raises(TrainingError, match="0 rollouts"):
        make_trainer().actor.update([], V1)


def test_batch_in_which_every_answer_was_cut_says_so_when_those_are_excluded(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    cut = [dataclasses.replace(s, truncated=True) for s in rollouts]
    with pytest.raises(TrainingError, match=r"every answer was cut .*exclude_truncated"):
        make_trainer(exclude_truncated=True).actor.update(cut, V1)
    assert make_trainer().actor.update(cut, V1).version == V1


def test_batch_without_any_finite_recorded_log_prob_says_so(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    lost = [
        dataclasses.replace(s, behave_logp=np.full_like(s.behave_logp, -np.inf)) for s in rollouts
    ]
    with pytest.raises(TrainingError, match="no recorded log-prob is finite"):
        make_trainer().actor.update(lost, V1)


def test_policy_token_without_a_predecessor_is_refused(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    start = dataclasses.replace(first, loss_mask=np.ones_like(first.loss_mask))
    with pytest.raises(TrainingError, match="starts with a policy token"):
        make_trainer().actor.update([start, *rest], V1)


def test_minibatch_without_a_token_in_the_loss_takes_no_step(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # Adam would move the weights on the momentum of other minibatches.
    samples = [dataclasses.replace(s, truncated=s.group_id in (1, 2)) for s in rollouts]
    trainer = make_trainer(ppo_n_minibatches=4, exclude_truncated=True)
    report = trainer.actor.update(samples, V1)
    assert report.metrics["actor/minibatches_count"] == 2.0
    trained = sum(s.loss_mask.sum() for s in samples if not s.truncated)
    assert report.metrics["actor/tokens_count"] == trained
    lost = [
        dataclasses.replace(s, behave_logp=np.full_like(s.behave_logp, np.nan))
        if s.group_id == 1
        else s
        for s in rollouts
    ]
    report = make_trainer(ppo_n_minibatches=4).actor.update(lost, V1)
    assert report.metrics["actor/minibatches_count"] == 3.0


def test_empty_answer_beside_others_counts_as_a_row_and_adds_nothing(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    first, *rest = rollouts
    empty = dataclasses.replace(first, loss_mask=np.zeros_like(first.loss_mask))
    # Alone in its micro-batch, and packed beside others.
    for budget in (len(first.tokens) + 3, 10_000):
        trainer = make_trainer(max_tokens_per_mb=budget)
        report = trainer.actor.update([empty, *rest], V1)
        assert report.metrics["actor/rows_count"] == 12.0
        assert report.metrics["actor/tokens_count"] == sum(s.loss_mask.sum() for s in rest)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39])
def test_reward_that_is_not_finite_names_its_group_and_changes_nothing(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], reward: float
) -> None:
    trainer = make_trainer()
    before = trainer.engine.snapshot()
    bad = [
        dataclasses.replace(s, reward=reward) if (s.group_id, s.sibling) == (2, 1) else s
        for s in rollouts
    ]
    with pytest.raises(NonFiniteLoss, match=r"1 of 12 values of reward .* groups 2; .* 3.4e38"):
        trainer.actor.update(bad, V1)
    assert same(before, trainer.engine.snapshot())


def test_advantage_that_overflows_names_its_group(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(reward_scaling=1e3)
    before = trainer.engine.snapshot()
    huge = [dataclasses.replace(s, reward=3e37) if s.group_id == 3 else s for s in rollouts]
    huge[-1] = dataclasses.replace(huge[-1], reward=1.0)
    with pytest.raises(NonFiniteLoss, match=r"groups 3; .* to 3e\+37; .* actor.reward_clip"):
        trainer.actor.update(huge, V1)
    assert same(before, trainer.engine.snapshot())


@pytest.mark.parametrize("config", [{}, {"recompute_logprob": True, "ppo_n_minibatches": 4}])
def test_log_prob_that_is_not_finite_names_its_group_and_changes_nothing(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], config: dict[str, Any]
) -> None:
    trainer = make_trainer(**config)
    embedding = dict(trainer.engine.weights())["model.embed_tokens.weight"]
    with torch.no_grad():
        embedding[1] = float("nan")
    # Only group 2 reads token 1.
    rows = [dataclasses.replace(s, tokens=np.where(s.tokens == 1, 0, s.tokens)) for s in rollouts]
    for s in rows:
        if s.group_id == 2:
            s.tokens[0] = 1
    before = trainer.engine.snapshot()
    with pytest.raises(NonFiniteLoss, match=r"values of log-prob .* groups 2$"):
        trainer.actor.update(rows, V1)
    after = trainer.engine.snapshot()
    assert all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)


def test_loss_that_overflows_names_its_groups_and_changes_nothing(
    moved: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    # A finite advantage times a finite weight.
    trainer = moved(
        use_decoupled_loss=True,
        behave_imp_weight_mode="token_truncate",
        behave_imp_weight_cap=1e9,
        reward_norm={"mean_level": "none", "std_level": "none"},
    )
    before = trainer.engine.snapshot()
    first, *rest = rollouts
    unlikely = dataclasses.replace(
        first, reward=1e38, behave_logp=first.behave_logp - np.float32(15.0)
    )
    with pytest.raises(NonFiniteLoss, match=r"the loss is -?inf, producing version 2 from groups"):
        trainer.actor.update([unlikely, *rest], V2)
    assert same(before, trainer.engine.snapshot())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_leaves_the_weights_and_the_next_try_is_the_first(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], value: float
) -> None:
    trainer, fresh = make_trainer(), make_trainer()
    before = trainer.engine.snapshot()
    fault = spoil(trainer, backward=1, value=value)
    with pytest.raises(NonFiniteLoss, match=r"gradient norm is .* from groups 0, 1, 2, 3$"):
        trainer.actor.update(rollouts, V1)
    fault.remove()
    assert same(before, trainer.engine.snapshot())
    assert trainer.actor.whole_version() == V0
    trainer.actor.update(rollouts, V1)
    fresh.actor.update(rollouts, V1)
    assert same(trainer.engine.snapshot(), fresh.engine.snapshot())


def test_update_that_fails_between_two_steps_is_neither_continued_nor_given_a_version(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(ppo_n_minibatches=4)
    trainer.actor.update(rollouts, V1)
    before = trainer.engine.snapshot()
    fault = spoil(trainer, backward=2)
    with pytest.raises(NonFiniteLoss, match="gradient norm is nan"):
        trainer.actor.update(rollouts, V2)
    fault.remove()
    half_way = trainer.engine.snapshot()
    assert not same(before, half_way)
    for produce in (V1, V2, V3):
        with pytest.raises(TrainingError, match="produce version 2 failed between two"):
            trainer.actor.update(rollouts, produce)
    with pytest.raises(TrainingError, match="failed between two"):
        trainer.actor.whole_version()
    assert same(half_way, trainer.engine.snapshot())
