"""Data sets of the Hugging Face hub, and folders in its layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from offbeat.data.dataset import load_rows
from offbeat.errors import DataError

TRAIN = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
TEST = [{"prompt": "t", "n": 3}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(rows: list[dict[str, object]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def test_a_saved_table_is_read_from_its_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(TRAIN).save_to_disk(str(tmp_path / "saved"))
    assert list(load_rows(str(tmp_path / "saved"))) == TRAIN
    assert list(load_rows("saved", search_dir=tmp_path, limit=1)) == TRAIN[:1]
    monkeypatch.chdir(tmp_path)
    assert list(load_rows("hub:saved")) == TRAIN
    with pytest.raises(DataError, match=r"holds one table without splits; leave out @test"):
        load_rows("saved@test")


def test_a_split_of_a_saved_dictionary_is_chosen_behind_the_path(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": table(TRAIN), "test": table(TEST)}).save_to_disk(str(saved))
    assert list(load_rows(str(saved))) == TRAIN
    assert list(load_rows(f"{saved}@test")) == TEST
    with pytest.raises(DataError, match=r"no split 'tset'; choose one of train, test by ending"):
        load_rows(f"{saved}@tset")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_folder_of_files_in_the_hub_layout_has_splits_by_their_names(
    tmp_path: Path, suffix: str
) -> None:
    folder = tmp_path / "laid_out"
    folder.mkdir()
    for name, rows in (("validation", TRAIN), ("test", TEST)):
        write = table(rows).to_json if suffix == "jsonl" else getattr(table(rows), f"to_{suffix}")
        write(str(folder / f"{name}.{suffix}"))
    assert list(load_rows(f"{folder}@test")) == TEST
    assert list(load_rows(f"hub:{folder}@validation[:1]")) == TRAIN[:1]
    with pytest.raises(DataError, match=r"several splits; choose one of .*by ending the path in @"):
        load_rows(str(folder))


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("nothing")
    with pytest.raises(DataError, match=r"reading the folder .* as a Hugging Face data set"):
        load_rows(str(tmp_path), key="train_dataset.path")


FAKE_DATASETS = """
def load_dataset(name, config, split):
    return [{"prompt": f"{name} {config} {split} {i}"} for i in range(5)]
"""


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("hub:org/name", "org/name None train 0"),
        ("hub:org/name@test", "org/name None test 0"),
        ("hub:org/name:main@test[:5]", "org/name main test[:5] 0"),
    ],
)
def test_hub_name_configuration_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, first: str
) -> None:
    (tmp_path / "datasets.py").write_text(FAKE_DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets")
    rows = load_rows(path, limit=2)
    assert len(rows) == 2
    assert rows[0]["prompt"] == first


def test_hub_path_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.path: 'hub:@train' names no data set; write hub:"):
        load_rows("hub:@train", key="data.path")


def test_without_network_the_way_to_a_folder_is_named(tmp_path: Path) -> None:
    code = "from offbeat.data.dataset import load_rows\nload_rows('hub:org/name')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "train_dataset.path: loading 'org/name' from the Hugging Face hub" in last
    assert "it cannot be reached" in last
    assert "name a folder or a file instead" in last
