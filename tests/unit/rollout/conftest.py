"""Watching processes: none may be left behind by a test of this folder, dead or alive."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _children() -> set[str]:
    """The processes of this process whose command is unknown (zombies) or a reward process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and (fields[0] == "Z" or "reward_worker" in command):
            found.add(f"{stat.parent.name} {fields[0]} {command}")
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = _children()
    yield
    assert _children() - before == set()


def _gone_within(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def gone_within() -> Callable[[int, float], bool]:
    """Whether a process has ended, now or within some seconds; learned without polling."""
    return _gone_within
