"""Declared metrics and the code that emits them say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import offbeat
from offbeat.observe.metrics import (
    METRICS,
    PROX_APPROXIMATIONS,
    PROX_MEASURES,
    dropped_name,
    no_signal_name,
    prox_name,
)
from offbeat.types import DropReason, NoSignal

EMITTERS = ("train", "pipeline")
NAME = re.compile(r"[a-z]+/[a-z0-9_]+")


def emitted_names() -> set[str]:
    root = Path(offbeat.__file__).parent
    files = [path for room in EMITTERS for path in sorted((root / room).rglob("*.py"))]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    text = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    names = {value for value in text if NAME.fullmatch(value)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    # Names made of parts are emitted through the function that makes them.
    if dropped_name.__name__ in called:
        names |= {dropped_name(reason) for reason in DropReason}
    if no_signal_name.__name__ in called:
        names |= {no_signal_name(cause) for cause in NoSignal}
    if prox_name.__name__ in called:
        names |= {prox_name(a, m) for a in PROX_APPROXIMATIONS for m in PROX_MEASURES}
    return names


def test_every_declared_metric_is_emitted_somewhere() -> None:
    assert sorted(METRICS.keys() - emitted_names()) == []


def test_every_emitted_metric_is_declared() -> None:
    assert sorted(emitted_names() - METRICS.keys()) == []
