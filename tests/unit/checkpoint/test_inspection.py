"""What a run has saved is listed as it lies there, and each damaged file is found by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from offbeat.checkpoint.folders import point_latest, set_aside, step_folder
from offbeat.checkpoint.inspection import (
    Kind,
    State,
    check_all,
    closing_lines,
    inventory_content,
    inventory_text,
    is_saved_folder,
    list_saved,
    saved_folders,
    verdict_content,
    verdict_line,
)
from offbeat.checkpoint.manifest import SaveManifest
from offbeat.checkpoint.saver import ScheduleState
from offbeat.checkpoint.snapshot import Counts, RunState, SnapshotState
from offbeat.checkpoint.writer import write_hf_folder, write_snapshot
from offbeat.errors import DataError
from offbeat.observe.liveness import held
from offbeat.types import Environment, GroupId, PolicyVersion, WeightUpdate

SaveAt = Callable[[int], Path]

MACHINE = Environment(torch="2.9.1+x", build="", threads=3, processor="", cpu_flags=())


def state_text(step: int) -> str:
    timer = ScheduleState()
    run = RunState(
        step=step,
        version=PolicyVersion(step),
        attempt=1,
        next_group_id=GroupId(9),
        open_groups=(GroupId(7), GroupId(8)),
        lookahead=0,
        counts=Counts(),
        saved=False,
        save=timer,
        evaluate=timer,
        snapshot=timer,
    )
    state = SnapshotState(run=run, optimizer_steps=4 * step, environment=MACHINE)
    return msgspec.json.encode(state).decode()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sums" / "one"


@pytest.fixture
def save_model(run: Path, template: Path, make_weights: Callable[..., WeightUpdate]) -> SaveAt:
    """Save a model folder of a step, as the run's newest."""

    def save(step: int) -> Path:
        folder = step_folder(run / "checkpoints", step)
        manifest = SaveManifest(step=step, version=PolicyVersion(step))
        write_hf_folder(make_weights(step), template, folder, manifest)
        point_latest(folder)
        return folder

    return save


@pytest.fixture
def save_snapshot(run: Path, make_weights: Callable[..., WeightUpdate]) -> SaveAt:
    """Write a snapshot of a step."""

    def save(step: int) -> Path:
        folder = step_folder(run / "snapshots", step)
        manifest = SaveManifest(step=step, version=PolicyVersion(step))
        write_snapshot(make_weights(step), state_text(step), folder, manifest)
        return folder

    return save


def test_models_come_first_and_each_kind_by_step(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    for step in (10, 9):
        save_snapshot(step)
    for step in (4, 2):
        save_model(step)
    found = list_saved(run).folders
    assert [(folder.kind, folder.step) for folder in found] == [
        (Kind.MODEL, 2),
        (Kind.MODEL, 4),
        (Kind.SNAPSHOT, 9),
        (Kind.SNAPSHOT, 10),
    ]
    assert [folder.version for folder in found] == [2, 4, 9, 10]
    assert [folder.path.name for folder in found if folder.is_latest] == ["step-000002"]


def test_sizes_are_those_on_the_disk_and_add_up(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    folders = [save_model(1), save_snapshot(1)]
    sizes = [sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in folders]
    found = list_saved(run)
    assert [folder.nbytes for folder in found.folders] == sizes
    assert found.nbytes == sum(sizes)
    assert "2 folders, " in inventory_text(found)


def test_folders_of_a_superseded_attempt_are_told_from_those_that_count(
    run: Path, save_model: SaveAt
) -> None:
    for step in (1, 2):
        save_model(step)
    set_aside(run / "checkpoints", after_step=1, attempt=3)
    save_model(2)
    found = list_saved(run)
    assert [(f.step, f.attempt, f.is_latest) for f in found.folders] == [
        (1, None, False),
        (2, None, True),
        (2, 3, False),
    ]
    rows = [line.split() for line in inventory_text(found).splitlines() if "step-" in line]
    assert [row[1:3] for row in rows] == [
        ["step-000001", "1"],
        ["step-000002", "latest"],
        ["step-000002.attempt-3", "superseded"],
    ]


def test_what_snapshots_know_of_run_and_machine_is_in_the_long_list(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    save_model(5)
    save_snapshot(5)
    found = list_saved(run)
    assert "2.9.1+x" not in inventory_text(found)
    model, snapshot = [
        line.split() for line in inventory_text(found, long=True).splitlines() if "step-" in line
    ]
    assert snapshot[-4:] == ["20", "2", "3", "2.9.1+x"]
    assert model[-4:] == ["-"] * 4
    content = inventory_content(found)["folders"]
    assert isinstance(content, list)
    assert (content[1]["optimizer_steps"], content[1]["open_groups"]) == (20, 2)


@pytest.mark.parametrize("broken", ["manifest.json", "state.json"])
def test_one_unreadable_folder_hides_no_other_and_says_why(
    run: Path, save_snapshot: SaveAt, broken: str
) -> None:
    save_snapshot(1)
    (save_snapshot(2) / broken).write_text("{")
    found = list_saved(run)
    assert [folder.problem is None for folder in found.folders] == [True, False]
    text = inventory_text(found)
    assert "damaged" in text
    assert f"step-000002: {broken} cannot be read: it is torn, was altered" in text
    assert f"offbeat checkpoint verify {run}" in text


def test_list_has_files_that_are_gone_or_of_another_size_and_reads_none(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    (save_model(1) / "tokenizer.json").unlink()
    (save_snapshot(1) / "trainer.safetensors").write_bytes(b"short")
    same_size = save_model(2) / "model.safetensors"
    same_size.write_bytes(bytes(same_size.stat().st_size))
    text = inventory_text(list_saved(run))
    assert "checkpoints/step-000001: tokenizer.json is missing\n" in text
    assert "snapshots/step-000001: trainer.safetensors has 5 bytes, the manifest says" in text
    assert [f.problem is None for f in list_saved(run).folders] == [False, True, False]


def test_list_shows_which_of_two_folders_of_one_minute_is_the_later(
    run: Path, save_model: SaveAt
) -> None:
    for step, seconds in ((1, 30.0), (2, 31.0)):
        os.utime(save_model(step) / "manifest.json", (seconds, seconds))
    rows = [line for line in inventory_text(list_saved(run)).splitlines() if "step-" in line]
    assert [row[-3:] for row in rows] == [":30", ":31"]


@pytest.mark.parametrize("kind", ["checkpoints", "snapshots"])
def test_lost_manifest_is_damage_in_list_and_check_alike(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt, kind: str
) -> None:
    folder = save_model(1) if kind == "checkpoints" else save_snapshot(1)
    (folder / "manifest.json").unlink()
    assert f"{folder}: manifest.json is missing" in inventory_text(list_saved(run))
    assert is_saved_folder(folder), "verify must find it also when it is named alone"
    (verdict,) = check_all([folder])
    assert (verdict.state, verdict.damage) == (State.DAMAGED, ("manifest.json is missing",))
    point_latest(folder)
    moved = folder.rename(run / "elsewhere")
    folder.symlink_to(moved)
    found = check_all([folder, folder.with_name("latest")])
    assert {verdict.state for verdict in found} == {State.DAMAGED}, "a link is as good a place"


def test_check_ends_with_a_sum_and_a_way_out_for_each_kind_that_is_damaged(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    folders = [save_model(1), save_model(2), save_snapshot(1)]
    assert closing_lines(list(check_all(folders))) == ["all 3 folders are as they were saved"]
    (folders[2] / "state.json").unlink()
    summed, snapshot_way = closing_lines(list(check_all(folders)))
    assert summed == "1 of 3 folders is damaged"
    assert snapshot_way.startswith("damaged snapshot: --resume skips it")
    (folders[0] / "config.json").unlink()
    summed, model_way, _ = closing_lines(list(check_all(folders)))
    assert summed == "2 of 3 folders are damaged"
    assert model_way.startswith("damaged model folder: remove it")


def test_file_that_the_manifest_does_not_know_is_mentioned_and_no_damage(
    run: Path, save_model: SaveAt
) -> None:
    folder = save_model(1)
    (folder / "notes.txt").write_text("mine")
    (verdict,) = check_all([folder])
    assert verdict.state is State.OK
    assert verdict_line(verdict).endswith("; 1 not in the manifest: notes.txt")
    assert verdict_content(verdict)["unknown"] == ["notes.txt"]
    for name in "abc":
        (folder / name).touch()
    (verdict,) = check_all([folder])
    assert verdict_line(verdict).endswith("; 4 not in the manifest: a, b, c, ...")


def test_hidden_leftovers_are_counted_with_how_they_go(run: Path, save_model: SaveAt) -> None:
    folder = save_model(1)
    shutil.copytree(folder, folder.with_name(".step-000002.tmp-77"))
    (run / "checkpoints" / ".latest.tmp-77").symlink_to("step-000001")
    found = list_saved(run)
    assert len(found.folders) == 1
    assert found.hidden_nbytes == found.nbytes
    assert "2 hidden entries" in inventory_text(found)
    assert "--resume of the run removes that" in inventory_text(found)
    with held(run):
        assert "being written" in inventory_text(list_saved(run))


def test_run_that_has_saved_nothing_says_so(run: Path) -> None:
    assert "nothing is saved" in inventory_text(list_saved(run))
    with pytest.raises(DataError, match="neither model folders nor snapshots"):
        saved_folders(run)


def test_untouched_folders_are_ok_with_the_number_of_their_files(
    run: Path, save_model: SaveAt, save_snapshot: SaveAt
) -> None:
    save_model(1)
    save_snapshot(1)
    found = list(check_all(saved_folders(run)))
    assert [(v.state, v.files) for v in found] == [(State.OK, 5), (State.OK, 2)]


def test_each_damaged_file_is_named_with_what_is_wrong(run: Path, save_model: SaveAt) -> None:
    folder = save_model(1)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (verdict,) = check_all([folder])
    assert verdict.state is State.DAMAGED
    assert [what.split()[:2] for what in verdict.damage] == [
        ["config.json", "has"],
        ["model.safetensors", "has"],
        ["tokenizer.json", "is"],
    ]
    line = verdict_line(verdict)
    assert "config.json has 2 bytes, the manifest says" in line
    assert "model.safetensors has xxh3" in line
    assert "tokenizer.json is missing" in line


def test_altered_manifest_is_damage(run: Path, save_model: SaveAt) -> None:
    manifest = save_model(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 2'))
    (verdict,) = check_all(saved_folders(run))
    assert verdict.state is State.DAMAGED
    assert "manifest.json was altered after it was written" in verdict_line(verdict)


def test_model_of_another_program_has_no_manifest_and_is_not_called_good(template: Path) -> None:
    (verdict,) = check_all([template])
    assert verdict.state is State.NO_MANIFEST
    assert "there is no manifest.json to compare with" in verdict_line(verdict)
    assert verdict_content(verdict)["damage"] == [
        "there is no manifest.json to compare with; offbeat has not saved it"
    ]


def test_folder_that_is_pruned_meanwhile_has_no_verdict(run: Path, save_model: SaveAt) -> None:
    for step in (1, 2):
        save_model(step)
    found = saved_folders(run)
    shutil.rmtree(found[0])
    assert [verdict.path for verdict in check_all(found)] == found[1:]
