"""What goes wrong ends a run soon, with an error that names it, or costs one group."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from offbeat.checkpoint.manifest import verify

SOON = 10.0
"""Seconds within which a run must have ended after a process of it died."""

IMPATIENT = "rollout.max_consecutive_failures=3"

ONE_LIFE = "generator.max_restarts=0"


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if "offbeat" in entry.name}


def check_failed(lab: Any, run: Any, code: int, *names: str) -> None:
    """The run failed, said so on disk, and named what it was without a traceback."""
    output = run.output
    assert code == 1, output
    for name in names:
        assert name in output
        assert name in lab.summary()["error"]
    assert lab.summary()["status"] == "failed"
    assert "Traceback" not in output
    assert lab.summary()["groups"]["open"] == 0


def check_killed(lab: Any, run: Any, victim: str) -> None:
    """Kill the worker: the run fails and names it."""
    pid = run.worker(victim)
    os.kill(pid, signal.SIGKILL)
    check_failed(lab, run, run.end(within=SOON), f"{victim} (pid {pid}) was killed by SIGKILL")


# Before anything starts


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.path=absent", "absent"),
        ("model.path=.", "no config.json"),
        ("train_dataset.path=absent.jsonl", "absent.jsonl"),
        ("train_dataset.path=task:absent", "'task' has no 'absent'"),
        ("train_dataset.columns={prompt: question}", "no column 'question'"),
        ("train_dataset.args={n: 0}", "empty"),
        ("train_dataset.args={length: 70}", "71 tokens"),
        ("model.max_model_len=5000", "4096"),
        ("rollout.workflow=task:absent", "'task' has no 'absent'"),
        ("train_dataset.batch_size=0", "train_dataset.batch_size"),
    ],
)
def test_what_cannot_be_used_is_named_before_a_process_starts(
    lab: Any, override: str, named: str
) -> None:
    run = lab.train(override)
    assert run.end() == 2, run.output
    assert run.output.startswith("error: ")
    assert named in run.output
    assert "Traceback" not in run.output
    assert not (lab.folder / "runs").exists()


def test_a_reward_function_that_cannot_be_loaded_ends_the_run_before_a_model_is_loaded(
    lab: Any,
) -> None:
    run = lab.train("rollout.reward_fn=task:absent")
    assert run.end() == 2, run.output
    assert "'task' has no 'absent'" in run.output
    assert lab.summary()["status"] == "failed"
    assert not (lab.run_dir() / "logs" / "trainer.log").exists()


@pytest.mark.slow
def test_a_worker_that_cannot_load_the_model_shows_its_traceback_with_debug_only(lab: Any) -> None:
    shutil.copytree(lab.folder / "model", lab.folder / "torn")
    file = lab.folder / "torn" / "config.json"
    config = json.loads(file.read_text())
    config["intermediate_size"] += 1  # the weights have another shape, which their loader finds
    file.write_text(json.dumps(config))
    run = lab.train("model.path=torn")
    assert run.end() == 2, run.output
    assert "loading the model at torn" in run.output
    assert "Traceback" not in run.output
    assert "--debug shows the traceback" in run.output
    assert lab.summary()["status"] == "failed"
    again = lab.train("model.path=torn", "trial_name=again", "--debug")
    assert again.end() == 2
    assert "ignore_mismatched_sizes" in again.output
    assert "Traceback" in again.output


def test_a_folder_that_holds_a_run_is_refused_and_not_touched(lab: Any) -> None:
    lab.run_dir().mkdir(parents=True)
    (lab.run_dir() / "metrics.jsonl").write_text("{}\n")
    run = lab.train()
    assert run.end() == 2
    assert "choose another trial_name" in run.output
    assert [p.name for p in lab.run_dir().iterdir()] == ["metrics.jsonl"]


# Prompts and rewards


@pytest.mark.slow
@pytest.mark.invariant("I02")
def test_prompts_longer_than_the_context_are_dropped_counted_and_replaced(lab: Any) -> None:
    run = lab.train("train_dataset.path=task:some_too_long", "total_train_steps=3")
    assert run.end() == 0, run.output
    groups = lab.summary()["groups"]
    # Six rows are an epoch; two of each six are too long.
    assert groups["trained"] == 6
    assert groups["dropped"]["too_long"] >= 2
    assert groups["admitted"] == 6 + groups["dropped"]["too_long"]
    assert "71 tokens" in run.output


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_an_error_where_the_configuration_says_so(
    lab: Any,
) -> None:
    run = lab.train("train_dataset.path=task:some_too_long", "train_dataset.overlong_prompt=error")
    assert run.end() == 2, run.output
    assert "71 tokens" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raising", "KeyError: 'no such answer'"),
        pytest.param("nothing", "returned None", marks=pytest.mark.slow),
        pytest.param("not_a_number", "returned nan", marks=pytest.mark.slow),
        pytest.param("words", "returned 'good'", marks=pytest.mark.slow),
    ],
)
def test_rewards_that_are_no_numbers_end_the_run_with_the_first_of_them(
    lab: Any, function: str, reason: str
) -> None:
    run = lab.train(f"rollout.reward_fn=task:{function}", IMPATIENT)
    check_failed(lab, run, run.end(), reason, "max_consecutive_failures")
    assert lab.summary()["groups"]["trained"] == 0
    assert lab.summary()["groups"]["dropped"]["invalid_reward"] >= 3


@pytest.mark.slow
def test_a_reward_that_hangs_is_killed_at_its_deadline_and_the_budget_ends_the_run(
    lab: Any,
) -> None:
    run = lab.train(
        "rollout.reward_fn=task:hanging", "rollout.reward_timeout_seconds=0.2", IMPATIENT
    )
    run.until_file("hanging")
    check_failed(lab, run, run.end(within=SOON), "timed out after 0.2 s")


@pytest.mark.slow
def test_equal_rewards_of_all_siblings_train_on_nothing_and_say_so(lab: Any) -> None:
    run = lab.train("rollout.reward_fn=task:equal", "actor.optimizer.weight_decay=0")
    assert run.end() == 0, run.output
    for step in lab.metrics():
        assert step["reward/zero_std_fraction"] == 1.0
        assert step["actor/grad_norm"] == 0.0


@pytest.mark.slow
def test_empty_answers_are_scored_and_trained_on_like_any_other(lab: Any) -> None:
    every_token = ",".join(map(str, range(50)))
    run = lab.train(f"gconfig.stop_token_ids=[{every_token}]", "rollout.reward_fn=task:length")
    assert run.end() == 0, run.output
    for step in lab.metrics():
        assert step["generate/length_max_tokens"] == 1.0
        assert step["reward/mean"] == 0.0
        assert step["generate/truncated_fraction"] == 0.0
    assert lab.summary()["groups"]["trained"] == 4


# Deaths


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("victim", ["generator-0", pytest.param("trainer", marks=pytest.mark.slow)])
def test_a_worker_killed_during_generation_ends_the_run_and_is_named(lab: Any, victim: str) -> None:
    run = lab.at("generation", ONE_LIFE)
    check_killed(lab, run, victim)
    assert lab.groups("trained") == 0


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("victim", ["generator-0", "trainer"])
def test_a_worker_killed_while_a_reward_is_computed_ends_the_run_and_is_named(
    lab: Any, victim: str
) -> None:
    run = lab.at("reward", "rollout.reward_timeout_seconds=60", ONE_LIFE)
    check_killed(lab, run, victim)


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("victim", ["generator-0", "trainer"])
def test_a_worker_killed_during_an_update_ends_the_run_and_is_named(lab: Any, victim: str) -> None:
    run = lab.at("update", ONE_LIFE)
    check_killed(lab, run, victim)


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("victim", ["generator-0", "trainer"])
def test_a_worker_killed_while_it_starts_ends_the_run_and_is_named(lab: Any, victim: str) -> None:
    run = lab.train()
    check_killed(lab, run, victim)


@pytest.mark.slow
@pytest.mark.invariant("I12")
@pytest.mark.invariant("I13")
def test_a_trainer_that_hangs_ends_the_run_and_is_named(lab: Any) -> None:
    run = lab.at("update", "rollout.stall_seconds=3")
    check_failed(lab, run, run.end(within=SOON), "trainer has not answered for 3 s")


@pytest.mark.slow
@pytest.mark.invariant("I13")
def test_a_reward_process_that_is_killed_costs_its_job_only(lab: Any) -> None:
    run = lab.train("rollout.reward_fn=task:hanging_once", "gconfig.n_samples=3")
    run.until_file("hanging")
    os.kill(run.worker("rewards"), signal.SIGKILL)
    assert run.end() == 0, run.output
    assert [step["reward/invalid_count"] for step in lab.metrics()] == [1.0, 0.0]
    assert lab.summary()["groups"]["trained"] == 4


@pytest.mark.slow
@pytest.mark.invariant("I13")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_writer_killed_during_a_save_ends_the_run_and_leaves_no_torn_folder(
    lab: Any, mode: str
) -> None:
    run = lab.at("save", f"saver.mode={mode}")
    os.kill(run.worker("writer"), signal.SIGKILL)
    check_failed(lab, run, run.end(within=SOON), "step 4", "writer process", "exit code -9")
    saved = list((lab.run_dir() / "checkpoints").glob("step-*"))
    assert [folder.name for folder in saved] == ["step-000002"]
    verify(saved[0])


@pytest.mark.invariant("I13")
@pytest.mark.parametrize(
    "stage",
    [
        "generation",
        pytest.param("start", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.slow),
        pytest.param("update", marks=pytest.mark.slow),
        pytest.param("save", marks=pytest.mark.slow),
    ],
)
def test_a_killed_controller_leaves_no_process_and_no_shared_memory(lab: Any, stage: str) -> None:
    before = shared_memory()
    run = lab.at(stage)
    os.kill(run.pid, signal.SIGKILL)
    assert run.end(within=1) == -signal.SIGKILL
    assert shared_memory() <= before
    shown = lab.start("show", "latest")
    assert shown.end() == 0, shown.output
    assert "killed (its process is gone" in shown.output


# Disks


@pytest.mark.slow
def test_training_goes_on_without_metrics_when_their_disk_is_full(lab: Any) -> None:
    # The model's start takes seconds, the first metric is written after it.
    run = lab.train()
    run.until("the run folder", (lab.run_dir() / "run.db").exists)
    for name in ("metrics.jsonl", "spans.jsonl"):
        (lab.run_dir() / name).symlink_to("/dev/full")
    assert run.end() == 0, run.output
    assert "No space left on device" in run.output
    assert "training goes on" in run.output
    assert lab.summary()["status"] == "completed"
    assert lab.summary()["steps"] == 2


@pytest.mark.slow
def test_a_ledger_that_cannot_be_written_ends_the_run_with_an_error_that_names_it(
    lab: Any,
) -> None:
    def limit_the_controller() -> None:
        # Far above what start-up writes, far below what this many groups need in the ledger.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    run = lab.train(
        "total_train_steps=1000000", "train_dataset.batch_size=8", preexec_fn=limit_the_controller
    )
    assert run.end() == 1, run.output
    assert "run.db" in run.output
    assert "Traceback" not in run.output


# Neighbors


@pytest.mark.slow
def test_two_runs_at_once_do_not_disturb_each_other(lab: Any) -> None:
    first, second = lab.train("trial_name=one"), lab.train("trial_name=two")
    assert first.end() == 0, first.output
    assert second.end() == 0, second.output
    volatile = ("seconds", "throughput", "wait", "weights/commit", "weights/stage", "pause")

    def steady(trial: str) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in step.items() if not any(word in k for word in volatile)}
            for step in lab.metrics(trial)
        ]

    assert steady("one") == steady("two")
    assert len(steady("one")) == 2


@pytest.mark.slow
def test_of_two_runs_under_one_name_one_is_refused_and_the_other_goes_on(lab: Any) -> None:
    # Both find the folder free before either of them makes it.
    runs = [lab.train("train_dataset.path=task:rows_of_two_runs") for _ in range(2)]
    trained, refused = sorted(runs, key=lambda run: run.end())
    assert trained.end() == 0, trained.output
    assert refused.end() == 2, refused.output
    assert "trial_name: another run has just begun in runs/e2e/run" in refused.output
    assert [step["step"] for step in lab.metrics()] == [1, 2]
    assert lab.summary()["status"] == "completed"


@pytest.mark.slow
def test_killing_one_run_does_not_end_another(lab: Any) -> None:
    second = lab.train("trial_name=two")
    first = lab.at("generation", "trial_name=one", ONE_LIFE)
    began = time.monotonic()
    os.kill(first.worker("generator-0"), signal.SIGKILL)
    assert first.end(within=SOON) == 1
    assert time.monotonic() - began < SOON
    assert second.end() == 0, second.output
