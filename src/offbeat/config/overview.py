"""The resolved configuration as a table, for ``offbeat config show``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from offbeat.config.actor import BehaveImpWeightMode
from offbeat.config.presets import provenance
from offbeat.config.run import RunConfig
from offbeat.config.schema import Section, Unset, join, plain, specs


class Entry(NamedTuple):
    """One key: its value as YAML has it, and a note, empty for a value that somebody set."""

    key: str
    value: object
    note: str


def describe(cfg: RunConfig) -> list[Entry]:
    """Every key with its value and where the value came from, or why it is not used.

    Notes: ``default``; ``preset of mode …`` and the like; ``not used: …``. Preset values that
    ``to_yaml`` wrote out count as set when they are loaded again.
    """
    unused = _unused(cfg)
    return [
        entry._replace(note=f"not used: {reason}") if reason else entry
        for entry in _entries(cfg, cfg, "")
        for reason in [_reason(entry.key, unused)]
    ]


def _entries(cfg: RunConfig, section: Section, prefix: str) -> Iterator[Entry]:
    for spec in specs(type(section)):
        path = join(prefix, spec.name)
        value = getattr(section, spec.name)
        if isinstance(value, Section):
            yield from _entries(cfg, value, path)
        elif spec.name in section.given or spec.required:
            yield Entry(path, plain(value), "")
        elif isinstance(spec.default, Unset):
            note = provenance(path, cfg.mode, cfg.algorithm)
            yield Entry(path, plain(value), note or "default")
        else:
            yield Entry(path, plain(value), "default")


def _reason(key: str, unused: dict[str, str]) -> str:
    for path, reason in unused.items():
        if key == path or key.startswith(f"{path}."):
            return reason
    return ""


def _unused(cfg: RunConfig) -> dict[str, str]:
    """Keys and sections that this configuration does not use, and why."""
    unused = {"megatron": "the training engine is not Megatron"}
    if cfg.valid_dataset is None:
        for section in ("valid_dataset", "eval_gconfig", "evaluator"):
            unused[section] = "no valid_dataset"
    else:
        unused["valid_dataset.batch_size"] = "evaluation takes every row once"
    if cfg.total_train_steps is not None:
        unused["total_train_epochs"] = "total_train_steps wins"
    if not cfg.actor.use_decoupled_loss:
        for name in ("prox_logp_method", "behave_imp_weight_mode", "behave_imp_weight_cap"):
            unused[f"actor.{name}"] = "actor.use_decoupled_loss is false"
    elif cfg.actor.behave_imp_weight_mode is BehaveImpWeightMode.DISABLED:
        unused["actor.behave_imp_weight_cap"] = "actor.behave_imp_weight_mode is disabled"
    unused["rollout.max_head_offpolicyness"] = "another name of rollout.max_staleness"
    return unused
