"""A reward function that fails on demand; it is added to those of a run under faults.

Owns the order in a file that makes its next call fail; knows neither run nor schedule. Without an
order the value is 0.0, so that the sum of the run's rewards stays what it was.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path

NAME = "poison"
FUNCTION = f"{__name__}:{NAME}"

HANG_SECONDS = 3600.0
"""Longer than any deadline of a reward call."""

EXIT_CODE = 7


class Poison(StrEnum):
    """What the next call does."""

    RAISE = "raise"
    NAN = "nan"
    HANG = "hang"
    EXIT = "exit"


def order(poison_dir: Path, kind: Poison) -> None:
    """Have the next call do ``kind``; an order that nobody has taken yet is replaced."""
    aside = poison_dir / f".{kind}"
    aside.write_text(kind)
    aside.replace(poison_dir / "next")


def poison(
    prompt: str, completion: str, prompt_ids: object, completion_ids: object, *, poison_dir: str
) -> float:
    """0.0, or what was ordered in ``poison_dir``; of several processes one takes an order."""
    taken = Path(poison_dir) / f"taken-{os.getpid()}"
    try:
        (taken.parent / "next").rename(taken)
    except FileNotFoundError:
        return 0.0
    return _act(Poison(taken.read_text()))


def _act(kind: Poison) -> float:
    if kind is Poison.RAISE:
        raise RuntimeError("poisoned: this call was to raise")
    if kind is Poison.EXIT:
        os._exit(EXIT_CODE)
    if kind is Poison.HANG:
        time.sleep(HANG_SECONDS)
    return float("nan")
