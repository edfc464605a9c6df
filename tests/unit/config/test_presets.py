"""``mode``, ``algorithm`` and ``gconfig`` fill what was not given, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from offbeat.config import (
    ActorConfig,
    AsyncMode,
    BehaveImpWeightMode,
    LossAggregation,
    MegatronEngineConfig,
    NormConfig,
    NormLevel,
    PPOActorConfig,
    ProxLogpMethod,
    RunConfig,
    RunMode,
    SaverConfig,
    describe,
    from_mapping,
)


def config(**sections: object) -> RunConfig:
    rollout = sections.pop("rollout", {})
    base: dict[str, object] = {"model": {"path": "m"}, "train_dataset": {"path": "rows.jsonl"}}
    assert isinstance(rollout, Mapping)
    return from_mapping({**base, "rollout": {"reward_fn": "r:f", **rollout}, **sections})


def switches(cfg: RunConfig) -> tuple[object, ...]:
    return (
        cfg.rollout.max_staleness,
        cfg.actor.use_decoupled_loss,
        cfg.saver.mode,
        cfg.megatron.async_save,
    )


SYNC = (0, False, AsyncMode.SYNC, False)
ASYNC = (4, True, AsyncMode.ASYNC, True)


@pytest.mark.parametrize(
    ("sections", "mode", "expected"),
    [
        ({}, RunMode.SYNC, SYNC),
        ({"mode": "sync"}, RunMode.SYNC, SYNC),
        ({"mode": None}, RunMode.SYNC, SYNC),
        ({"mode": "async"}, RunMode.ASYNC, ASYNC),
        ({"actor": {"use_decoupled_loss": True}}, RunMode.ASYNC, ASYNC),
        ({"actor": {"use_decoupled_loss": False}}, RunMode.SYNC, SYNC),
    ],
)
def test_mode_decides_the_four_switches(sections, mode, expected):
    cfg = config(**sections)
    assert cfg.mode is mode
    assert switches(cfg) == expected


def test_sync_rollouts_with_async_saves():
    cfg = config(saver={"mode": "async"}, megatron={"async_save": True})
    assert switches(cfg) == (0, False, AsyncMode.ASYNC, True)


def test_async_rollouts_with_sync_saves():
    cfg = config(mode="async", saver={"mode": "sync"}, megatron={"async_save": False})
    assert switches(cfg) == (4, True, AsyncMode.SYNC, False)


def test_staleness_given_wins_over_the_preset():
    assert config(mode="async", rollout={"max_staleness": 1}).rollout.max_staleness == 1
    cfg = config(actor={"use_decoupled_loss": True}, rollout={"max_staleness": 0})
    assert switches(cfg) == (0, True, AsyncMode.ASYNC, True)


def test_decoupled_loss_in_explicit_sync_mode_keeps_synchronous_rollouts():
    cfg = config(mode="sync", actor={"use_decoupled_loss": True})
    assert switches(cfg) == (0, True, AsyncMode.SYNC, False)


def test_python_objects_keep_a_value_that_equals_the_default():
    cfg = config(mode="async", saver=SaverConfig(mode="sync"))
    assert cfg.saver.mode is AsyncMode.SYNC


def test_other_name_of_max_staleness_is_accepted():
    decoupled = {"use_decoupled_loss": True}
    cfg = config(actor=decoupled, rollout={"max_head_offpolicyness": 2})
    assert cfg == config(actor=decoupled, rollout={"max_staleness": 2})
    both = {"max_head_offpolicyness": 2, "max_staleness": 2}
    assert config(actor=decoupled, rollout=both) == cfg


def test_uncorrected_staleness_is_possible_when_asked_for():
    cfg = config(rollout={"max_staleness": 2, "allow_uncorrected": True})
    assert cfg.rollout.max_staleness == 2


@pytest.mark.parametrize(
    ("algorithm", "aggregation", "norm"),
    [
        ("grpo", "sequence_mean", ("group", False, "group")),
        ("dr_grpo", "constant", ("group", False, "none")),
        ("rloo", "token_mean", ("group", True, "none")),
        ("lite_ppo", "token_mean", ("group", False, "batch")),
    ],
)
def test_algorithm_decides_aggregation_and_reward_norm(algorithm, aggregation, norm):
    actor = config(algorithm=algorithm).actor
    assert actor.loss_aggregation is LossAggregation(aggregation)
    found = actor.reward_norm
    assert (found.mean_level, found.mean_leave_one_out, found.std_level) == norm


def test_part_of_reward_norm_leaves_the_rest_to_the_algorithm():
    norm = config(actor={"reward_norm": {"mean_level": "batch"}}).actor.reward_norm
    assert (norm.mean_level, norm.std_level) == (NormLevel.BATCH, NormLevel.GROUP)
    norm = config(algorithm="rloo", actor={"reward_norm": {"mean_level": "none"}}).actor.reward_norm
    assert norm.mean_leave_one_out is False


def test_group_baseline_is_what_needs_two_answers():
    off = {"mean_level": "none", "std_level": "none"}
    cfg = config(gconfig={"n_samples": 1}, actor={"reward_norm": off})
    assert cfg.actor.reward_norm.uses_group is False


def test_adv_norm_uses_its_own_defaults():
    assert config().actor.adv_norm is None
    norm = config(actor={"adv_norm": {"std_level": "none"}}).actor.adv_norm
    assert norm == NormConfig(mean_level="batch", std_level="none")


def test_evaluation_is_greedy_with_lengths_and_stops_of_training():
    training = {"max_new_tokens": 32, "stop": ["\n"], "stop_token_ids": [7]}
    cfg = config(gconfig=training)
    found = cfg.eval_gconfig
    assert (found.n_samples, found.temperature) == (1, 0.0)
    assert (found.max_new_tokens, found.stop, found.stop_token_ids) == (32, ("\n",), (7,))
    own = config(gconfig=training, eval_gconfig={"stop": [], "temperature": 0.7, "n_samples": 4})
    assert (own.eval_gconfig.stop, own.eval_gconfig.max_new_tokens) == ((), 32)
    assert (own.eval_gconfig.temperature, own.eval_gconfig.n_samples) == (0.7, 4)


def test_validation_rows_are_read_in_order():
    cfg = config(valid_dataset={"path": "v.jsonl"})
    assert cfg.valid_dataset is not None
    assert cfg.valid_dataset.shuffle is False
    assert cfg.train_dataset.shuffle is True


def test_proximal_and_weight_follow_decoupled_loss():
    plain, decoupled = ActorConfig(), ActorConfig(use_decoupled_loss=True)
    assert (plain.prox_logp_method, plain.behave_imp_weight_cap) == (None, None)
    assert plain.behave_imp_weight_mode is BehaveImpWeightMode.DISABLED
    assert decoupled.prox_logp_method is ProxLogpMethod.RECOMPUTE
    assert decoupled.behave_imp_weight_mode is BehaveImpWeightMode.TOKEN_MASK
    assert decoupled.behave_imp_weight_cap == 5.0
    off = ActorConfig(use_decoupled_loss=True, behave_imp_weight_mode="disabled")
    assert off.behave_imp_weight_cap is None


def test_keys_of_decoupled_loss_may_rely_on_the_mode():
    cfg = config(mode="async", actor={"prox_logp_method": "loglinear", "behave_imp_weight_cap": 2})
    assert cfg.actor.prox_logp_method is ProxLogpMethod.LOGLINEAR
    assert cfg.actor.behave_imp_weight_cap == 2.0


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"use_decoupled_loss": True, "prox_logp_method": "recompute"}, True),
        ({"use_decoupled_loss": True, "prox_logp_method": "metrics"}, True),
        ({"use_decoupled_loss": True, "prox_logp_method": "loglinear"}, False),
        ({"use_decoupled_loss": True}, True),
        ({"use_decoupled_loss": False, "recompute_logprob": True}, True),
        ({"use_decoupled_loss": False, "recompute_logprob": False}, False),
        ({}, False),
    ],
)
def test_proximal_forward_pass_is_needed_only_where_the_formula_says(kwargs, expected):
    assert PPOActorConfig(**kwargs).should_compute_prox_logp() is expected


def test_python_sections_and_yaml_sections_give_equal_configurations():
    objects = config(
        saver=SaverConfig(mode="async", freq_epochs=0, freq_steps=1000, freq_secs=0),
        megatron=MegatronEngineConfig(async_save=True),
        actor=PPOActorConfig(
            use_decoupled_loss=True,
            prox_logp_method="loglinear",
            behave_imp_weight_mode="token_mask",
            behave_imp_weight_cap=5.0,
        ),
    )
    mappings = config(
        saver={"mode": "async", "freq_steps": 1000},
        megatron={"async_save": True},
        actor={
            "use_decoupled_loss": True,
            "prox_logp_method": "loglinear",
            "behave_imp_weight_mode": "token_mask",
            "behave_imp_weight_cap": 5.0,
        },
    )
    assert objects == mappings
    assert objects.rollout.max_staleness == 4


def test_frequency_zero_is_off():
    assert SaverConfig(freq_steps=0, freq_secs=0, freq_epochs=0) == SaverConfig()


@pytest.mark.parametrize(
    ("staleness", "replicas", "cpus", "generator", "trainer"),
    [
        (0, 1, 8, 8, 8),
        (0, 2, 8, 4, 8),
        (4, 1, 8, 4, 4),
        (4, 3, 8, 2, 2),
        (4, 3, 2, 1, 1),
        (1, 1, 2, 1, 1),
    ],
)
def test_threads_share_the_cores_that_compute_at_once(
    staleness, replicas, cpus, generator, trainer
):
    cfg = config(
        actor={"use_decoupled_loss": True},
        rollout={"max_staleness": staleness},
        generator={"replicas": replicas},
    )
    assert (cfg.generator_threads(cpus), cfg.trainer_threads(cpus)) == (generator, trainer)


def test_threads_given_win():
    cfg = config(generator={"threads": 3}, actor={"threads": 5})
    assert (cfg.generator_threads(64), cfg.trainer_threads(64)) == (3, 5)


@pytest.mark.parametrize(("staleness", "groups", "tickets"), [(0, 8, 8), (4, 8, 40), (1, 4, 8)])
def test_tickets_are_one_batch_more_than_the_staleness_allows(staleness, groups, tickets):
    cfg = config(
        actor={"use_decoupled_loss": True},
        rollout={"max_staleness": staleness},
        train_dataset={"path": "rows.jsonl", "batch_size": groups},
    )
    assert cfg.tickets == tickets


def test_concurrency_defaults_to_the_slots_and_fits_one_group():
    assert config(generator={"slots": 16, "replicas": 2}).max_concurrent_rollouts == 32
    assert config(generator={"slots": 2}).max_concurrent_rollouts == 8
    assert config(rollout={"max_concurrent_rollouts": 12}).max_concurrent_rollouts == 12


def test_replacing_a_section_resolves_and_checks_again():
    cfg = config(mode="async")
    changed = replace(cfg, saver=SaverConfig(keep_last=2))
    assert changed.saver == SaverConfig(mode="async", keep_last=2)
    assert changed.rollout == cfg.rollout


def notes(cfg: RunConfig) -> dict[str, str]:
    return {entry.key: entry.note for entry in describe(cfg)}


def test_overview_says_where_values_came_from():
    found = notes(config(mode="async", saver={"mode": "sync"}, valid_dataset={"path": "v.jsonl"}))
    assert found["rollout.max_staleness"] == "preset of mode async"
    assert found["saver.mode"] == ""
    assert found["mode"] == ""
    assert found["actor.reward_norm.std_level"] == "preset of algorithm grpo"
    assert found["actor.reward_norm.eps"] == "default"
    assert found["actor.prox_logp_method"] == "follows actor.use_decoupled_loss"
    assert found["eval_gconfig.max_new_tokens"] == "as gconfig"
    assert found["eval_gconfig.temperature"] == "default of evaluation"
    assert found["seed"] == "default"
    assert found["model.path"] == ""


def test_overview_marks_what_is_not_used():
    found = notes(config(total_train_steps=5))
    assert found["megatron.async_save"] == "not used: the training engine is not Megatron"
    assert found["evaluator.at_end"] == "not used: no valid_dataset"
    assert found["eval_gconfig.n_samples"] == "not used: no valid_dataset"
    assert found["total_train_epochs"] == "not used: total_train_steps wins"
    assert found["actor.prox_logp_method"].startswith("not used: ")


def test_overview_has_every_key_once_with_its_value():
    cfg = config(mode="async")
    table = {entry.key: entry.value for entry in describe(cfg)}
    assert len(table) == len(describe(cfg))
    assert table["actor.optimizer.lr"] == cfg.actor.optimizer.lr
    assert table["saver.mode"] == "async"
