"""Whole runs of a tiny model: what they compute, and what they leave on disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import yaml

from offbeat.config import load
from offbeat.data.tokens import TextCodec
from offbeat.observe.ledger import Fate, LedgerRow, read_groups
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import RolloutRow, read_rollouts, recorded_steps
from offbeat.observe.sinks import read_metrics
from offbeat.observe.spans import Span, SpanName, read_spans
from offbeat.observe.summary import Summary
from offbeat.pipeline.run import PPOTrainer
from offbeat.types import DropReason

TASK = '''
import asyncio
import random
import time

import numpy as np

from offbeat.types import Rollout, Turn


def rows(n, too_long=()):
    return [
        {"prompt": f"{i}+{i % 3}" + "+1" * 20 * (i in too_long) + "=", "number": i}
        for i in range(n)
    ]


def late(prompt, completion, prompt_ids, completion_ids, **columns):
    """Deterministic, at a time that is not."""
    time.sleep(random.random() * 0.03)
    return {"reward": sum(completion_ids) % 7 / 7, "length": len(completion_ids)}


def flat(*texts, **columns):
    return 1.0


class TwoTurns:
    """The environment answers the model once; the reward is for both of its turns."""

    def __init__(self, reward):
        self.reward = reward

    async def arun_episode(self, engine, data):
        async with asyncio.TaskGroup() as siblings:
            tasks = [
                siblings.create_task(self.one(engine, data, i)) for i in range(engine.n_samples)
            ]
        return [task.result() for task in tasks]

    async def one(self, engine, data, sibling):
        asked = data.token_ids.tolist()
        first = await engine.agenerate(asked, sibling=sibling)
        again = [*asked, *first.token_ids.tolist(), *engine.encode(" no: ")]
        second = await engine.agenerate(again, sibling=sibling, turn=1)
        turns = (
            Turn(prompt_ids=data.token_ids, completion=first),
            Turn(prompt_ids=np.array(again), completion=second),
        )
        ids = [*first.token_ids.tolist(), *second.token_ids.tolist()]
        reward = await self.reward(data.text, second.text, asked, ids, **data.columns)
        return Rollout(sibling=sibling, turns=turns, reward=reward)
'''

CONFIG: dict[str, Any] = {
    "experiment_name": "pipeline",
    "total_train_steps": 3,
    "model": {"max_model_len": 64},
    "train_dataset": {"path": "pipeline_task:rows", "args": {"n": 12}, "batch_size": 3},
    "gconfig": {"n_samples": 3, "max_new_tokens": 5},
    "rollout": {"reward_fn": "pipeline_task:late"},
    "generator": {"threads": 1, "slots": 8},
    "actor": {"threads": 1, "ppo_n_minibatches": 1, "optimizer": {"lr": 0.01}},
    "stats_logger": {"console": False},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run and what it left on disk."""

    summary: Summary
    folder: Path

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def rollouts(self) -> list[RolloutRow]:
        return [r for s in recorded_steps(self.folder) for r in read_rollouts(self.folder, s)]

    @property
    def groups(self) -> tuple[LedgerRow, ...]:
        return read_groups(self.folder / "run.db")

    @property
    def spans(self) -> tuple[Span, ...]:
        return read_spans(self.folder / "spans.jsonl")

    @property
    def saved(self) -> dict[str, bytes]:
        """The files of the last step's folder."""
        folder = self.folder / "checkpoints" / "latest"
        return {
            str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
        }


Train: TypeAlias = Callable[..., Run]

INLINE = "scheduler.type=inline"
"""Workers in this process: what a run computes is the same, and it starts in a second."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Workers in this process have as many threads as those with one of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def train(one_thread: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train with overrides; the trial's name comes first."""
    home = tmp_path_factory.mktemp("pipeline")
    (home / "pipeline_task.py").write_text(TASK)
    (home / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(trial: str, *overrides: str) -> Run:
        here = (f"trial_name={trial}", f"fileroot={home}", f"model.path={tiny_model}")
        trainer = PPOTrainer.from_config(load(home / "config.yaml", [*here, *overrides]))
        return Run(summary=trainer.run(), folder=trainer.run_dir)

    return run


@pytest.fixture(scope="module")
def one(train: Train) -> Run:
    """A synchronous run in this process: one generator, saved while training waits."""
    return train("one", "mode=sync", "saver.mode=sync", INLINE)


@pytest.fixture(scope="module")
def two(train: Train) -> Run:
    """The same as processes: two generators, saved in the background."""
    return train("two", "mode=sync", "saver.mode=async", "generator.replicas=2")


@pytest.fixture(scope="module")
def turns(train: Train) -> Run:
    """An asynchronous run, as processes, of a workflow with two turns."""
    return train(
        "turns",
        "mode=async",
        "rollout.max_staleness=1",
        "rollout.workflow=pipeline_task:TwoTurns",
        "total_train_steps=4",
        "gconfig.ignore_eos=true",
    )


def is_time(name: str) -> bool:
    return name.endswith("seconds") or name.startswith(("throughput/", "process/"))


def untimed(record: StepRecord) -> dict[str, float]:
    return {k: v for k, v in record.metrics.items() if not is_time(k)}


# Synchronous runs


@pytest.mark.invariant("I03")
def test_two_synchronous_runs_make_the_same_rollouts_whatever_the_latencies(
    one: Run, two: Run
) -> None:
    assert len(one.rollouts) == 27
    for a, b in zip(one.rollouts, two.rollouts, strict=True):
        for name in RolloutRow.__dataclass_fields__:
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.invariant("I03")
def test_two_synchronous_runs_have_equal_metrics_but_for_times(one: Run, two: Run) -> None:
    assert [r.step for r in one.records] == [1, 2, 3]
    assert [untimed(r) for r in one.records] == [untimed(r) for r in two.records]
    assert len({r.metrics["actor/loss"] for r in one.records}) == 3


@pytest.mark.invariant("I03")
@pytest.mark.invariant("I11")
def test_saves_in_the_foreground_and_in_the_background_are_equal_byte_for_byte(
    one: Run, two: Run
) -> None:
    assert one.saved == two.saved
    assert {"config.json", "model.safetensors", "tokenizer.json"} < one.saved.keys()


def test_transformers_loads_what_was_saved(one: Run, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = one.folder / "checkpoints" / "latest"
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    first = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert saved.keys() == first.keys()
    moved = [float((saved[name] - first[name]).abs().max()) for name in saved]
    assert 0 < max(moved) < 0.1
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "01"


def test_requests_are_spread_over_the_generators_by_group(two: Run) -> None:
    workers = {s.worker for s in two.spans if s.name is SpanName.DECODE}
    assert workers == {"generator-0", "generator-1"}


def test_every_request_and_every_reward_has_a_span_of_its_group(one: Run) -> None:
    for name in (SpanName.GENERATE, SpanName.REWARD):
        found = Counter(s.group_id for s in one.spans if s.name is name)
        assert found == dict.fromkeys(range(9), 3), name


def test_a_prompt_is_computed_once_per_group(one: Run, two: Run) -> None:
    lengths = {r.group_id: len(r.prompt_ids) for r in one.rollouts}
    assert one.summary.tokens.prefill == two.summary.tokens.prefill == sum(lengths.values())


@pytest.mark.invariant("I01")
def test_a_synchronous_run_never_decodes_while_it_trains(one: Run, two: Run) -> None:
    for run in (one, two):
        assert run.summary.decode_share_of_training_time == 0
        assert run.summary.seconds.training > 0
        assert run.summary.lag.group_max == 0
        assert {v for r in run.rollouts for v in r.versions.tolist()} == {0, 1, 2}
        assert all((r.versions == r.step - 1).all() for r in run.rollouts)


@pytest.mark.invariant("I07")
@pytest.mark.invariant("I08")
def test_the_first_update_of_fresh_rollouts_finds_the_recorded_log_probs(one: Run) -> None:
    for record in one.records:
        assert record.metrics["actor/logp_error_max"] <= 1e-4
        assert record.metrics["actor/clip_fraction"] == 0
        assert record.metrics["actor/ratio_mean"] == pytest.approx(1, abs=1e-4)


# Asynchronous runs, two turns


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
def test_asynchronous_groups_train_in_order_within_the_bound(turns: Run) -> None:
    trained = [g for g in turns.groups if g.fate is Fate.TRAINED]
    assert len(trained) == len(turns.groups) == 12
    assert [g.step for g in trained] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    lags = [g.start_version - g.admission_version for g in trained if g.start_version is not None]
    assert max(lags) == turns.summary.lag.group_max == 1


def test_the_policy_is_trained_on_its_own_tokens_of_both_turns_and_on_no_others(
    turns: Run, tiny_model: Path
) -> None:
    reply = TextCodec.open(tiny_model).encode(" no: ")
    mask = [True] * 5 + [False] * len(reply) + [True] * 5
    assert len(turns.rollouts) == 36
    for row in turns.rollouts:
        assert row.loss_mask.tolist() == mask
        assert row.token_ids[5:-5].tolist() == reply
        assert (row.logprobs[row.loss_mask] < 0).all()
        assert (row.logprobs[~row.loss_mask] == 0).all()
        assert (row.versions[~row.loss_mask] == -1).all()
    assert turns.summary.tokens.generated == turns.summary.tokens.trained == 360
    assert [r.metrics["actor/tokens_count"] for r in turns.records] == [90.0] * 4


@pytest.mark.invariant("I06")
def test_every_token_is_of_a_version_between_admission_and_training(turns: Run) -> None:
    for row in turns.rollouts:
        versions = row.versions[row.loss_mask]
        assert (np.diff(versions) >= 0).all()
        assert row.admission_version <= versions.min()
        assert versions.max() <= row.step - 1


def test_siblings_and_turns_differ(turns: Run) -> None:
    first = {(r.group_id, tuple(r.token_ids[:5])) for r in turns.rollouts}
    second = {(r.group_id, tuple(r.token_ids[-5:])) for r in turns.rollouts}
    assert len(first) == len(second) == 36
    assert not first & second


@pytest.mark.invariant("I03")
def test_the_asynchronous_objective_without_staleness_is_synchronous_training(
    train: Train, one: Run
) -> None:
    run = train("zero", "mode=async", "rollout.max_staleness=0", INLINE)
    for a, b in zip(one.rollouts, run.rollouts, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.logprobs, b.logprobs)
    assert run.saved["model.safetensors"] == one.saved["model.safetensors"]


def test_mode_is_nothing_but_defaults(train: Train, one: Run) -> None:
    synchronous = ("rollout.max_staleness=0", "actor.use_decoupled_loss=false", "saver.mode=sync")
    run = train("defaults", "mode=async", *synchronous, INLINE)
    assert [untimed(r) for r in run.records] == [untimed(r) for r in one.records]
    assert run.saved == one.saved


# Data at its edges


def finite(run: Run) -> bool:
    return all(math.isfinite(v) for r in run.records for v in r.metrics.values())


def test_equal_rewards_train_nothing_and_break_nothing(train: Train) -> None:
    run = train("flat", "rollout.reward_fn=pipeline_task:flat", INLINE)
    assert finite(run)
    for record in run.records:
        assert record.metrics["reward/zero_std_fraction"] == 1
        assert record.metrics["actor/grad_norm"] == 0


@pytest.mark.invariant("I02")
def test_a_data_set_smaller_than_a_batch_is_read_again(train: Train) -> None:
    run = train("small", "train_dataset.args={n: 2}", "train_dataset.batch_size=3", INLINE)
    assert [(g.group_id, g.epoch, g.fate) for g in run.groups] == [
        (i, i // 2, Fate.TRAINED) for i in range(9)
    ]
    for epoch in range(4):
        assert sorted(g.row for g in run.groups if g.epoch == epoch) == [0, 1]
    assert finite(run)


@pytest.mark.invariant("I02")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_epochs_end_with_a_short_batch_and_too_long_prompts_are_replaced(
    train: Train, mode: str
) -> None:
    run = train(
        f"epochs-{mode}",
        f"mode={mode}",
        "train_dataset.args={n: 5, too_long: [2]}",
        "train_dataset.max_prompt_len=10",
        "total_train_steps=null",
        "total_train_epochs=2",
        INLINE,
    )
    sizes = Counter(g.step for g in run.groups if g.fate is Fate.TRAINED)
    assert sizes == {1: 3, 2: 3, 3: 3, 4: 1}
    dropped = [g for g in run.groups if g.fate is Fate.DROPPED]
    assert {(g.reason, g.row) for g in dropped} == {(DropReason.TOO_LONG, 2)}
    assert "the prompt has" in dropped[0].detail
    groups = run.summary.groups
    assert (groups.admitted, groups.trained, groups.open) == (10 + len(dropped), 10, 0)
    assert groups.dropped["too_long"] == len(dropped) >= 2
    assert finite(run)
