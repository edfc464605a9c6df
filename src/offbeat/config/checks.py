"""Contradictions between sections: keys that cannot both hold, or that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offbeat.config.generator import KVOnUpdate
from offbeat.config.model import DType
from offbeat.config.rollout import Lookahead, RolloutPolicy
from offbeat.config.schema import Problem

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig


def contradictions(cfg: RunConfig) -> Iterator[Problem]:
    """Every problem between sections of a configuration whose sections are fine by themselves."""
    yield from _length(cfg)
    yield from _linears(cfg)
    yield from _staleness(cfg)
    yield from _sampling(cfg)
    yield from _batch(cfg)
    yield from _tokens(cfg)
    yield from _evaluation(cfg)


def _length(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.total_train_steps is None and cfg.total_train_epochs is None:
        yield Problem(
            path="total_train_steps",
            text="null, and total_train_epochs is null too: the run has no end; set one of them",
        )


def _linears(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.model.onednn_linears and cfg.model.dtype is DType.BFLOAT16:
        yield Problem(
            path="model.onednn_linears",
            text="true has no effect on the trainer: model.dtype is bfloat16, and it computes them "
            "so in float32 only; set model.dtype to float32, or leave onednn_linears out",
        )


def _staleness(cfg: RunConfig) -> Iterator[Problem]:
    stale, decoupled = cfg.rollout.max_staleness, cfg.actor.use_decoupled_loss
    if stale > 0 and not decoupled and not cfg.rollout.allow_uncorrected:
        yield Problem(
            path="rollout.max_staleness",
            text=f"{stale} without off-policy correction: actor.use_decoupled_loss is false; "
            "set mode to async, actor.use_decoupled_loss to true, rollout.max_staleness to 0 (left "
            "out, both follow mode), or rollout.allow_uncorrected to true",
        )
    if cfg.rollout.allow_uncorrected and (decoupled or stale == 0):
        reason = "actor.use_decoupled_loss is true" if decoupled else "rollout.max_staleness is 0"
        yield Problem(
            path="rollout.allow_uncorrected",
            text=f"true has no effect: {reason}; leave it out",
        )
    chosen: tuple[tuple[str, object, object], ...] = (
        ("policy", cfg.rollout.policy, RolloutPolicy.PACE),
        ("lookahead", cfg.rollout.lookahead, Lookahead.FULL),
    )
    for name, value, default in chosen:
        if stale == 0 and value is not default:
            yield Problem(
                path=f"rollout.{name}",
                text=f"{value} has no effect: rollout.max_staleness is 0, one batch is open at a "
                f"time; raise it (mode: async does), or leave rollout.{name} out",
            )
    cache = cfg.generator.kv_on_update
    if stale == 0 and cache is not KVOnUpdate.KEEP and cfg.gateway.port is None:
        yield Problem(
            path="generator.kv_on_update",
            text=f"{cache} has no effect: rollout.max_staleness is 0 and there is no gateway.port, "
            "so nothing is being written when weights change; raise max_staleness (mode: async "
            "does), or leave it out",
        )


def _sampling(cfg: RunConfig) -> Iterator[Problem]:
    """Training needs log-probabilities of the full distribution, at a temperature > 0."""
    if cfg.gconfig.temperature == 0:
        yield Problem(
            path="gconfig.temperature",
            text="0.0 (greedy) cannot be trained on; it must be > 0 (eval_gconfig may be 0)",
        )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value: float = getattr(cfg.gconfig, name)
        if value != off:
            yield Problem(
                path=f"gconfig.{name}",
                text=f"{value} truncates the distribution that is trained on; it must be {off} "
                "(eval_gconfig may differ)",
            )
    if cfg.gconfig.n_samples < 2 and cfg.actor.reward_norm.uses_group:
        yield Problem(
            path="gconfig.n_samples",
            text=f"{cfg.gconfig.n_samples} is not >= 2: actor.reward_norm compares the answers of "
            "a group; raise it or set actor.reward_norm.mean_level and std_level to batch or none",
        )


def _batch(cfg: RunConfig) -> Iterator[Problem]:
    groups, minibatches = cfg.train_dataset.batch_size, cfg.actor.ppo_n_minibatches
    if minibatches > groups:
        yield Problem(
            path="actor.ppo_n_minibatches",
            text=f"{minibatches} is not <= train_dataset.batch_size ({groups}): a minibatch holds "
            "whole groups; lower it or raise the batch size",
        )
    limit, siblings = cfg.rollout.max_concurrent_rollouts, cfg.gconfig.n_samples
    if limit is not None and limit < siblings:
        yield Problem(
            path="rollout.max_concurrent_rollouts",
            text=f"{limit} is not >= gconfig.n_samples ({siblings}): no group could start; "
            "raise it",
        )


def _tokens(cfg: RunConfig) -> Iterator[Problem]:
    answer, context = cfg.gconfig.max_new_tokens, cfg.model.max_model_len
    if context is not None and answer >= context:
        yield Problem(
            path="gconfig.max_new_tokens",
            text=f"{answer} leaves no room for a prompt: it is not < model.max_model_len "
            f"({context})",
        )
    prompt = cfg.train_dataset.max_prompt_len or 1
    longest = prompt + answer if context is None else min(prompt + answer, context)
    if longest > cfg.actor.max_tokens_per_mb:
        yield Problem(
            path="actor.max_tokens_per_mb",
            text=f"{cfg.actor.max_tokens_per_mb} is not >= {longest}, the length of one row "
            "(train_dataset.max_prompt_len, or 1, + gconfig.max_new_tokens); raise it",
        )


def _evaluation(cfg: RunConfig) -> Iterator[Problem]:
    yield from _greedy(cfg)
    valid = cfg.valid_dataset
    if valid is None:
        for name in ("freq_epochs", "freq_steps", "freq_secs"):
            value = getattr(cfg.evaluator, name)
            if value is not None:
                yield Problem(
                    path=f"evaluator.{name}",
                    text=f"{value} has no effect without valid_dataset; set valid_dataset.path or "
                    "leave it out",
                )
        return
    if valid.shuffle:
        yield Problem(
            path="valid_dataset.shuffle",
            text="true has no effect: evaluation reads rows in order; leave it out",
        )
    if "batch_size" in valid.given:
        yield Problem(
            path="valid_dataset.batch_size",
            text=f"{valid.batch_size} has no effect: evaluation takes every row once; use limit "
            "for fewer",
        )


def _greedy(cfg: RunConfig) -> Iterator[Problem]:
    """With temperature 0 there is one answer and nothing to truncate."""
    if cfg.eval_gconfig.temperature > 0:
        return
    for name, off in (("n_samples", 1), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value: float = getattr(cfg.eval_gconfig, name)
        if value != off:
            yield Problem(
                path=f"eval_gconfig.{name}",
                text=f"{value} has no effect: eval_gconfig.temperature is 0 (greedy); set {name} "
                f"to {off} or raise the temperature",
            )
