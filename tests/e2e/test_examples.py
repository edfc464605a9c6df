"""The examples run as their texts say, shortened to a few steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 2

NOTEBOOK = """
import asyncio, re, sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from offbeat.errors import OffbeatError

async def notebook(cells):
    '''Run cells as Jupyter does: one after the other, in an event loop that runs already.'''
    names = {"__name__": "__main__"}
    for cell in cells:
        try:
            waiting = eval(compile(cell, "cell", "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        except OffbeatError as error:
            print("refused:", error)
        else:
            await (waiting or asyncio.sleep(0))

asyncio.run(notebook(re.split("(?m)^# %%.*$", sys.stdin.read())))
"""


def finish(argv: list[str], cwd: Path, **options: str) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=55, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def short_notebook() -> str:
    text = (EXAMPLES / "notebook_style.py").read_text()
    short, replaced = re.subn(r'"total_train_steps": \d+', f'"total_train_steps": {STEPS}', text)
    assert replaced == 1
    return short


@pytest.mark.slow
def test_the_notebook_runs_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(short_notebook())
    output = finish([sys.executable, "notebook.py"], tmp_path)
    assert re.search(r"mean reward 0\.\d\d at the start", output)


@pytest.mark.slow
def test_in_a_notebook_run_names_arun_which_can_be_awaited_there(tmp_path: Path) -> None:
    cells = short_notebook()
    (told,) = re.findall(r"^# (summary = await .*)$", cells, re.MULTILINE)
    wrong = "summary = trainer.run()"
    assert cells.count(wrong) == 1
    output = finish(
        [sys.executable, "-c", NOTEBOOK],
        tmp_path,
        input=cells.replace(wrong, f"{wrong}\n# %%\n{told}"),
    )
    assert "refused: PPOTrainer.run() was called where an event loop is running" in output
    assert "`await trainer.arun()`" in output
    assert re.search(r"mean reward 0\.\d\d at the start", output)


def commands(example: str) -> list[list[str]]:
    """The ``offbeat`` commands of an example's README, in order, without the word ``offbeat``."""
    (block,) = re.findall(r"```sh\n(.*?)```", (EXAMPLES / example / "README.md").read_text(), re.S)
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("offbeat ")]


def run_readme(example: str, folder: Path) -> dict[str, object]:
    """Run the commands of the README in a copy of the example; the summary of its run."""
    shutil.copytree(EXAMPLES / example, folder, dirs_exist_ok=True)
    for arguments in commands(example):
        short = [f"total_train_steps={STEPS}"] if arguments[0] == "train" else []
        finish([sys.executable, "-m", "offbeat", *arguments, *short], folder)
    (summary,) = folder.glob(f"runs/{example}/*/summary.json")
    found: dict[str, object] = json.loads(summary.read_text())
    return found


@pytest.mark.slow
def test_the_two_turn_tool_trains_on_both_turns(tmp_path: Path) -> None:
    summary = run_readme("two_turn_tool", tmp_path)
    assert summary["status"] == "completed"
    (metrics,) = tmp_path.glob("runs/two_turn_tool/*/metrics.jsonl")
    for line in metrics.read_text().splitlines():
        step = json.loads(line)
        assert step["reward/valid_fraction"] == 1
        assert {"reward_part/call", "reward_part/answer"} <= step.keys()
        # What the model wrote in both turns, and nothing of what the calculator added.
        assert step["actor/tokens_count"] <= step["actor/rows_count"] * 4
        assert step["actor/tokens_count"] > step["actor/rows_count"] * 2


@contextmanager
def serving(folder: Path, port: int) -> Iterator[None]:
    """The example's server, once it listens."""
    argv = [sys.executable, "server.py", "--port", str(port)]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 30
            while True:
                with suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield
        finally:
            server.terminate()


@pytest.mark.slow
def test_the_http_reward_is_asked_for_every_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setitem(os.environ, "REWARD_URL", f"http://127.0.0.1:{port}/score")
    with serving(EXAMPLES / "http_reward", port):
        summary = run_readme("http_reward", tmp_path)
    assert summary["status"] == "completed"
    assert 0 < summary["reward"]["first"] < 1


def test_every_example_is_in_the_list() -> None:
    listed = re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text())
    there = {p.name for p in EXAMPLES.iterdir() if p.name != "README.md"}
    assert {name.rstrip("/") for name in listed} == there
