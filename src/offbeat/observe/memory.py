"""Peak memory of this process and all it started, from /proc.

Owns nothing but the reading; where there is no /proc (not Linux) only this process is known.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def _children(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:  # the thread or the process ended while we looked
            continue


def process_tree(pid: int) -> Iterator[int]:
    """``pid`` and its descendants at this moment."""
    yield pid
    for child in _children(pid):
        yield from process_tree(child)


def _peak(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    return int(found.split()[1]) * 1024 if found else None


def process_tree_peaks() -> dict[int, int]:
    """Largest resident memory so far, bytes, of this process and its descendants, by process id.

    Pages that processes share count in each of them.
    """
    peaks = {pid: peak for pid in process_tree(os.getpid()) if (peak := _peak(pid)) is not None}
    if not peaks:
        peaks[os.getpid()] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peaks
