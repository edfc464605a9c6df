"""Whole runs as real processes: a tiny model, a small task, and a handle on what runs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.model.init import init_model

sys.path.append(str(Path(__file__).parent))  # for what the tests of this folder share

TASK = '''
import os
import time
from pathlib import Path

from offbeat.rollout.rlvr import RLVRWorkflow

HERE = Path(__file__).parent


def rows(n=8, length=4, name="train"):
    return [{"prompt": "1" * length + "=", "name": name, "number": i} for i in range(n)]


def rows_of_two_runs():
    """Comes back when a second run has come as far as this."""
    (HERE / f"loading-{os.getpid()}").touch()
    while len(list(HERE.glob("loading-*"))) < 2:
        time.sleep(0.005)
    return rows()


def some_too_long(n=6):
    return [row for i in range(n) for row in rows(1, length=70 if i % 3 == 0 else 4)]


class Marked(RLVRWorkflow):
    """Leaves a file when the first prompt of a data set is asked."""

    async def arun_episode(self, engine, data):
        (HERE / f"asked-{data.columns['name']}").touch()
        return await super().arun_episode(engine, data)


def reward(prompt, completion, prompt_ids, completion_ids, **columns):
    (HERE / "scored").touch()
    return len(set(completion)) / 10


def slow(*texts, **columns):
    time.sleep(0.1)
    return len(set(texts[1])) / 10


def equal(*texts, **columns):
    return 1.0


def length(prompt, completion, prompt_ids, completion_ids, **columns):
    return float(len(completion))


def raising(*texts, **columns):
    raise KeyError("no such answer")


def nothing(*texts, **columns):
    return None


def not_a_number(*texts, **columns):
    return float("nan")


def words(*texts, **columns):
    return "good"


def hanging(*texts, **columns):
    (HERE / "hanging").touch()
    time.sleep(600)


def hanging_in_evaluation(*texts, name, **columns):
    return hanging() if name == "valid" else 0.5


def hanging_once(*texts, **columns):
    try:
        (HERE / "hanging").touch(exist_ok=False)
    except FileExistsError:
        return len(set(texts[1])) / 10
    time.sleep(600)
'''

CONFIG: dict[str, Any] = {
    "experiment_name": "e2e",
    "trial_name": "run",
    "total_train_steps": 2,
    "model": {"path": "model", "max_model_len": 64},
    "train_dataset": {"path": "task:rows", "batch_size": 2},
    "gconfig": {"n_samples": 2, "max_new_tokens": 4},
    "rollout": {"workflow": "task:Marked", "reward_fn": "task:reward", "reward_workers": 1},
    "generator": {"threads": 1},
    "actor": {"threads": 1, "ppo_n_minibatches": 1},
    "saver": {"at_end": False},
}
LONG_ANSWERS = (
    "model.max_model_len=4096",
    "gconfig.max_new_tokens=4000",
    "gconfig.ignore_eos=true",
)
"""Overrides with which the first answers take seconds to write."""

SLOW_STEPS = ("rollout.reward_fn=task:slow", "total_train_steps=100")
"""Overrides with which a step spends nearly all of its time on rewards."""

VALIDATION = "valid_dataset={path: 'task:rows', args: {name: valid, n: 2}}"

START_SECONDS = 50.0
"""Bound of every wait for a run to get somewhere; generous, because machines are shared."""


def _argv(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


class Command:
    """One ``offbeat`` command as a terminal starts it: the leader of its own process group."""

    def __init__(self, folder: Path, arguments: list[str], options: dict[str, Any]) -> None:
        self.folder = folder
        self._stopped: list[int] = []
        self._log = folder / f"output-{time.monotonic_ns()}.txt"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def until(self, what: str, reached: Callable[[], Any]) -> Any:
        """The first true value of ``reached``; fails when the command ends before."""
        deadline = time.monotonic() + START_SECONDS
        while not (value := reached()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"never came to {what}:\n{self.output}"
            time.sleep(0.005)
        return value

    def until_file(self, name: str) -> None:
        """Wait for a file that the task leaves beside the configuration."""
        self.until(name, (self.folder / name).exists)

    def until_text(self, text: str) -> None:
        self.until(repr(text), lambda: text in self.output)

    def workers(self) -> dict[str, int]:
        """Process ids by name: trainer, generator-0, rewards, writer; only those that are there."""
        found = {}
        for pid in _processes():
            argv = _argv(pid)
            if str(self.pid) in argv[3:] and any(a.startswith("offbeat.") for a in argv):
                found[self._name(pid, argv)] = pid
        return found

    def _name(self, pid: int, argv: list[str]) -> str:
        if "offbeat.checkpoint.writer" in argv:
            return "writer"
        # The standard output is the log file that carries the name.
        with suppress(OSError):
            return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
        return f"{pid}"

    def worker(self, name: str) -> int:
        """The process id of a worker, once it is there."""
        pid = self.until(name, lambda: self.workers().get(name))
        assert isinstance(pid, int)
        return pid

    def stop(self, name: str) -> None:
        """Stop a worker as a hung machine would; ``proceed`` wakes it."""
        pid = self.worker(name)
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    def proceed(self) -> None:
        while self._stopped:
            os.kill(self._stopped.pop(), signal.SIGCONT)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the whole foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self, within: float = START_SECONDS) -> int:
        """The exit code. Fails when the command takes longer, or leaves a process behind."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {within:g} s: {self.workers()}\n{self.output}")
        deadline = time.monotonic() + 2
        while (left := self.workers()) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not left, f"left behind {left}:\n{self.output}"
        return code

    def kill_all(self) -> None:
        """For the end of a test, however that went."""
        for pid in self.workers().values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


class Lab:
    """A folder with a model, a task and a configuration, and the commands started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._commands: list[Command] = []

    def start(self, *arguments: str, **options: Any) -> Command:
        """Start ``offbeat arguments``; ``options`` go to the process."""
        command = Command(self.folder, list(arguments), options)
        self._commands.append(command)
        return command

    def train(self, *overrides: str, **options: Any) -> Command:
        return self.start("train", "config.yaml", *overrides, **options)

    def at(self, stage: str, *overrides: str) -> Command:
        """A run that has come to ``stage`` and stays there for seconds at least.

        In ``update`` (of step 1) and ``save`` (of step 4, the second one) the worker that should
        do it is stopped; ``proceed`` wakes it.
        """
        return getattr(self, f"_at_{stage}")(overrides)

    def _at_start(self, overrides: tuple[str, ...]) -> Command:
        run = self.train(*overrides)
        run.worker("trainer")
        return run

    def _at_generation(self, overrides: tuple[str, ...]) -> Command:
        run = self.train(*LONG_ANSWERS, *overrides)
        run.until_file("asked-train")
        return run

    def _at_reward(self, overrides: tuple[str, ...]) -> Command:
        run = self.train("rollout.reward_fn=task:hanging", *overrides)
        run.until_file("hanging")
        return run

    def _at_evaluation(self, overrides: tuple[str, ...]) -> Command:
        run = self.train(VALIDATION, "rollout.reward_fn=task:hanging_in_evaluation", *overrides)
        run.until_file("hanging")
        return run

    def _at_update(self, overrides: tuple[str, ...]) -> Command:
        run = self.train(*overrides)
        run.until_file("asked-train")
        run.stop("trainer")
        run.until_file("scored")
        return run

    def _at_save(self, overrides: tuple[str, ...]) -> Command:
        # The save of step 2 has long been finished when step 3 is; the one of step 4 hangs.
        run = self.train("saver.freq_steps=2", *SLOW_STEPS, *overrides)
        run.until_text("3/100")
        run.stop("writer")
        run.until("step 4", lambda: self.groups("trained") == 8)
        return run

    def close(self) -> None:
        for command in self._commands:
            command.kill_all()

    def run_dir(self, trial: str = "run") -> Path:
        return self.folder / "runs" / "e2e" / trial

    def summary(self, trial: str = "run") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir(trial) / "summary.json").read_text())
        return found

    def metrics(self, trial: str = "run") -> list[dict[str, Any]]:
        lines = (self.run_dir(trial) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def groups(self, fate: str, trial: str = "run") -> int:
        """How many groups of the ledger ended as ``fate``; 0 while there is no ledger yet."""
        file = self.run_dir(trial) / "run.db"
        query = "SELECT count(*) FROM groups WHERE fate = ?"
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as ledger,
        ):
            return int(ledger.execute(query, (fate,)).fetchone()[0])
        return 0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four thousand parameters with room for long answers."""
    folder = tmp_path_factory.mktemp("e2e") / "model"
    init_model(folder, layers=1, hidden=16, intermediate=32, heads=2, kv_heads=2, max_len=4096)
    return folder


@pytest.fixture
def lab(tiny_model: Path, tmp_path: Path) -> Iterator[Lab]:
    """A folder to train in; at the end nothing that was started in it is left."""
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    lab = Lab(tmp_path)
    try:
        yield lab
    finally:
        lab.close()
