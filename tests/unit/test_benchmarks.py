"""The benchmarks' own arithmetic, their workers, and that each script can be asked for help."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = (
    "engine",
    "train_step",
    "publish",
    "checkpoint",
    "vs_trl",
    "async_vs_sync",
    "staleness",
    "tasks",
)

ECHO = """
import os, sys
sys.path.insert(0, {folder!r})
from measure import serve

def fail():
    raise ValueError("no such luck")

serve({{
    "echo": lambda value: {{"value": value, "threads": os.environ["OMP_NUM_THREADS"]}},
    "talk": lambda: print("a library talks") or {{}},
    "fail": fail,
    "end": lambda: os._exit(3),
}})
"""


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("measure")


@pytest.fixture
def engine(measure: ModuleType) -> ModuleType:
    return import_module("engine")


@pytest.fixture
def echo(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(folder=str(BENCHMARKS)))
    return [sys.executable, str(script)]


def test_spread_is_median_and_extremes_in_the_order_taken(measure: ModuleType) -> None:
    spread = measure.Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.min, spread.max) == (2.5, 1.0, 10.0)
    assert spread.values == (3.0, 1.0, 2.0, 10.0)
    with pytest.raises(ValueError, match="at least one"):
        measure.Spread.of([])


def test_spread_writes_four_digits(measure: ModuleType) -> None:
    assert measure.Spread.of([1 / 3]).as_json() == {
        "median": 0.3333,
        "min": 0.3333,
        "max": 0.3333,
        "values": [0.3333],
    }


def test_ratios_are_taken_within_a_round(measure: ModuleType) -> None:
    spread = measure.ratios([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert spread.values == (2.0, 3.0, 1.0)
    assert spread.median == 2.0
    with pytest.raises(ValueError, match="shorter"):
        measure.ratios([1.0, 2.0], [1.0])


def test_contenders_alternate_and_every_second_round_goes_backwards(measure: ModuleType) -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str, figure: float):
        def run(number: int) -> float:
            order.append((name, number))
            return figure + number

        return run

    figures = measure.alternate({"a": contender("a", 0.0), "b": contender("b", 10.0)}, runs=3)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert figures == {"a": [0.0, 1.0, 2.0], "b": [10.0, 11.0, 12.0]}


def test_result_is_one_json_line_here_and_in_the_file(
    measure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    options = measure.arguments("A test.").parse_args(["--threads", "3", "--out", str(out)])
    record = measure.facts("test", options)
    measure.emit(record, options.out)
    measure.emit(record, options.out)
    printed = capsys.readouterr().out.splitlines()
    assert printed == out.read_text("utf-8").splitlines()
    assert [json.loads(line) for line in printed] == [record, record]
    assert (record["threads"], record["options"]) == (3, {"runs": 5, "threads": 3})
    assert str(tmp_path) not in printed[0]


def test_worker_answers_while_libraries_print(measure: ModuleType, echo: list[str]) -> None:
    with measure.Worker("echo", echo, threads=3) as worker:
        assert worker.call("talk") == {}
        assert worker.call("echo", value=[1]) == {"value": [1], "threads": "3"}


def test_failed_worker_says_why_in_its_own_words(measure: ModuleType, echo: list[str]) -> None:
    with measure.Worker("echo", echo, threads=1) as worker:
        with pytest.raises(measure.WorkerFailed, match="echo: ValueError: no such luck"):
            worker.call("fail")
        with pytest.raises(measure.WorkerFailed, match=r"echo ended: exit code 3(?s:.*)luck"):
            worker.call("end")


def test_prompts_are_equal_within_a_group_and_new_in_every_round(engine: ModuleType) -> None:
    first, second = engine.prompts(64, 0, 1000), engine.prompts(64, 1, 1000)
    assert first == engine.prompts(64, 0, 1000)
    groups = [first[i : i + 8] for i in range(0, 64, 8)]
    assert all(p == group[0] for group in groups for p in group)
    assert len({tuple(p) for p in first + second}) == 16
    assert len(engine.prompts(1, 0, 1000)) == 1


def test_rates_are_compared_with_the_limit_of_their_own_round(engine: ModuleType) -> None:
    figures = {"offbeat": [50.0, 80.0], "peer": [25.0, 20.0], "gemm": [1.0, 2.0]}
    row = engine._row(8, figures, flop_per_token=10_000_000)
    assert row["limit_tokens_per_s"]["values"] == [100.0, 200.0]
    assert row["contenders"]["offbeat"]["fraction_of_limit"]["values"] == [0.5, 0.4]
    assert row["ratio"] == {"offbeat/peer": engine.ratios([50.0, 80.0], [25.0, 20.0]).as_json()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_explains_itself(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--runs" in done.stdout
    assert "--out" in done.stdout
