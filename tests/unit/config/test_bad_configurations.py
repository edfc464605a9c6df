"""Each bad configuration is refused before anything starts, and the message says what to change."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from offbeat.config import (
    ActorConfig,
    GenerationConfig,
    RolloutConfig,
    SaverConfig,
    from_mapping,
)
from offbeat.errors import ConfigError

BASE = {
    "model": {"path": "models/tiny"},
    "train_dataset": {"path": "rows.jsonl"},
    "rollout": {"reward_fn": "rewards:score"},
}


def merged(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    out = dict(base)
    for key, value in change.items():
        below = out.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        out[key] = merged(below, value) if both else value
    return out


def nested(path: str, value: object) -> dict[str, object]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


# One changed key, the value, and what the message must contain beside path and value.
SINGLE = [
    # unknown keys
    ("modle", {"path": "x"}, "did you mean 'model'?"),
    ("actor.epz_clip", 0.2, "did you mean 'eps_clip'?"),
    ("actor.optimizer.learning_rate", 0.1, "the keys here are lr, weight_decay"),
    ("actor.optimizer.warmup_step_proportion", 0.1, "did you mean 'warmup_steps_proportion'?"),
    ("actor.reward_norm.mean_levl", "group", "did you mean 'mean_level'?"),
    ("actor.max_staleness", 2, "did you mean rollout.max_staleness?"),
    ("max_new_tokens", 64, "did you mean gconfig.max_new_tokens or eval_gconfig.max_new_tokens?"),
    ("saver.freq_step", 3, "did you mean 'freq_steps'?"),
    ("stats_logger.wandb", True, "a mapping or null"),
    ("stats_logger.wandb.mode", "ofline", "did you mean 'offline'?"),
    ("stats_logger.wandb.mode", "shared", "one of online, offline, disabled"),
    ("stats_logger.wandb.tags", "one", "a list"),
    ("stats_logger.tensorbord", {}, "did you mean 'tensorboard'?"),
    ("stats_logger.mlflow.uri", "x", "the keys here are enabled, tracking_uri, experiment"),
    ("critic", {}, "unknown key"),
    ("actor.given", [], "unknown key"),
    # wrong type
    ("actor", [1, 2], "a mapping"),
    ("model", "models/tiny", "a mapping"),
    ("seed", "1", "an integer >= 0"),
    ("seed", True, "an integer >= 0"),
    ("train_dataset.batch_size", 8.0, "an integer >= 1"),
    ("trial_name", 7, "a folder name"),
    ("gconfig.stop", "###", "a list, each item a string that is not empty"),
    ("gconfig.stop[1]", ["###", 5], "a string that is not empty"),
    ("gconfig.stop_token_ids[2]", [1, 2, "3"], "an integer >= 0"),
    ("train_dataset.columns", ["question"], "a mapping"),
    ("train_dataset.columns.prompt", 3, "a string"),
    ("actor.use_decoupled_loss", "yes please", "true or false"),
    ("actor.reward_norm", None, "null is not a mapping"),
    ("actor.optimizer.lr", "fast", "a number >= 0"),
    ("generator.replicas", None, "null is not an integer >= 1"),
    # outside the allowed set or range
    ("mode", "asink", "one of sync, async; did you mean 'async'?"),
    ("algorithm", "grop", "one of grpo, dr_grpo, rloo, lite_ppo; did you mean 'grpo'?"),
    ("actor.prox_logp_method", "linear", "one of recompute, loglinear, metrics or null"),
    ("actor.behave_imp_weight_mode", "mask", "disabled, token_truncate, token_mask"),
    ("actor.reward_norm.std_level", "grup", "one of batch, group, none; did you mean 'group'?"),
    ("actor.loss_aggregation", "mean", "one of token_mean, sequence_mean, constant"),
    ("actor.optimizer.lr_scheduler_type", "cosin", "did you mean 'cosine'?"),
    ("actor.optimizer.beta1", 1.0, "a number >= 0 and < 1"),
    ("actor.optimizer.gradient_clipping", 0, "a number > 0"),
    ("actor.c_clip", 1.0, "a number > 1 or null"),
    ("actor.eps_clip", 0.0, "a number > 0 and <= 1"),
    ("saver.mode", "background", "one of sync, async, auto"),
    ("saver.freq_steps", -1, "an integer >= 0 or null"),
    ("scheduler.type", "slurm", "there is no Slurm scheduler yet; local runs everything"),
    ("rollout.policy", "drop", "no effect: rollout.max_staleness is 0"),
    ("rollout.lookahead", "adaptive", "no effect: rollout.max_staleness is 0"),
    ("generator.kv_on_update", "recompute", "no effect: rollout.max_staleness is 0"),
    ("gateway.port", 70000, "an integer >= 0 and <= 65535"),
    ("rollout.policy", "fifo", "one of pace, drop"),
    ("rollout.group_deadline_seconds", 0, "a number > 0 or null"),
    ("rollout.max_groups_without_signal", 0, "an integer >= 1 or null"),
    ("rollout.max_failure_rate", 1.5, "a number >= 0 and <= 1"),
    ("rollout.reward_fn", "rewards.score", 'of the form "module:attribute"'),
    ("rollout.reward_timeout_seconds", 0, "a number > 0"),
    ("model.device", "gpu", "one of auto, cpu, cuda, cuda:<index>"),
    ("model.dtype", "float16", "one of float32, bfloat16 or null"),
    ("model.path", "  ", "a string that is not empty"),
    ("experiment_name", "a/b", "a folder name"),
    ("experiment_name", "..", "a folder name"),
    ("generator.kv_on_update", "drop", "one of keep, recompute"),
    ("train_dataset.chat_template", "maybe", "one of auto, on, off"),
    ("total_train_steps", 0, "an integer >= 1 or null"),
    # one key against the rest
    ("gconfig.top_p", 0.9, "must be 1.0"),
    ("gconfig.top_k", 50, "must be 0"),
    ("gconfig.min_p", 0.1, "must be 0.0"),
    ("gconfig.temperature", 0.0, "must be > 0"),
    ("gconfig.temperature", 1e-40, "neither 0 (greedy) nor between 0.001 and 1000"),
    ("eval_gconfig.temperature", 1e4, "neither 0 (greedy) nor between 0.001 and 1000"),
    ("eval_gconfig.top_k", 10**30, "<= 1e+06"),
    ("gconfig.n_samples", 1, "is not >= 2"),
    ("eval_gconfig.n_samples", 4, "temperature is 0"),
    ("eval_gconfig.top_p", 0.9, "temperature is 0"),
    ("rollout.max_staleness", 2, "actor.use_decoupled_loss is false"),
    ("rollout.max_head_offpolicyness", -1, "an integer >= 0 or null"),
    ("rollout.allow_uncorrected", True, "rollout.max_staleness is 0"),
    ("rollout.max_concurrent_rollouts", 4, "gconfig.n_samples (8)"),
    ("actor.ppo_n_minibatches", 9, "train_dataset.batch_size (8)"),
    ("actor.eps_clip_higher", 0.1, "is not >= eps_clip (0.2)"),
    ("actor.prox_logp_method", "loglinear", "use_decoupled_loss is false"),
    ("actor.behave_imp_weight_mode", "token_mask", "use_decoupled_loss is false"),
    ("actor.behave_imp_weight_cap", 3.0, "behave_imp_weight_mode is disabled"),
    ("actor.behave_imp_weight_floor", 0.5, "choose token_mask or sequence_mask"),
    ("actor.max_tokens_per_mb", 128, "is not >= 257"),
    ("evaluator.freq_steps", 5, "without valid_dataset"),
    ("train_dataset.args", {"n": 3}, "is a file or folder"),
    ("train_dataset.columns.completions", "answer", "reward functions get it from offbeat"),
    ("train_dataset.prompt_template", "What is {a", "is not a Python format string"),
    ("train_dataset.prompt_template", "What is {}?", "write {column}"),
    ("train_dataset.prompt_template", "What?", "names no column"),
]


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("path", "value", "says"), SINGLE, ids=[f"{path}={value!r}" for path, value, _ in SINGLE]
)
def test_bad_key_is_refused_with_path_value_and_what_is_allowed(path, value, says):
    with pytest.raises(ConfigError) as caught:
        from_mapping(merged(BASE, nested(path.partition("[")[0], value)), origin="run")
    _, line = str(caught.value).split("\n")
    assert line.startswith(f"  {path}: ")
    assert says in line
    if "unknown key" not in line and path != "train_dataset.args":
        shown = value[int(path[:-1].partition("[")[2])] if path.endswith("]") else value
        assert ("null" if shown is None else str(shown).lower()) in line.lower()


# Several keys that contradict each other: the change, the path blamed, the sentence.
COMBINED = [
    ({"gateway": {"token": "secret"}}, "gateway.token", "no effect without gateway.port"),
    ({"gateway": {"host": "0.0.0.0"}}, "gateway.host", "no effect without gateway.port"),
    (
        {"mode": "async", "actor": {"use_decoupled_loss": False}},
        "rollout.max_staleness",
        "4 without off-policy correction",
    ),
    (
        {"rollout": {"max_staleness": 2, "max_head_offpolicyness": 3}},
        "rollout.max_head_offpolicyness",
        "3 is another name of max_staleness, which is 2",
    ),
    (
        {"model": {"onednn_linears": True, "dtype": "bfloat16"}},
        "model.onednn_linears",
        "true has no effect on the trainer: model.dtype is bfloat16",
    ),
    (
        {"mode": "async", "rollout": {"allow_uncorrected": True}},
        "rollout.allow_uncorrected",
        "actor.use_decoupled_loss is true",
    ),
    (
        {"total_train_steps": None, "total_train_epochs": None},
        "total_train_steps",
        "total_train_epochs is null too",
    ),
    (
        {
            "mode": "async",
            "actor": {"behave_imp_weight_mode": "disabled", "behave_imp_weight_cap": 5},
        },
        "actor.behave_imp_weight_cap",
        "5.0 has no effect: behave_imp_weight_mode is disabled",
    ),
    (
        {
            "mode": "async",
            "actor": {"behave_imp_weight_mode": "token_truncate", "behave_imp_weight_floor": 0.5},
        },
        "actor.behave_imp_weight_floor",
        "0.5 has no effect: behave_imp_weight_mode is token_truncate",
    ),
    (
        {"mode": "async", "actor": {"behave_imp_weight_cap": 1.0}},
        "actor.behave_imp_weight_cap",
        "1.0 (float) is not a number > 1 or null",
    ),
    (
        {
            "actor": {
                "use_decoupled_loss": True,
                "prox_logp_method": "loglinear",
                "recompute_logprob": True,
            }
        },
        "actor.recompute_logprob",
        "contradicts prox_logp_method loglinear",
    ),
    (
        {"actor": {"mask_no_eos_with_zero": True, "exclude_truncated": True}},
        "actor.mask_no_eos_with_zero",
        "exclude_truncated takes the same rows out",
    ),
    (
        {"actor": {"reward_norm": {"mean_level": "none", "mean_leave_one_out": True}}},
        "actor.reward_norm.mean_leave_one_out",
        "mean_level is none",
    ),
    (
        {"algorithm": "lite_ppo", "gconfig": {"n_samples": 1}},
        "gconfig.n_samples",
        "compares the answers of a group",
    ),
    (
        {"model": {"max_model_len": 200}},
        "gconfig.max_new_tokens",
        "256 leaves no room for a prompt",
    ),
    (
        {"train_dataset": {"max_prompt_len": 300}, "actor": {"max_tokens_per_mb": 512}},
        "actor.max_tokens_per_mb",
        "512 is not >= 556",
    ),
    (
        {"valid_dataset": {"path": "v.jsonl", "shuffle": True}},
        "valid_dataset.shuffle",
        "evaluation reads rows in order",
    ),
    (
        {"valid_dataset": {"path": "v.jsonl", "batch_size": 4}},
        "valid_dataset.batch_size",
        "4 has no effect",
    ),
    ({"valid_dataset": {"limit": 4}}, "valid_dataset.path", "required, and not set"),
]


@pytest.mark.invariant("I15")
@pytest.mark.parametrize(
    ("change", "path", "says"), COMBINED, ids=[f"{i}-{row[1]}" for i, row in enumerate(COMBINED)]
)
def test_contradiction_names_the_keys_and_what_to_change(change, path, says):
    with pytest.raises(ConfigError) as caught:
        from_mapping(merged(BASE, change))
    _, line = str(caught.value).split("\n")
    assert line.startswith(f"  {path}: ")
    assert says in line


def test_independent_problems_come_in_one_message():
    change = {
        "gconfig": {"top_p": 0.5, "n_samples": 1},
        "actor": {"ppo_n_minibatches": 20},
        "evaluator": {"freq_epochs": 1},
        "rollout": {"max_staleness": 1},
    }
    with pytest.raises(ConfigError) as caught:
        from_mapping(merged(BASE, change), origin="run")
    lines = str(caught.value).split("\n")
    assert lines[0] == "run: 5 problems in the configuration"
    assert len(lines) == 6


def test_problems_of_different_sections_come_in_one_message():
    change = {"actor": {"epz": 1}, "seed": "x", "saver": {"mode": "no"}, "model": {"path": 3}}
    with pytest.raises(ConfigError) as caught:
        from_mapping(merged(BASE, change))
    assert len(str(caught.value).split("\n")) == 5


def test_empty_mapping_names_only_the_required_keys():
    with pytest.raises(ConfigError) as caught:
        from_mapping({})
    found = [line.split(":")[0].strip() for line in str(caught.value).split("\n")[1:]]
    assert found == ["model.path", "train_dataset.path", "rollout.reward_fn"]


def test_list_instead_of_a_mapping_is_refused():
    with pytest.raises(ConfigError, match="expected a mapping of sections"):
        from_mapping([1])  # type: ignore[arg-type]  # what a caller without a type checker passes


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ActorConfig(prox_logp_method="magic"), "one of recompute, loglinear, metrics"),
        (
            lambda: ActorConfig(use_decoupled_loss=False, prox_logp_method="loglinear"),
            "use_decoupled_loss is false",
        ),
        (lambda: SaverConfig(freq_steps=-2), "an integer >= 0 or null"),
        (lambda: RolloutConfig(reward_fn="nothing"), "module:attribute"),
        (lambda: GenerationConfig(top_p=0.0), "must be > 0"),
    ],
)
def test_python_objects_are_checked_like_yaml(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
