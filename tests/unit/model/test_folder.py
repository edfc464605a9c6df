"""A model folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import ModelError
from offbeat.model.folder import new_folder


def test_failure_leaves_the_old_folder_and_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "config.json").write_text("old")

    def fail() -> None:
        with new_folder(target, overwrite=True) as folder:
            (folder / "config.json").write_text("new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert (target / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_folder_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "m"
    with new_folder(target, overwrite=False) as folder:
        (folder / "config.json").write_text("new")
        assert not target.exists()
    assert (target / "config.json").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_empty_folder_is_used(tmp_path: Path) -> None:
    with new_folder(tmp_path, overwrite=False) as folder:
        (folder / "a").write_text("")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_folder_that_is_not_a_model_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(ModelError, match="is not a model folder"),
        new_folder(tmp_path, overwrite=True),
    ):
        pytest.fail("entered the block")
    assert (tmp_path / "thesis.tex").exists()


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text("")
    with pytest.raises(ModelError, match="is not a folder"), new_folder(file, overwrite=True):
        pytest.fail("entered the block")
