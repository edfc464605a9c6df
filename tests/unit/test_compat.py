"""AReaL's names: all resolve, and what is missing says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.compat import areal

PAIRS = [(module, name) for module, names in areal.NAMES.items() for name in names]
MISSING = [(module, name) for module, names in areal.LATER.items() for name in names]


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "offbeat.compat.areal", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=folder)


def test_every_name_of_the_table_resolves_to_ours(tmp_path: Path) -> None:
    imports = "\n".join(
        f"from {module} import {name}; print({name}.__module__)" for module, name in PAIRS
    )
    done = run(imports, tmp_path)
    assert done.returncode == 0, done.stderr
    homes = done.stdout.split()
    assert len(homes) == len(PAIRS)
    assert all(home.startswith("offbeat.") for home in homes)


@pytest.mark.parametrize(("module", "name"), MISSING)
def test_a_name_that_comes_later_says_what_there_is(module: str, name: str, tmp_path: Path) -> None:
    done = run(f"from {module} import {name}", tmp_path)
    assert done.returncode == 1
    assert f"ImportError: {module}.{name}: offbeat has no" in done.stderr


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from areal.utils.saver import Evaluator",
            "areal.utils.saver.Evaluator; it provides Saver",
        ),
        ("import areal.engine.fsdp_engine", "does not provide the module areal.engine.fsdp_engine"),
        ("from areal.api import nothing", "areal.api.nothing; it has no names of its own"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(statement: str, message: str, tmp_path: Path) -> None:
    done = run(statement, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_script_is_main_and_gets_its_arguments_and_neighbors(tmp_path: Path) -> None:
    (tmp_path / "neighbor.py").write_text("VALUE = 7\n")
    code = "import sys, neighbor\nprint(__name__, sys.argv[1:], neighbor.VALUE)"
    assert run(code, tmp_path, "--x", "1").stdout == "__main__ ['--x', '1'] 7\n"


def test_a_script_may_await_at_its_top_level(tmp_path: Path) -> None:
    code = "import asyncio\nprint(await asyncio.sleep(0, 'slept'))"
    assert run(code, tmp_path).stdout == "slept\n"


def test_an_areal_that_is_installed_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "areal").mkdir()
    (tmp_path / "areal" / "__init__.py").write_text("")
    done = run("", tmp_path)
    assert done.returncode == 1
    assert "AReaL is installed" in done.stderr


def test_a_script_that_is_not_there_is_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offbeat.compat.areal", "absent.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: there is no script absent.py\n")


def test_without_a_script_the_usage_is_shown() -> None:
    command = [sys.executable, "-m", "offbeat.compat.areal"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr.startswith("usage: python -m offbeat.compat.areal")) == (
        1,
        True,
    )
