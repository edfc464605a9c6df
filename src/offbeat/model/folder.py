"""Write a model folder whole or not at all.

Owns the move from a folder under construction to its final name; does not know what is in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import ModelError, boundary


@contextmanager
def new_folder(out_dir: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes ``out_dir`` when the block ends without an error.

    A failure inside the block leaves ``out_dir`` as it was. With ``overwrite`` the whole former
    folder goes, so it must be a model folder (have a ``config.json``): ``--out .`` never deletes
    somebody's work.

    Raises:
        ModelError: ``out_dir`` is a file, a non-empty folder that may not be replaced, or cannot be
            created.
    """
    out_dir = out_dir.expanduser().absolute()
    _check_replaceable(out_dir, overwrite)
    with boundary(ModelError, f"creating {out_dir}"):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        building = aside / "new"
        building.mkdir()
        yield building
        if out_dir.exists():
            os.replace(out_dir, aside / "old")
        os.replace(building, out_dir)
    finally:
        shutil.rmtree(aside)


def _check_replaceable(out_dir: Path, overwrite: bool) -> None:
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise ModelError(f"{out_dir} exists and is not a folder")
    if not any(out_dir.iterdir()):
        return
    if not overwrite:
        raise ModelError(
            f"{out_dir} exists and is not empty; choose another folder, or replace the model in it "
            "with --overwrite"
        )
    if not (out_dir / "config.json").is_file():
        raise ModelError(
            f"{out_dir} is not a model folder (no config.json), so it is not overwritten; "
            "choose another folder"
        )
