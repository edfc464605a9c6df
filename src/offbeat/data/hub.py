"""Data sets of the Hugging Face hub, and folders in its layouts, through the package ``datasets``.

Owns the choice of a split; knows nothing of columns. Only ``read_hub`` touches the network.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from offbeat.data.extras import import_extra
from offbeat.data.rows import Row
from offbeat.errors import DataError, boundary

if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_SPLIT = "train"


def read_hub(
    name: str, config: str | None, split: str | None, limit: int | None, *, key: str
) -> list[Row]:
    """The first ``limit`` rows, or all, of one split of a data set of the hub.

    Args:
        name: ``owner/name``.
        config: one of its configurations; None: it has only one.
        split: as in ``datasets.load_dataset``, slices too; None: ``train``.
        limit: how many rows; None: all.
        key: configuration path, for error messages.

    Raises:
        DataError: no such data set, configuration or split, or no network.
    """
    what = f"{key}: loading {name!r} from the Hugging Face hub"
    datasets = import_extra("datasets", "hub", what)
    with boundary(DataError, what):
        try:
            table = datasets.load_dataset(name, config, split=split or DEFAULT_SPLIT)
        except ConnectionError as exc:
            raise DataError(
                f"{what}: it cannot be reached ({exc}); where there is no network, name a folder "
                "or a file instead, for example one made with save_to_disk"
            ) from exc
        return _rows(table, limit)


def read_folder(
    folder: Path, config: str | None, split: str | None, limit: int | None, *, key: str
) -> list[Row]:
    """The first ``limit`` rows, or all, of one split of a folder.

    The folder was written by ``save_to_disk``, or holds files as a data set of the hub does:
    ``train.jsonl``, ``data/test-00000-of-00001.parquet`` and so on.

    Args:
        folder: the folder.
        config: one of the configurations that its README.md declares; None: it has only one.
        split: name of the split; None: the only one, or ``train``.
        limit: how many rows; None: all.
        key: configuration path, for error messages.

    Raises:
        DataError: no rows in this layout, or no such split.
    """
    what = f"{key}: reading the folder {folder} as a Hugging Face data set"
    datasets = import_extra("datasets", "hub", what)
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    with boundary(DataError, what):
        if saved:
            table = _saved(datasets, folder, split, what)
        else:
            name, bracket, part = (split or "").partition("[")
            names = datasets.get_dataset_split_names(str(folder), config)
            chosen = _split(names, name or None, what) + bracket + part
            table = datasets.load_dataset(str(folder), config, split=chosen)
        return _rows(table, limit)


def _saved(datasets: ModuleType, folder: Path, split: str | None, what: str) -> Dataset:
    """One split of what ``save_to_disk`` wrote: several under their names, or one without any."""
    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        return loaded[_split(list(loaded), split, what)]
    if split is not None:
        raise DataError(f"{what}: it holds one table without splits; leave out @{split}")
    return loaded


def _split(names: list[str], asked: str | None, what: str) -> str:
    if asked is None and (len(names) == 1 or DEFAULT_SPLIT in names):
        return names[0] if len(names) == 1 else DEFAULT_SPLIT
    if asked is None or asked not in names:
        wrong = "it has several splits" if asked is None else f"it has no split {asked!r}"
        raise DataError(
            f"{what}: {wrong}; choose one of {', '.join(names)} by ending the path in @{names[0]}"
        )
    return asked


def _rows(table: Dataset, limit: int | None) -> list[Row]:
    count = len(table) if limit is None else min(limit, len(table))
    return [dict(table[index]) for index in range(count)]
