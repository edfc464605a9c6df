"""Claims about ``offbeat runs`` and ``offbeat show``: every view as text and as JSON."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigError, DataError
from offbeat.observe.ledger import TokenTotals
from offbeat.observe.liveness import held
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import RolloutLog
from offbeat.observe.sinks import JsonlSink
from offbeat.observe.summary import RunStatus, RunTotals
from offbeat.pipeline.ledger import Ledger, TrainedGroup
from offbeat.types import (
    Completion,
    DropReason,
    GroupId,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    Scored,
    StopReason,
    Turn,
)

Show = Callable[..., str]


def records(steps: int, top: float) -> list[StepRecord]:
    return [
        StepRecord(
            step=i,
            version=i,
            seconds=2.0,
            metrics={
                "reward/mean": top * i / steps,
                "eval/reward_mean": top * i / steps,
                "lag/group_mean": 1.0,
            },
        )
        for i in range(1, steps + 1)
    ]


def write_ledger(path: Path) -> None:
    """Three groups: trained, dropped with a control sequence in its reason, open."""
    with closing(Ledger.open(path, clock=lambda: 1_700_000_000.0)) as ledger:
        for i in range(3):
            ledger.admit(GroupId(i), epoch=0, row=i, admission_version=PolicyVersion(0))
        trained = TrainedGroup(group_id=GroupId(0), generated_tokens=10, trained_tokens=8)
        ledger.step_trained([trained], 1, PolicyVersion(0))
        ledger.dropped(GroupId(1), DropReason.FAILED, "lost\x1b[2J\nit", generated_tokens=4)


def write_rollouts(run: Path, step: int) -> None:
    def rollout(sibling: int) -> Rollout:
        completion = Completion(
            token_ids=np.array([3, 4], dtype=np.int64),
            logprobs=np.array([-0.25, -0.5], dtype=np.float32),
            versions=np.array([0, 1], dtype=np.int64),
            stop_reason=StopReason.STOP,
            text=f"answer {sibling}\x1b[2J",
        )
        turn = Turn(prompt_ids=np.array([1], dtype=np.int64), completion=completion)
        return Rollout(sibling=sibling, turns=(turn,), reward=Scored(value=float(sibling)))

    prompt = Prompt(
        group_id=GroupId(0), epoch=0, row=0, token_ids=np.array([1], dtype=np.int64), text="1+1="
    )
    group = RolloutGroup(
        prompt=prompt,
        rollouts=tuple(rollout(i) for i in range(4)),
        admission_version=PolicyVersion(0),
    )
    RolloutLog(run).write(step, [group], {(GroupId(0), 3): 1.5})


def write_run(run: Path, *, steps: int = 20, top: float = 1.0, rate: float = 1e-3) -> None:
    run.mkdir(parents=True)
    config = {"trial_name": run.name, "model": {"path": "gone"}, "actor": {"lr": rate}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    sink, totals = JsonlSink(run / "metrics.jsonl"), RunTotals(0.0)
    for record in records(steps, top):
        sink.write(record.step, record.flat())
        totals.add_step(record)
    write_ledger(run / "run.db")
    with closing(Ledger.open(run / "run.db")) as ledger:
        tokens = TokenTotals(generated=steps * 100, trained=steps * 90, wasted={})
        summary = totals.summary(
            now=2.0 * steps, status=RunStatus.COMPLETED, groups=ledger.totals(), tokens=tokens
        )
    summary.write(run / "summary.json")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the finished runs ``sums/old`` and ``sums/new``, the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    write_run(tmp_path / "runs" / "sums" / "old", top=0.5, rate=1e-4)
    write_run(tmp_path / "runs" / "sums" / "new", steps=30)
    write_rollouts(tmp_path / "runs" / "sums" / "new", 7)
    os.utime(tmp_path / "runs" / "sums" / "old" / "summary.json", (1e9, 1e9))
    for name in ("config.yaml", "metrics.jsonl", "run.db"):
        os.utime(tmp_path / "runs" / "sums" / "old" / name, (1e9, 1e9))
    return tmp_path


@pytest.fixture
def offbeat(lab: Path) -> Show:
    """``offbeat(ARGUMENTS)``: what a command that goes well prints."""

    def call(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.output
        return done.output

    return call


def parsed(text: str) -> Any:
    return json.loads(text)


# runs


def test_runs_are_listed_the_newest_first_with_what_they_came_to(lab: Path, offbeat: Show) -> None:
    (lab / "runs" / "sums" / "broken").mkdir()
    (lab / "runs" / "sums" / "broken" / "summary.json").write_text("{")
    (lab / "runs" / "sums" / "old" / "run.db").unlink()
    lines = offbeat("runs").splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["run", "sums/broken", "sums/new", "sums/old", "sums/broken:"]
    new = next(line for line in lines if line.startswith("sums/new "))
    assert new.split()[1:6] == ["completed", "30", "0.033", "to", "1.000"]
    assert "unreadable" in lines[1]
    assert "not a run's summary" in lines[-1]
    found = parsed(offbeat("runs", "--json"))
    assert [run["run"] for run in found] == ["sums/broken", "sums/new", "sums/old"]
    assert [run["status"] for run in found] == ["unreadable", "completed", "completed"]
    assert (found[1]["steps"], found[1]["reward_last"], found[1]["problem"]) == (30, 1.0, None)
    assert found[2]["started"] == 1e9


def test_running_and_killed_runs_are_told_apart_in_the_list(lab: Path, offbeat: Show) -> None:
    for name in ("alive", "killed"):
        write_run(lab / "runs" / "more" / name)
        (lab / "runs" / "more" / name / "summary.json").unlink()
    with held(lab / "runs" / "more" / "killed"):
        pass
    with held(lab / "runs" / "more" / "alive"):
        found = {run["run"]: run["status"] for run in parsed(offbeat("runs", "--json"))}
    assert (found["more/alive"], found["more/killed"]) == ("running", "killed")


def test_folder_without_runs_says_how_to_get_one(lab: Path, offbeat: Show) -> None:
    (lab / "empty").mkdir()
    assert "offbeat train makes one" in offbeat("runs", "--fileroot", "empty")
    assert parsed(offbeat("runs", "--fileroot", "empty", "--json")) == []
    with pytest.raises(DataError, match="there is no folder gone; --fileroot"):
        offbeat("runs", "--fileroot", "gone")


# show


def test_charts_fill_the_terminal_and_never_pass_its_edge(
    offbeat: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = offbeat("show", "new").splitlines()
    first = next(line for line in wide if "reward  0.03333 to 1" in line)
    assert "eval  0.03333 to 1" in first
    assert max(map(len, wide)) in range(105, 111)
    assert any("⠉" in line or "⠊" in line or "⡠" in line for line in wide)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = [line for line in offbeat("show", "new").splitlines() if set("│┤└┘┌┐┬") & set(line)]
    assert max(map(len, narrow)) in range(58, 61)


def test_output_without_utf8_is_ascii_charts_included(lab: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for arguments in (["show", "new"], ["show", "new", "--compare", "old"], ["runs"]):
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", *arguments], capture_output=True, env=env, timeout=30
        )
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode("ascii")
    assert "sums/new" in text


def test_chosen_metric_is_the_only_chart(offbeat: Show) -> None:
    text = offbeat("show", "new", "--metric", "lag/group_mean")
    assert "lag/group_mean  1 to 1" in text
    assert "eval  0" not in text
    found = parsed(offbeat("show", "new", "--metric", "lag/group_mean", "--json"))
    assert found["curves"].keys() == {"lag/group_mean"}
    with pytest.raises(DataError, match="no step of this run has the metric 'nope'"):
        offbeat("show", "new", "--metric", "nope")


def test_png_is_written_and_its_failures_are_errors_with_a_way_out(
    lab: Path, offbeat: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    offbeat("show", "new", "--png", "curves.png", "--compare", "old")
    assert (lab / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"gone/curves\.png: cannot be written: No such file"):
        offbeat("show", "new", "--png", "gone/curves.png")
    (lab / "runs" / "sums" / "new" / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no step has anything to draw"):
        offbeat("show", "new", "--png", "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install matplotlib"):
        offbeat("show", "new", "--png", "curves.png")


def test_samples_are_printed_below_the_run_and_down_to_the_token(offbeat: Show) -> None:
    text = offbeat("show", "new", "--samples", "1", "--best", "--tokens")
    assert "step 7  group 0.3  reward 3.000  advantage +1.500" in text
    assert r"answer 3\x1b[2J" in text
    assert "-0.500        1     +1.500" in text
    assert "token texts are not known: there is no tokenizer.json in gone" in text
    found = parsed(
        offbeat("show", "new", "--samples", "2", "--worst", "--step", "7", "--json", "--tokens")
    )
    assert [s["sibling"] for s in found["samples"]] == [0, 1]
    assert [t["version"] for t in found["samples"][0]["tokens"]] == [0, 1]


def test_ledger_adds_up_and_names_reasons_and_open_groups(offbeat: Show) -> None:
    text = offbeat("show", "new", "--ledger")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "admitted 3 generated 14",
        "= trained 1 = trained 8",
        "+ dropped, failed 1 + wasted, failed 4",
        "+ wasted, untrained 2",
        "+ open 1",
        r"failed 1 lost\x1b[2J it",
    ):
        assert line in lines
    opened = next(i for i, line in enumerate(lines) if line.startswith("open group"))
    assert lines[opened + 1].startswith("2 0 2 0 ")
    assert lines[-1].endswith("attempt 1 began")
    found = parsed(offbeat("show", "new", "--ledger", "--json"))
    assert found["groups"]["dropped"]["failed"] == 1
    assert found["tokens"]["wasted"]["untrained"] == 2
    assert found["reasons"] == [{"reason": "failed", "detail": "lost\x1b[2J\nit", "groups": 1}]
    assert [group["group_id"] for group in found["open"]] == [2]


def test_comparison_shows_differing_keys_results_and_both_curves(offbeat: Show) -> None:
    text = offbeat("show", "new", "--compare", "old")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "A: runs/sums/new" in lines
    assert "actor.lr 0.001 0.0001" in lines
    assert "reward last 1 0.5" in lines
    assert "seconds per step 2 2" in lines
    assert "trial_name" not in text
    assert "gone" not in text, "equal keys are left out"
    assert "curves A line, B dots •" in lines
    assert any("•" in line and "│" in line for line in lines)
    found = parsed(offbeat("show", "new", "--compare", "old", "--json"))
    assert found["config"] == {"actor.lr": [0.001, 0.0001]}
    assert found["values"]["steps"] == [30, 20]
    assert [len(curve) for curve in found["curves"]["reward"]] == [30, 20]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "3"], "--step chooses among samples"),
        (["--samples", "1", "--best", "--worst"], "--best and --worst exclude each other"),
        (["--ledger", "--watch"], "--ledger and --watch exclude each other"),
        (["--watch", "--png", "x.png"], "--watch and --png exclude each other"),
    ],
)
def test_options_without_effect_are_refused(lab: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["show", "new", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output


# watch


def test_watching_a_run_that_ended_shows_it_once(offbeat: Show) -> None:
    lines = offbeat("show", "new", "--watch").splitlines()
    assert lines[0].startswith("step 30  reward 1.000")
    assert "completed after 30 steps" in "\n".join(lines)
    step, run = (parsed(line) for line in offbeat("show", "new", "--watch", "--json").splitlines())
    assert (step["step"], run["status"]) == (30, "completed")


def unfinished(lab: Path) -> Path:
    run = lab / "runs" / "sums" / "new"
    (run / "summary.json").unlink()
    return run


def test_watched_run_is_followed_step_by_step_until_it_is_killed(lab: Path) -> None:
    run = unfinished(lab)
    command = [sys.executable, "-u", "-m", "offbeat", "show", "new", "--watch"]
    with held(run):
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("step 30 ")
        JsonlSink(run / "metrics.jsonl").write(31, {"version": 31, "seconds": 1.0})
        assert watching.stdout.readline().startswith("step 31 ")
    rest, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert "killed (its process is gone and wrote no summary) after 31 steps" in rest


def test_ctrl_c_ends_the_watching_with_0_and_leaves_the_run_alone(lab: Path) -> None:
    run = unfinished(lab)
    command = [sys.executable, "-u", "-m", "offbeat", "show", "new", "--watch"]
    with held(run):
        watching = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("step 30 ")
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=20)
    assert (watching.returncode, errors) == (0, "no longer watching; the run goes on\n")


@pytest.mark.parametrize(("rows", "charts"), [("60", True), ("24", False)])
def test_a_terminal_is_redrawn_with_what_fits_its_height(
    lab: Path, rows: str, charts: bool
) -> None:
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": rows}
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat", "show", "new", "--watch"], stdout=follower, env=env
    ) as watching:
        os.close(follower)
        output = bytearray()
        while True:
            try:
                output += os.read(leader, 1 << 16)
            except OSError:  # the watcher has closed its side
                break
        os.close(leader)
    assert watching.returncode == 0
    text = output.decode()
    assert "completed after 30 steps" in text
    assert ("┌──" in text) is charts
