"""A trainer restored from the copy of another one goes on as that one would have."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat.errors import CheckpointError, NonFiniteLoss, TrainingError, WeightSyncError
from offbeat.train.client import Restore
from offbeat.train.state import StateCopy, environment, restore
from offbeat.types import PolicyVersion, TrainerState, TrainSample

V1, V2, V3 = (PolicyVersion(v) for v in (1, 2, 3))
WARM = {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.25}


@contextmanager
def copy_of(trainer: Any, thread: Executor | None = None) -> Iterator[StateCopy]:
    with (
        ThreadPoolExecutor(max_workers=1) as own,
        closing(StateCopy(trainer.actor, trainer.engine, thread or own)) as copy,
    ):
        yield copy


def taken(copy: StateCopy) -> TrainerState:
    copy.begin()
    return copy.staged.result(timeout=10)


def state_of(trainer: Any, path: Path) -> Restore:
    """The state of ``trainer`` as a file, as the background writer makes one."""
    with copy_of(trainer) as copy:
        state = taken(copy)
        shutil.copyfile(state.tensors.uri, path)
    return Restore(
        path=str(path), version=state.tensors.version, optimizer_steps=state.optimizer_steps
    )


@pytest.mark.invariant("I04")
def test_restored_trainer_takes_the_next_steps_bit_for_bit(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], tmp_path: Path
) -> None:
    options = {"lr": 1e-2, "ppo_n_minibatches": 2, "total_steps": 16, "optimizer": WARM}
    whole, resumed = make_trainer(**options), make_trainer(**options)
    whole.actor.update(rollouts, V1)
    place = state_of(whole, tmp_path / "state.safetensors")
    assert (place.version, place.optimizer_steps) == (V1, 2)
    restore(resumed.actor, resumed.engine, place)
    for version in (V2, V3):
        reports = [t.actor.update(rollouts, version) for t in (whole, resumed)]
        assert reports[0].metrics == reports[1].metrics
        left, right = whole.engine.snapshot(), resumed.engine.snapshot()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert whole.engine.learning_rate == resumed.engine.learning_rate


def test_lost_moments_would_be_noticed(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], tmp_path: Path
) -> None:
    whole, resumed = make_trainer(lr=1e-2), make_trainer(lr=1e-2)
    whole.actor.update(rollouts, V1)
    place = state_of(whole, tmp_path / "state.safetensors")
    kept = {k: v for k, v in load_file(place.path).items() if not k.startswith("optimizer/")}
    save_file(kept, place.path)
    restore(resumed.actor, resumed.engine, place)
    for trainer in (whole, resumed):
        trainer.actor.update(rollouts, V2)
    left, right = whole.engine.snapshot(), resumed.engine.snapshot()
    assert not all(torch.equal(left[name], right[name]) for name in left)


def test_copy_stays_as_it_is_while_training_goes_on(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(lr=1e-2)
    with copy_of(trainer) as copy:
        empty = load_file(taken(copy).tensors.uri)
        trainer.actor.update(rollouts, V1)
        state = taken(copy)
        before = load_file(state.tensors.uri)
        trainer.actor.update(rollouts, V2)
        after = load_file(state.tensors.uri)
    # The optimizer has no moments before the first step.
    assert not any(name.startswith("optimizer/") for name in empty)
    kinds = {name.split("/")[1] for name in before if name.startswith("optimizer/")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_random_state_is_restored(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        place = state_of(trainer, tmp_path / "state.safetensors")
        expected = torch.rand(3)
        torch.manual_seed(6)
        restore(trainer.actor, trainer.engine, place)
        assert torch.equal(torch.rand(3), expected)


def test_changed_schedule_holds_from_the_restored_step_on(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], tmp_path: Path
) -> None:
    constant, linear = (
        make_trainer(lr=1e-2, total_steps=4, optimizer={"lr_scheduler_type": kind})
        for kind in ("constant", "linear")
    )
    constant.actor.update(rollouts, V1)
    place = state_of(constant, tmp_path / "state.safetensors")
    restore(linear.actor, linear.engine, place)
    assert linear.engine.learning_rate == pytest.approx(1e-2 * 3 / 4)


def test_weights_between_two_versions_are_not_copied(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(lr=1e30, ppo_n_minibatches=2)
    with copy_of(trainer) as copy:
        with pytest.raises(NonFiniteLoss):
            trainer.actor.update(rollouts, V1)
        with pytest.raises(TrainingError, match="between two optimizer steps"):
            copy.begin()


def test_an_update_computes_during_the_copy_and_changes_nothing_before_it_is_complete(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample]
) -> None:
    trainer = make_trainer(lr=1e-2)
    trainer.actor.update(rollouts, V1)
    before = trainer.engine.snapshot()
    waits, held = threading.Event(), threading.Event()
    with ThreadPoolExecutor(max_workers=1) as thread, copy_of(trainer, thread) as copy:

        def before_step() -> None:
            waits.set()
            copy.maybe_wait_for_staging()

        thread.submit(held.wait)  # the copy does not begin before this ends
        assert copy.begin() == V1
        with ThreadPoolExecutor(max_workers=1) as training:
            update = training.submit(trainer.actor.update, rollouts, V2, before_step=before_step)
            assert waits.wait(timeout=10)
            assert not update.done()
            held.set()
            assert update.result(timeout=10).version == V2
        state = copy.staged.result(timeout=10)
        assert state.tensors.version == V1
        copied = load_file(state.tensors.uri)
        assert update.result().staging_seconds > 0
    assert all(torch.equal(copied[f"weights/{name}"], before[name]) for name in before)
    after = trainer.engine.snapshot()
    assert not all(torch.equal(after[name], before[name]) for name in before)


def test_an_update_that_fails_to_copy_goes_on_and_the_snapshot_says_why(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    trainer = make_trainer(lr=1e-2)
    with copy_of(trainer) as copy:
        monkeypatch.setattr(os, "posix_fallocate", full)
        copy.begin()
        trainer.actor.update(rollouts, V1, before_step=copy.maybe_wait_for_staging)
        with pytest.raises(WeightSyncError, match="no shared memory"):
            copy.staged.result(timeout=10)


def test_memory_that_was_prepared_is_the_one_that_is_filled(
    make_trainer: Callable[..., Any], rollouts: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, made = make_trainer(lr=1e-2), []
    trainer.actor.update(rollouts, V1)
    with ThreadPoolExecutor(max_workers=1) as thread, copy_of(trainer, thread) as copy:
        copy.prepare()
        thread.submit(lambda: None).result(timeout=10)
        monkeypatch.setattr(os, "memfd_create", made.append)
        assert set(load_file(taken(copy).tensors.uri)) > {"random_state"}
    assert made == []


def test_a_snapshot_that_was_never_begun_is_an_error(make_trainer: Callable[..., Any]) -> None:
    with copy_of(make_trainer()) as copy, pytest.raises(CheckpointError, match="was begun"):
        _ = copy.staged


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "unreadable"])
def test_state_of_another_model_is_refused_by_the_tensors_name(
    make_trainer: Callable[..., Any], tmp_path: Path, damage: str
) -> None:
    trainer = make_trainer()
    place = state_of(trainer, tmp_path / "state.safetensors")
    tensors = load_file(place.path)
    name = next(key for key in sorted(tensors) if key.startswith("weights/"))
    said = f"'{name.removeprefix('weights/')}'"
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["weights/new"], said = torch.zeros(1), "'new' is unknown to the model"
    elif damage == "shape":
        tensors[name] = torch.zeros(3)
    save_file(tensors, place.path)
    if damage == "unreadable":
        Path(place.path).write_bytes(b"no tensors")
        said = "restore the trainer from"
    with pytest.raises(CheckpointError, match=said):
        restore(trainer.actor, trainer.engine, place)


def test_environment_says_what_bits_depend_on() -> None:
    found = environment()
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.processor
    assert found == environment()
