"""The table of mutations is true: every invariant has one, and each finds what it switches off."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]


def mutations() -> list[Any]:
    script = runpy.run_path(str(REPO / "tests" / "mutate.py"))
    found: list[Any] = script["read"](script["TABLE"])
    return found


def test_every_invariant_has_a_mutation() -> None:
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    claimed = set(re.findall(r"^\| (I\d\d) \|", page, re.MULTILINE))
    assert len(claimed) == 16
    assert {m.invariant for m in mutations()} == claimed


def test_every_mutation_finds_its_text_once_and_its_tests() -> None:
    for m in mutations():
        assert (REPO / m.tests.partition("::")[0]).is_file(), m
        assert m.edits, m
        for file, old, new in m.edits:
            assert (REPO / file).read_text(encoding="utf-8").count(old) == 1, (file, old)
            assert new != old
