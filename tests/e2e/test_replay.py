"""Replaying runs: the same weights from what was recorded, or the first step that has others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.model.init import init_model
from offbeat.observe.rollouts import read_rollouts, rollouts_path
from offbeat.pipeline.replay import plan_replay

pytestmark = [pytest.mark.slow, pytest.mark.invariant("I05"), pytest.mark.timeout(150)]

STEEP = "actor.optimizer.lr=1e-2"
TWO_TURNS = '''
import asyncio

import numpy as np

from offbeat.types import Rollout, Turn


def odd(prompt, completion, prompt_ids, completion_ids, **columns):
    if sum(completion_ids) % 5 == 0:
        raise ValueError("no reward for this one")
    return sum(completion_ids) % 7 / 7


class TwoTurns:
    """The environment answers the model once; the reward is for both of its turns."""

    def __init__(self, reward):
        self.reward = reward

    async def arun_episode(self, engine, data):
        return [await self.one(engine, data, i) for i in range(engine.n_samples)]

    async def one(self, engine, data, sibling):
        asked = data.token_ids.tolist()
        first = await engine.agenerate(asked, sibling=sibling)
        again = [*asked, *first.token_ids.tolist(), *engine.encode("12")]
        second = await engine.agenerate(again, sibling=sibling, turn=1)
        turns = (
            Turn(prompt_ids=data.token_ids, completion=first),
            Turn(prompt_ids=np.array(again), completion=second),
        )
        ids = [*first.token_ids.tolist(), *second.token_ids.tolist()]
        reward = await self.reward(data.text, "", asked, ids, **data.columns)
        return Rollout(sibling=sibling, turns=turns, reward=reward)
'''

DECOUPLED = ("actor.ppo_n_minibatches=2", "train_dataset.batch_size=4", STEEP)


def trained(lab: Any, *overrides: str) -> Path:
    run = lab.train(*overrides)
    assert run.end() == 0, run.output
    return Path(lab.run_dir())


def replayed(lab: Any, *arguments: str, code: int = 0) -> str:
    command = lab.start("replay", *(arguments or ("run",)))
    assert command.end() == code, command.output
    return str(command.output)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def changed(run: Path, step: int, column: str, change: Callable[[Any], Any]) -> None:
    """Change one cell of a step's file, in a row that teaches something; all else stays as it was
    recorded.
    """
    path = rollouts_path(run, step)
    with pq.ParquetFile(path) as file:
        table, notes = file.read(), file.metadata.metadata
    values = table.column(column).to_pylist()
    row = next(i for i, advantage in enumerate(table.column("advantage").to_pylist()) if advantage)
    values[row] = change(values[row])
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    table = table.set_column(place, field, pa.array(values, type=field.type))
    with pq.ParquetWriter(path, table.schema) as file:
        file.write_table(table)
        file.add_key_value_metadata({"offbeat.update": notes[b"offbeat.update"]})


def other_reward(reward: float) -> float:
    return reward + 1.0


def other_logprob(logprobs: list[float]) -> list[float]:
    return [logprobs[0] - 1e-4, *logprobs[1:]]  # below what the trainer refuses


def test_every_step_of_an_asynchronous_run_agrees_and_its_folder_stays_as_it_is(lab: Any) -> None:
    run = trained(lab, "mode=async", "total_train_steps=6", *DECOUPLED)
    before = content(run)
    said = replayed(lab)
    assert "replaying steps 1 to 6 from model" in said
    assert "replayed 6 of 6 steps of e2e/run: every digest agrees" in said
    assert content(run) == before


@pytest.mark.parametrize("change", [("reward", other_reward), ("logprobs", other_logprob)])
def test_one_changed_number_is_named_with_its_step_and_a_tensor(
    lab: Any, change: tuple[str, Callable[[Any], Any]]
) -> None:
    run = trained(lab, "mode=async", "total_train_steps=4", *DECOUPLED)
    changed(run, 3, *change)
    said = replayed(lab, code=1)
    assert "step 3 of e2e/run diverges; the 2 steps before it agree" in said
    assert "tensors differ, the first is lm_head.weight" in said
    assert "runs/e2e/run/rollouts/step-000003.parquet" in said
    assert "replayed 2 of 2" not in said
    said = replayed(lab, "run", "--from-step", "2", "--to-step", "2")
    assert "there is no snapshot before step 2 to start from" in said
    assert "every digest agrees" in said


def test_several_turns_missing_rewards_and_dropped_groups_are_replayed_too(lab: Any) -> None:
    (lab.folder / "turns.py").write_text(TWO_TURNS)
    run = trained(
        lab,
        "mode=async",
        "total_train_steps=5",
        "gconfig.n_samples=4",
        "rollout.workflow=turns:TwoTurns",
        "rollout.reward_fn=turns:odd",
        "rollout.dynamic_sampling=true",
        STEEP,
    )
    rows = [row for step in range(1, 6) for row in read_rollouts(run, step)]
    assert {row.reward is None for row in rows} == {True, False}
    assert any(not row.loss_mask.all() for row in rows)
    assert "replayed 5 of 5 steps" in replayed(lab)


def test_interrupted_replay_ends_at_once_and_leaves_no_process(lab: Any) -> None:
    trained(lab)
    command = lab.start("replay", "run")
    command.worker("trainer")
    command.interrupt()
    assert command.end(within=10) == 130, command.output
    assert "interrupted" in command.output


def test_snapshot_spares_the_steps_before_it(lab: Any) -> None:
    run = trained(lab, "mode=async", "total_train_steps=7", "recover.freq_steps=3")
    for step in range(1, 4):
        rollouts_path(run, step).unlink()
    said = replayed(lab, "run", "--from-step", "6")
    assert "replaying steps 4 to 7 from runs/e2e/run/snapshots/step-000003, the newest" in said
    assert "replayed 4 of 7 steps" in said
    assert "start from a snapshot after it with --from-step 4" in replayed(lab, code=2)


def test_resumed_run_replays_its_surviving_line_also_where_its_configuration_changed(
    lab: Any,
) -> None:
    told = ("recover.freq_steps=3", "actor.optimizer.lr_scheduler_type=cosine", STEEP)
    run = lab.train(*told, "rollout.reward_fn=task:slow", "total_train_steps=30")
    run.until("step 5", rollouts_path(lab.run_dir(), 5).exists)
    run.kill_all()
    run = lab.train(*told, "total_train_steps=8", "--resume")
    assert run.end() == 0, run.output
    assert rollouts_path(lab.run_dir(), 5).with_suffix(".attempt-1.parquet").exists()
    lengths = [update.record.trainer.total_steps for update in plan_replay(lab.run_dir()).updates]
    assert lengths == [30] * 3 + [8] * 5
    assert "replayed 8 of 8 steps of e2e/run: every digest agrees" in replayed(lab)


def test_other_model_in_the_folder_is_named_before_any_step(lab: Any) -> None:
    trained(lab)
    (lab.folder / "model").unlink()
    init_model(
        lab.folder / "model",
        layers=1,
        hidden=16,
        intermediate=32,
        heads=2,
        kv_heads=2,
        max_len=4096,
        seed=9,
    )
    said = replayed(lab, code=2)
    assert "model is not the model that this run started from" in said
    shutil.rmtree(lab.folder / "model")
    assert "the run trained model, and there is no such folder here" in replayed(lab, code=2)
