"""Which run is continued, from where, and what becomes of what it did after that."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offbeat.checkpoint.folders import replacing, step_folders
from offbeat.checkpoint.manifest import SaveManifest, is_good, seal
from offbeat.checkpoint.saver import Saver, ScheduleState
from offbeat.checkpoint.snapshot import Counts, RunState, Snapshots, newest_snapshot
from offbeat.config import AsyncMode, RunConfig, from_mapping, load, to_yaml
from offbeat.errors import CheckpointError, ConfigError, TrainingError
from offbeat.observe import liveness
from offbeat.observe.ledger import LedgerTotals, read_groups
from offbeat.observe.metrics import StepRecord
from offbeat.observe.sinks import JsonlSink, read_metrics
from offbeat.observe.summary import RunStatus, RunTotals
from offbeat.pipeline import resume
from offbeat.pipeline.ledger import Ledger
from offbeat.pipeline.resume import (
    Continuation,
    changed_bits,
    continue_run,
    is_unfinished,
    machine_changes,
    named_after,
    rewrite_config,
    run_of_snapshot,
    run_to_continue,
    snapshot_to_continue,
)
from offbeat.types import (
    DropReason,
    Environment,
    GroupId,
    PolicyVersion,
    TrainerState,
    WeightUpdate,
)
from offbeat.weights.layout import TensorSpec, digest_of, lay_out

ANCIENT = Environment(torch="1.0", build="a", threads=1, processor="Z80", cpu_flags=("mmx",))


def run_state(step: int, next_group: int, *open_groups: int, **changes: Any) -> RunState:
    state = RunState(
        step=step,
        version=PolicyVersion(step),
        attempt=1,
        next_group_id=GroupId(next_group),
        open_groups=tuple(GroupId(g) for g in open_groups),
        lookahead=4,
        counts=Counts(),
        saved=False,
        save=ScheduleState(step=step),
        evaluate=ScheduleState(step=step),
        snapshot=ScheduleState(step=step),
    )
    return dataclasses.replace(state, **changes)


# --- which run


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(trial_name: str | None = None, **changes: object) -> RunConfig:
        return from_mapping(
            {
                "fileroot": str(tmp_path / "runs"),
                "trial_name": trial_name,
                "total_train_steps": 5,
                "model": {"path": "model"},
                "train_dataset": {"path": "rows.jsonl", "batch_size": 4},
                "rollout": {"reward_fn": "task:reward"},
                **changes,
            }
        )

    return make


def begun(cfg: RunConfig) -> Path:
    run_dir = Path(cfg.fileroot) / cfg.experiment_name / str(cfg.trial_name)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    Ledger.open(run_dir / "run.db").close()
    return run_dir


def ended(run_dir: Path, status: RunStatus, steps: int) -> None:
    totals = RunTotals(0.0, [StepRecord(step=steps, version=steps, seconds=1.0)])
    with closing(Ledger.open(run_dir / "run.db")) as ledger:
        nothing = LedgerTotals(admitted=0, trained=0, dropped={}, open=0)
        summary = totals.summary(now=1.0, status=status, groups=nothing, tokens=ledger.tokens())
    summary.write(run_dir / "summary.json")


def test_run_of_the_name_is_continued_while_it_is_not_complete(
    configure: Callable[..., RunConfig],
) -> None:
    cfg = configure("mine")
    assert run_to_continue(cfg, asked=True) is None
    run_dir = begun(cfg)
    assert run_to_continue(cfg, asked=True) == run_dir
    ended(run_dir, RunStatus.FAILED, 3)
    assert run_to_continue(cfg, asked=True) == run_dir
    ended(run_dir, RunStatus.COMPLETED, 5)
    assert run_to_continue(cfg, asked=True) is None
    assert not is_unfinished(run_dir)
    longer = configure("mine", total_train_steps=8)
    with pytest.raises(ConfigError, match="mine is complete, and no snapshot of it was taken"):
        run_to_continue(longer, asked=True)
    (run_dir / "snapshots" / "step-000005").mkdir(parents=True)
    assert run_to_continue(longer, asked=True) == run_dir


def test_without_a_name_the_newest_run_of_the_experiment_is_meant_and_no_older_one(
    configure: Callable[..., RunConfig],
) -> None:
    old, new = begun(configure("b")), begun(configure("a"))
    for at, run_dir in enumerate((old, new), 1_000_000_000):
        for file in run_dir.iterdir():
            os.utime(file, (at, at))
    assert run_to_continue(configure(), asked=True) == new
    ended(new, RunStatus.COMPLETED, 5)
    assert run_to_continue(configure(), asked=True) is None


def test_unasked_only_a_run_that_was_configured_the_same_is_continued(
    configure: Callable[..., RunConfig],
) -> None:
    run_dir = begun(configure("mine"))
    assert run_to_continue(configure(), asked=False) == run_dir
    longer = configure(total_train_steps=8)
    assert run_to_continue(longer, asked=False) is None
    assert run_to_continue(longer, asked=True) == run_dir
    (run_dir / "config.yaml").write_text("torn: [")
    assert run_to_continue(configure(), asked=False) is None


def test_without_its_ledger_a_run_that_took_a_snapshot_is_refused(
    configure: Callable[..., RunConfig],
) -> None:
    cfg = configure("mine")
    run_dir = begun(cfg)
    (run_dir / "run.db").unlink()
    assert named_after(cfg, run_dir) == cfg
    (run_dir / "snapshots" / "step-000003").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run\.db is missing, and .*step-000003 was taken"):
        named_after(cfg, run_dir)


def test_a_snapshot_that_is_named_must_be_one_of_the_run_that_is_meant(
    configure: Callable[..., RunConfig],
) -> None:
    run_dir = begun(configure("mine"))
    snapshot = run_dir / "snapshots" / "step-000003"
    with pytest.raises(ConfigError, match=r"step-000003 is no snapshot; name a folder"):
        run_of_snapshot(configure(), snapshot)
    snapshot.mkdir(parents=True)
    for cfg in (configure(), configure("mine")):
        assert run_of_snapshot(cfg, snapshot) == run_dir
    with pytest.raises(ConfigError, match=r"is of the run in .*mine, and .* means .*other"):
        run_of_snapshot(configure("other"), snapshot)
    with pytest.raises(ConfigError, match="mine is no snapshot"):
        run_of_snapshot(configure(), run_dir)
    with liveness.held(run_dir), pytest.raises(ConfigError, match="mine is still running"):
        run_of_snapshot(configure(), snapshot)


def test_run_that_still_runs_is_left_alone(configure: Callable[..., RunConfig]) -> None:
    run_dir = begun(configure("mine"))
    with liveness.held(run_dir):
        for cfg, asked in ((configure("mine"), False), (configure(), True)):
            with pytest.raises(ConfigError, match="mine is still running"):
                run_to_continue(cfg, asked=asked)
        # Unasked and without a name, another one begins.
        assert run_to_continue(configure(), asked=False) is None


# --- its configuration


def test_other_prompts_are_refused_and_other_changes_are_said(
    configure: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = begun(configure("mine"))
    for change, said in (
        ({"seed": 2}, "seed: 1 became 2"),
        (
            {"train_dataset": {"path": "rows.jsonl", "batch_size": 8}},
            "train_dataset.batch_size: 4 became 8",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            named_after(configure(**change), run_dir)
    cfg = named_after(configure(gconfig={"n_samples": 6}, recover={"freq_steps": 1}), run_dir)
    assert cfg.trial_name == "mine"
    said = [record.getMessage() for record in caplog.records]
    assert said
    assert all("n_samples" in text for text in said), said
    rewrite_config(cfg, run_dir, attempt=1)
    assert load(run_dir / "config.yaml") == cfg
    assert load(run_dir / "config.attempt-1.yaml").gconfig.n_samples != 6


def test_a_configuration_that_was_trained_with_is_kept_though_resumes_fail(
    configure: Callable[..., RunConfig],
) -> None:
    run_dir = begun(configure("mine", gconfig={"n_samples": 4}))
    for n in (5, 6):
        rewrite_config(configure("mine", gconfig={"n_samples": n}), run_dir, attempt=1)
    assert load(run_dir / "config.yaml").gconfig.n_samples == 6
    assert load(run_dir / "config.attempt-1.yaml").gconfig.n_samples == 4


@pytest.mark.invariant("I03")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor": {"optimizer": {"lr": 0.5}}}, ["actor.optimizer.lr"]),
        (
            {"mode": "async"},
            [
                *("actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"),
                *("actor.prox_logp_method", "actor.use_decoupled_loss"),
                *("mode", "rollout.max_staleness"),
            ],
        ),
        ({"model": {"path": "model", "dtype": "bfloat16"}}, ["model.dtype"]),
        ({"saver": {"freq_steps": 1}, "recover": {"freq_steps": 3}}, []),
        ({"total_train_steps": 9}, []),
        (
            {"total_train_steps": 9, "actor": {"optimizer": {"lr_scheduler_type": "cosine"}}},
            ["actor.optimizer.lr_scheduler_type", "total_train_steps"],
        ),
    ],
)
def test_keys_that_weights_depend_on_are_told_from_others(
    configure: Callable[..., RunConfig], changes: dict[str, object], named: list[str]
) -> None:
    run_dir = begun(configure("mine"))
    lines = changed_bits(run_dir, configure("mine", **changes))
    assert [line.partition(":")[0] for line in lines] == named


def test_run_that_was_stopped_while_it_wrote_its_configuration_can_be_continued(
    configure: Callable[..., RunConfig],
) -> None:
    run_dir = begun(configure("mine"))
    (run_dir / "config.yaml").write_text("")
    (run_dir / "run.db").unlink()
    cfg = named_after(configure(), run_dir)
    rewrite_config(cfg, run_dir, attempt=1)
    assert load(run_dir / "config.yaml") == cfg


# --- from where


def go_on(run_dir: Path, ledger: Ledger, named: Path | None = None) -> Continuation:
    return continue_run(run_dir, ledger, snapshot_to_continue(run_dir, named))


def stopped_run(run_dir: Path) -> None:
    """Two groups per step; stopped in step 4, with a snapshot and a model folder of steps 2, 3."""
    with closing(Ledger.open(run_dir / "run.db")) as ledger:
        for group in range(9):
            ledger.admit(GroupId(group), epoch=0, row=group, admission_version=PolicyVersion(0))
        ledger.dropped(GroupId(2), DropReason.FAILED)
        for step, groups in ((1, (0, 1)), (2, (3, 4)), (3, (5, 6))):
            for group in groups:
                ledger.trained(GroupId(group), step, PolicyVersion(step - 1))
        ledger.dropped(GroupId(7), DropReason.CANCELLED)
    sink = JsonlSink(run_dir / "metrics.jsonl")
    for step in range(4):
        sink.write(step, StepRecord(step=step, version=step, seconds=1.0).flat())
    for step in (2, 3):
        with replacing(run_dir / "checkpoints" / f"step-{step:06d}") as aside:
            (aside / "model").write_text("x")
            seal(aside, SaveManifest(step=step, version=PolicyVersion(step)), known={})


@pytest.fixture
def snapshot_of(
    tmp_path: Path,
) -> Callable[[Path, RunState], Awaitable[None]]:
    """Write a snapshot of a state, with tensors of no meaning."""

    async def write(run_dir: Path, state: RunState) -> None:
        layout = lay_out([TensorSpec(name="w", dtype="F32", shape=(1,))])
        content = layout.header + b"\0" * 4
        file = tmp_path / "tensors"
        file.write_bytes(content)
        tensors = WeightUpdate(
            version=state.version, uri=str(file), nbytes=len(content), digest=digest_of(content)
        )
        async with Snapshots(run_dir / "snapshots", keep=2) as snapshots:
            await snapshots.write(
                state, TrainerState(tensors=tensors, optimizer_steps=2, environment=ANCIENT)
            )

    return write


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I04")
async def test_what_came_after_the_snapshot_is_set_aside_and_its_open_groups_are_free_again(
    tmp_path: Path, snapshot_of: Callable[[Path, RunState], Awaitable[None]]
) -> None:
    stopped_run(tmp_path)
    await snapshot_of(tmp_path, run_state(2, 7, 5, 6))
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        found = go_on(tmp_path, ledger)
        assert ledger.attempt == 2
        totals = ledger.totals()
    assert (totals.admitted, totals.trained, totals.open) == (5, 4, 0)
    assert totals.dropped[DropReason.FAILED] == 1
    assert [row.group_id for row in read_groups(tmp_path / "run.db")] == [0, 1, 2, 3, 4]
    assert found.state is not None
    assert found.state.open_groups == (5, 6)
    assert [record.step for record in found.earlier] == [0, 1, 2]
    assert [r.step for r in read_metrics(tmp_path / "metrics.attempt-1.jsonl")] == [3]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000003.attempt-1"]
    # Killed again before anything new: the same once more.
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        again = go_on(tmp_path, ledger)
        assert (ledger.attempt, ledger.totals()) == (3, totals)
    assert again == found


async def test_an_older_snapshot_that_is_named_is_used_and_the_newer_one_set_aside(
    tmp_path: Path, snapshot_of: Callable[[Path, RunState], Awaitable[None]]
) -> None:
    stopped_run(tmp_path)
    await snapshot_of(tmp_path, run_state(2, 7, 5, 6))
    await snapshot_of(tmp_path, run_state(3, 9, 7, 8))
    older = tmp_path / "snapshots" / "step-000002"
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        found = go_on(tmp_path, ledger, older)
    assert found.state is not None
    assert found.state.step == 2
    assert [path.name for path in step_folders(tmp_path / "snapshots")] == [older.name]
    assert (tmp_path / "snapshots" / "step-000003.attempt-1").is_dir()


@pytest.mark.invariant("I04")
async def test_a_resume_from_an_older_snapshot_that_is_interrupted_is_finished_by_the_next(
    tmp_path: Path,
    snapshot_of: Callable[[Path, RunState], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped_run(tmp_path)
    await snapshot_of(tmp_path, run_state(2, 7, 5, 6))
    await snapshot_of(tmp_path, run_state(3, 9, 7, 8))

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        (tmp_path / "summary.json").write_text("{}")
        with monkeypatch.context() as patch:
            patch.setattr(resume, "supersede", full_disk)
            with pytest.raises(CheckpointError, match="No space left"):
                go_on(tmp_path, ledger, tmp_path / "snapshots" / "step-000002")
        assert not (tmp_path / "summary.json").exists()  # a complete run would not be resumed
        found = go_on(tmp_path, ledger)
    assert found.state is not None
    assert found.state.step == 2
    assert [record.step for record in found.earlier] == [0, 1, 2]


def test_a_snapshot_may_be_named_from_within(tmp_path: Path) -> None:
    link = tmp_path / "mine"
    link.symlink_to(tmp_path / "snapshots" / "step-000002")
    with pytest.raises(CheckpointError, match=r"snapshots/step-000002/manifest\.json is missing"):
        snapshot_to_continue(tmp_path, link)


async def test_newer_snapshots_that_were_refused_are_never_used_by_a_later_attempt(
    tmp_path: Path, snapshot_of: Callable[[Path, RunState], Awaitable[None]]
) -> None:
    stopped_run(tmp_path)
    await snapshot_of(tmp_path, run_state(2, 7, 5, 6))
    await snapshot_of(tmp_path, run_state(3, 9, 7, 8))
    state = tmp_path / "snapshots" / "step-000003" / "state.json"
    text = state.read_text()
    state.write_text("{}")
    with closing(Ledger.open(tmp_path / "run.db")) as ledger:
        go_on(tmp_path, ledger)
    (tmp_path / "snapshots" / "step-000003.attempt-1" / "state.json").write_text(text)
    found = newest_snapshot(tmp_path / "snapshots")
    assert found is not None
    assert found.state.run.step == 2


def test_without_a_snapshot_everything_is_set_aside_and_the_run_starts_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped_run(tmp_path)
    with closing(Ledger.open(tmp_path / "run.db")) as ledger, caplog.at_level(logging.WARNING):
        found = go_on(tmp_path, ledger)
        assert ledger.totals().admitted == 0
    assert (found.snapshot, found.state, found.earlier) == (None, None, ())
    assert "the run starts over, as attempt 2" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl") == ()


def test_another_machine_is_named_and_the_same_one_is_not() -> None:
    assert machine_changes(ANCIENT, ANCIENT) == []
    other = dataclasses.replace(ANCIENT, threads=4, cpu_flags=())
    assert machine_changes(ANCIENT, other) == [
        "threads was 1, is 4",
        "the CPU's instructions differ",
    ]


# --- and on


@pytest.mark.invariant("I01")
@pytest.mark.invariant("I04")
async def test_resumed_loop_commits_the_restored_version_before_it_admits_the_open_groups(
    open_rig: Callable[..., Awaitable[Any]],
) -> None:
    start = run_state(2, 7, 5, 6, counts=Counts(admitted=2, dropped={DropReason.FAILED: 1}))
    rig = await open_rig(steps=5, g=2, eta=1, start=start)
    rig.trainer.version = PolicyVersion(2)
    rig.generator.version = PolicyVersion(1)  # it takes the next version only
    await rig.run()
    groups = list(dict.fromkeys(request.group_id for request in rig.generator.requests))
    assert groups == [5, 6, 7, 8, 9, 10]
    rows = {row.group_id: row for row in rig.groups()}
    assert [rows[GroupId(g)].admission_version for g in (5, 6, 7, 8)] == [2, 2, 2, 2]
    assert all(row.start_version - row.admission_version <= 1 for row in rows.values())
    assert [record.step for record in rig.records()] == [3, 4, 5]
    # The open groups were counted in the attempt that admitted them first.
    assert sum(r.metrics["groups/admitted_count"] for r in rig.records()) == 2 + len(rows) - 2
    assert rig.records()[0].metrics["groups/dropped_failed_count"] == 1


async def test_model_folder_that_was_under_way_when_the_run_stopped_is_saved_again(
    open_rig: Callable[..., Awaitable[Any]], tmp_path: Path, model_folder: Path
) -> None:
    there = tmp_path / "checkpoints"
    opening = Saver.open(mode=AsyncMode.SYNC, checkpoints_dir=there, template_dir=model_folder)
    async with await opening as saver:
        rig = await open_rig(steps=3, saver=saver, start=run_state(2, 4, saved=True))
        rig.trainer.version = PolicyVersion(2)
        rig.generator.version = PolicyVersion(1)
        await rig.run()
    assert [folder.name for folder in step_folders(there)] == ["step-000002"]
    assert is_good(step_folders(there)[0])


@pytest.mark.parametrize("steps", [2, 1])
async def test_run_that_is_resumed_behind_its_last_step_saves_its_model_and_says_so(
    open_rig: Callable[..., Awaitable[Any]],
    tmp_path: Path,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
    steps: int,
) -> None:
    there = tmp_path / "checkpoints"
    opening = Saver.open(mode=AsyncMode.SYNC, checkpoints_dir=there, template_dir=model_folder)
    async with await opening as saver:
        rig = await open_rig(steps=steps, saver=saver, save_at_end=True, start=run_state(2, 4))
        rig.trainer.version = PolicyVersion(2)
        rig.generator.version = PolicyVersion(1)
        await rig.run()
    assert [folder.name for folder in step_folders(there)] == ["step-000002"]
    assert f"nothing is left to train: the snapshot is of step 2, and {steps} steps" in caplog.text


async def test_snapshot_waits_for_the_model_folder_of_an_earlier_step(
    open_rig: Callable[..., Awaitable[Any]], tmp_path: Path, model_folder: Path
) -> None:
    template = tmp_path / "template"
    shutil.copytree(model_folder, template)
    gate = template / "merges.txt"
    os.mkfifo(gate)  # the writer stops there, in mid-folder, until it is fed
    there = tmp_path / "checkpoints"
    opening = Saver.open(mode=AsyncMode.ASYNC, checkpoints_dir=there, template_dir=template)
    async with await opening as saver:
        rig = await open_rig(steps=4, saver=saver, save_steps=2, snapshot_steps=3)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(rig.run())
            await rig.trainer.until_entered(3)
            await asyncio.to_thread(gate.write_text, "merges")
            gate.unlink()
            await running
        await rig.snapshots.ready()
        found = newest_snapshot(rig.run_dir / "snapshots")
    assert found is not None
    assert (found.state.run.step, found.state.run.saved) == (3, False)
    assert is_good(there / "step-000002")
    snapshot, folder = found.tensors.stat(), (there / "step-000002" / "manifest.json").stat()
    assert snapshot.st_mtime_ns > folder.st_mtime_ns


@pytest.mark.invariant("I04")
async def test_snapshot_of_a_step_comes_after_its_record_with_its_evaluation(
    open_rig: Callable[..., Awaitable[Any]],
) -> None:
    rig = await open_rig(steps=3, eta=1, valid=["1+1="], eval_steps=2, snapshot_steps=1)
    rig.trainer.hold[3] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rig.run())
        await rig.trainer.until_entered(3)
        # Step 2 is being evaluated, which is settled with the next publication; its snapshot was
        # begun when the one of step 1 was on disk.
        found = newest_snapshot(rig.run_dir / "snapshots")
        assert found is not None
        assert found.state.run.step == 1
        assert [r.step for r in rig.records()][-1:] == [1]
        rig.trainer.hold[3].set()
        await running
    await rig.snapshots.ready()
    found = newest_snapshot(rig.run_dir / "snapshots")
    assert found is not None
    assert found.state.run.step == 3
    assert found.state.run.open_groups == ()
    assert "eval/reward_mean" in rig.records()[1].metrics


@pytest.mark.invariant("I02")
@pytest.mark.invariant("I04")
@pytest.mark.parametrize("eta", [0, 1, 3])
async def test_groups_of_the_surviving_line_add_up_over_a_failure(
    open_rig: Callable[..., Awaitable[Any]], eta: int
) -> None:
    options = {"steps": 6, "g": 2, "eta": eta, "snapshot_steps": 2}
    rig = await open_rig(**options)
    rig.trainer.fail[6] = TrainingError("the machine burns")
    with pytest.raises(TrainingError):
        await rig.run()
    await rig.snapshots.ready()
    begun = go_on(rig.run_dir, rig.ledger)
    assert begun.state is not None
    assert begun.state.step == 4
    resumed = await open_rig(**options, start=begun.state, again=rig)
    resumed.trainer.version = PolicyVersion(4)
    resumed.generator.version = PolicyVersion(3)
    await resumed.run()
    rows = resumed.groups()
    assert [row.group_id for row in rows] == list(range(12))
    assert sorted(row.step for row in rows) == [s for s in range(1, 7) for _ in range(2)]
    records = resumed.records()
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert sum(r.metrics["groups/admitted_count"] for r in records) == 12
