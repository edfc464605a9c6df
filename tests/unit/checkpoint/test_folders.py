"""A visible step folder is complete; the last good one stays, whatever is pruned or killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offbeat.checkpoint.folders import (
    latest,
    point_latest,
    prune,
    replacing,
    set_aside,
    step_folder,
    step_folders,
    sweep,
)
from offbeat.checkpoint.manifest import SaveManifest, is_good, seal
from offbeat.types import PolicyVersion


def make(directory: Path, step: int, content: str = "x") -> Path:
    folder = step_folder(directory, step)
    with replacing(folder) as aside:
        (aside / "file").write_text(content)
        seal(aside, SaveManifest(step=step, version=PolicyVersion(step)), known={})
    return folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_folder_appears_only_when_its_block_has_ended(tmp_path: Path) -> None:
    with replacing(step_folder(tmp_path, 1)) as aside:
        (aside / "file").write_text("x")
        assert step_folders(tmp_path) == []
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.invariant("I11")
def test_everything_in_a_folder_is_flushed_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, fsync = step_folder(tmp_path, 1), os.fsync
    was_there: dict[str, bool] = {}

    def watched(fd: int) -> None:
        was_there[Path(os.readlink(f"/proc/self/fd/{fd}")).name] = final.exists()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    with replacing(final) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("x")
    assert was_there == {"file": False, "inner": False, aside.name: False, tmp_path.name: True}


def test_block_that_raises_leaves_the_previous_folder_and_nothing_else(tmp_path: Path) -> None:
    folder = make(tmp_path, 1, "old")
    with pytest.raises(IsADirectoryError), replacing(folder) as aside:
        aside.write_text("no folder takes text")
    assert names(tmp_path) == ["step-000001"]
    assert (folder / "file").read_text() == "old"


def test_folder_of_a_superseded_attempt_is_replaced(tmp_path: Path) -> None:
    make(tmp_path, 1, "old")
    folder = make(tmp_path, 1, "new")
    assert (folder / "file").read_text() == "new"
    assert names(tmp_path) == ["step-000001"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        make(tmp_path, step)
    found = [folder.name for folder in step_folders(tmp_path)]
    assert found == ["step-1000000", "step-999999", "step-000005"]


def test_latest_is_what_the_link_names_else_the_newest_that_verifies(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    one, two, three = (make(tmp_path, step) for step in (1, 2, 3))
    (three / "file").write_text("altered")
    assert latest(tmp_path) == two
    point_latest(one)
    assert latest(tmp_path) == one
    assert (tmp_path / "latest").resolve() == one.resolve()
    point_latest(two)
    assert latest(tmp_path) == two


def test_prune_keeps_the_newest_ones(tmp_path: Path) -> None:
    folders = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    point_latest(folders[-1])
    assert prune(tmp_path, None) == []
    assert prune(tmp_path, 2) == [folders[1], folders[0]]
    assert names(tmp_path) == ["latest", "step-000003", "step-000004"]


def test_prune_keeps_the_multiples_beside_the_newest(tmp_path: Path) -> None:
    folders = [make(tmp_path, step) for step in (2, 4, 6, 8, 10, 12)]
    point_latest(folders[-1])
    assert prune(tmp_path, 2, keep_every=4) == [folders[2], folders[0]]
    assert prune(tmp_path, 1, keep_every=4) == [folders[4]]
    assert names(tmp_path) == ["latest", "step-000004", "step-000008", "step-000012"]


def test_prune_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(there, step)
    archived = tmp_path / "archive"
    step_folder(there, 1).rename(archived)
    step_folder(there, 1).symlink_to(archived)
    assert prune(there, 2) == [step_folder(there, 1)]
    assert is_good(archived)
    assert sorted(path.name for path in there.iterdir()) == ["step-000002", "step-000003"]


def test_prune_never_removes_the_only_good_one_nor_the_target_of_latest(tmp_path: Path) -> None:
    folders = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    for broken in folders[2:]:
        (broken / "file").unlink()
    point_latest(folders[0])
    assert prune(tmp_path, 1) == [folders[2]]
    assert is_good(folders[0])
    assert is_good(folders[1])


def test_keeping_less_than_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        prune(tmp_path, 0)
    with pytest.raises(ValueError, match="keep_every must be at least 1"):
        prune(tmp_path, 1, keep_every=0)


def test_sweep_brings_back_an_old_folder_and_removes_what_was_in_progress(tmp_path: Path) -> None:
    make(tmp_path, 1).rename(tmp_path / ".step-000001.old-77")
    make(tmp_path, 2).rename(tmp_path / ".step-000002.old-77")
    make(tmp_path, 2)
    (tmp_path / ".step-000003.tmp-77").mkdir()
    (tmp_path / ".latest.tmp-77").symlink_to("step-000009")
    sweep(tmp_path)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert is_good(step_folder(tmp_path, 1))


def test_folders_of_later_steps_are_set_aside_under_their_attempt(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        point_latest(make(tmp_path, step))
    moved = set_aside(tmp_path, after_step=1, attempt=1)
    left = ["latest", "step-000001", "step-000002.attempt-1", "step-000003.attempt-1"]
    assert names(tmp_path) == left
    assert [path.name for path in moved] == ["step-000003.attempt-1", "step-000002.attempt-1"]
    assert latest(tmp_path) == step_folder(tmp_path, 1)
    assert (tmp_path / "latest").readlink() == Path("step-000001")
    assert set_aside(tmp_path, after_step=1, attempt=1) == []
    assert prune(tmp_path, 1) == []


def test_latest_goes_with_the_last_folder_that_it_could_name(tmp_path: Path) -> None:
    point_latest(make(tmp_path, 2))
    set_aside(tmp_path, after_step=0, attempt=3)
    assert names(tmp_path) == ["step-000002.attempt-3"]
    assert set_aside(tmp_path / "absent", after_step=0, attempt=3) == []
