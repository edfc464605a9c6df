"""Answers that take a hundred times as long, and rewards that fail in every way, in whole runs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from chaos_checks import check_run, details, fates, max_staleness, rows

from offbeat.types import DropReason

PLUGIN = '''
import asyncio
import os
import time
from pathlib import Path

from offbeat.rollout.rlvr import RLVRWorkflow

HERE = Path(__file__).parent


class Straggler(RLVRWorkflow):
    """The group of row 6 that is asked first waits until it is let go."""

    async def arun_episode(self, engine, data):
        if data.columns["number"] == 5 and not (HERE / "waits").exists():
            (HERE / "waits").touch()
            while not (HERE / "go").exists():
                await asyncio.sleep(0.01)
        return await super().arun_episode(engine, data)


def poisoned(*texts, number, **columns):
    """Of eight rows, four fail in a way of their own."""
    if number == 0:
        raise KeyError("no such answer")
    if number == 1:
        return float("nan")
    if number == 2:
        time.sleep(600)
    if number == 3:
        os._exit(7)
    return len(set(texts[1])) / 10
'''

STRAGGLER = "rollout.workflow=chaos_task:Straggler"
UNSHUFFLED = "train_dataset.shuffle=false"
SLOW_STEPS = "rollout.reward_fn=task:slow"
PATIENT = ("rollout.max_failure_rate=0.9", "rollout.reward_timeout_seconds=0.3")


@pytest.fixture
def plugin(lab: Any) -> Any:
    (lab.folder / "chaos_task.py").write_text(PLUGIN)
    return lab


@pytest.mark.slow
@pytest.mark.invariant("I01")
@pytest.mark.invariant("I12")
def test_under_pace_the_run_waits_for_a_straggler_says_so_and_loses_nothing(plugin: Any) -> None:
    run = plugin.train(STRAGGLER, UNSHUFFLED, "mode=async", "total_train_steps=12")
    # Groups 0 to 4 and 5: two steps of two groups are full, the third waits for group 5.
    run.until("two steps", lambda: plugin.groups("trained") == 4)
    run.until_file("waits")
    os.kill(run.pid, signal.SIGUSR1)
    run.until_text("group 5 (row 6, admitted ")
    assert "in its rewards or its workflow" in run.output
    assert fates(plugin)["trained"] == 4
    assert fates(plugin)["open"] <= (max_staleness(plugin) + 1) * 2
    (plugin.folder / "go").touch()
    assert run.end() == 0, run.output
    check_run(plugin)
    assert fates(plugin) == {"trained": 24}


@pytest.mark.slow
@pytest.mark.invariant("I01")
@pytest.mark.invariant("I02")
def test_under_drop_the_run_goes_on_and_a_straggler_beyond_the_bound_is_dropped(
    plugin: Any,
) -> None:
    run = plugin.train(
        STRAGGLER, UNSHUFFLED, "mode=async", "rollout.policy=drop", "total_train_steps=40",
        SLOW_STEPS, "rollout.reward_workers=4",
    )  # fmt: skip
    run.until_file("waits")
    at = plugin.groups("trained")
    beyond = at + 2 * (max_staleness(plugin) + 3)
    run.until("versions beyond the bound", lambda: plugin.groups("trained") >= beyond)
    (plugin.folder / "go").touch()
    assert run.end() == 0, run.output
    check_run(plugin)
    assert set(fates(plugin)) == {"trained", "stale"}
    assert fates(plugin)["trained"] == 80
    (straggler,) = (row for row in rows(plugin) if row.group_id == 5)
    assert straggler.reason is DropReason.STALE
    assert f"max_staleness is {max_staleness(plugin)}" in straggler.detail


@pytest.mark.slow
@pytest.mark.invariant("I02")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_past_its_deadline_a_straggler_is_cancelled_and_another_group_takes_its_place(
    plugin: Any, mode: str
) -> None:
    run = plugin.train(
        STRAGGLER, UNSHUFFLED, f"mode={mode}", "total_train_steps=6",
        "rollout.group_deadline_seconds=2",
    )  # fmt: skip
    assert run.end() == 0, run.output
    check_run(plugin)
    assert fates(plugin) == {"trained": 12, "cancelled": 1}
    assert "group 5 (row 6): not complete after 2 s" in details(plugin, "cancelled")
    said = plugin.summary()
    assert said["deterministic"] is (False if mode == "sync" else None)
    assert len(said["determinism_broken_by"]) == (mode == "sync")


@pytest.mark.slow
@pytest.mark.invariant("I02")
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_poisoned_rewards_cost_their_groups_and_each_poison_is_named(
    plugin: Any, mode: str
) -> None:
    run = plugin.train(
        "rollout.reward_fn=chaos_task:poisoned", f"mode={mode}", "total_train_steps=6", *PATIENT
    )
    assert run.end() == 0, run.output
    check_run(plugin)
    ended = fates(plugin)
    assert ended["trained"] == 12
    assert ended["invalid_reward"] >= 8
    why = details(plugin, "invalid_reward")
    for poison in ("KeyError: 'no such answer'", "returned nan", "after 0.3 s", "exit code 7"):
        assert poison in why
    said = plugin.summary()
    assert said["deterministic"] is (False if mode == "sync" else None)
    assert said["reward_workers_replaced"] >= 8
    assert ("cannot be repeated bit for bit" in run.output) is (mode == "sync")
