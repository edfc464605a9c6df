"""``mode`` chooses defaults, and only ``config/`` reads it: there is one loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import offbeat

PACKAGE = Path(offbeat.__file__).parent

OTHERS = {
    ("pipeline/run.py", "_saver", "self.cfg.saver.mode"),
    ("pipeline/run.py", "from_config", "cfg.recover.mode"),
    ("observe/trackers/wandb.py", "__init__", "section.mode"),
}
"""The attributes of that name outside ``config/`` are other sections'."""


def functions(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every function with its name, and the module itself."""
    yield "", tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


def reads_of_mode(source: str) -> Iterator[tuple[str, str]]:
    """(innermost function, expression) of everything that could read an attribute ``mode``."""
    found: dict[ast.AST, str] = {}
    for name, function in functions(ast.parse(source)):
        found |= dict.fromkeys(ast.walk(function), name)
    for node, name in found.items():
        if isinstance(node, ast.Attribute) and node.attr == "mode":
            yield name, ast.unparse(node)
        if isinstance(node, ast.Constant) and node.value == "mode":
            yield name, "'mode'"
        if isinstance(node, ast.Name | ast.alias):
            imported = node.id if isinstance(node, ast.Name) else node.name
            if imported in ("RunMode", "MODE_PRESETS"):
                yield name, imported


def modules() -> list[Path]:
    return [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE / "config"]


def test_nothing_outside_config_reads_mode() -> None:
    found = {
        (module.relative_to(PACKAGE).as_posix(), *read)
        for module in modules()
        for read in reads_of_mode(module.read_text(encoding="utf-8"))
    }
    assert found == OTHERS


def test_the_search_finds_every_way_to_read_it() -> None:
    source = """
from offbeat.config.presets import RunMode
async def step(cfg, other):
    if cfg.mode is RunMode.SYNC:
        return getattr(other.cfg, "mode")
"""
    assert sorted(reads_of_mode(source)) == [
        ("", "RunMode"),
        ("step", "'mode'"),
        ("step", "RunMode"),
        ("step", "cfg.mode"),
    ]
