"""Claims about which run a person means."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.observe.find import find_run

MakeRun = Callable[..., Path]


@pytest.mark.parametrize(
    "asked", ["exp/b", "exp", "b", "latest", "{root}", "{root}/exp", "{root}/exp/b"]
)
def test_newest_run_is_found_by_path_parent_name_and_latest(
    tmp_path: Path, make_run: MakeRun, asked: str
) -> None:
    make_run(tmp_path / "exp" / "a", changed_at=1000.0)
    newest = make_run(tmp_path / "exp" / "b", changed_at=2000.0)
    assert find_run(asked.format(root=tmp_path), tmp_path) == newest


def test_older_run_is_found_by_its_own_path(tmp_path: Path, make_run: MakeRun) -> None:
    older = make_run(tmp_path / "exp" / "a", changed_at=1000.0)
    make_run(tmp_path / "exp" / "b", changed_at=2000.0)
    assert find_run(str(older), tmp_path) == older


def test_newest_of_two_trials_of_one_name_is_found_by_it(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "one" / "trial", changed_at=1000.0)
    newest = make_run(tmp_path / "two" / "trial", changed_at=2000.0)
    assert find_run("trial", tmp_path) == newest


def test_folder_without_a_run_does_not_hide_the_run_of_its_name(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    run = make_run(tmp_path / "runs" / "models" / "a")
    monkeypatch.chdir(tmp_path)
    assert find_run("models").resolve() == run


def test_missing_folder_and_folder_without_a_run_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder nowhere nor .*nowhere; no run lies"):
        find_run("nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: not a run.*metrics\.jsonl.*run\.db"):
        find_run("empty", tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        find_run("latest", tmp_path / "none")


def test_unknown_run_is_answered_with_the_newest_ones_there_are(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for i in range(7):
        make_run(tmp_path / "exp" / f"t{i}", changed_at=1000.0 + i)
    with pytest.raises(DataError) as raised:
        find_run("typo", tmp_path)
    newest = "exp/t6, exp/t5, exp/t4, exp/t3, exp/t2"
    assert f"the newest runs are {newest}; offbeat runs lists all" in str(raised.value)
