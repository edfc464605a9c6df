"""``offbeat eval`` as a shell sees it: runs, models and several data sets, without training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Offbeat = Callable[..., "subprocess.CompletedProcess[str]"]

ROWS = ("--data", "one=task:rows", "--data", "two=task:some_too_long")
REWARD = ("--reward", "task:reward")
CHECKPOINTS = (VALID := "valid_dataset={path: 'task:rows', args: {n: 3}}", "saver.freq_steps=1")


@pytest.fixture
def offbeat(lab: Any) -> Offbeat:
    """``offbeat ARGUMENTS`` in the lab, without a network; standard error is no terminal."""
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(lab.folder / "hub")}

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "offbeat", *arguments],
            cwd=lab.folder,
            env={**os.environ, **hub, **environment},
            capture_output=True,
            text=True,
            timeout=50,
        )

    return call


def scores(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_is_scored_on_several_data_sets_as_a_table_and_in_files(
    offbeat: Offbeat, lab: Any
) -> None:
    done = offbeat(
        *("eval", "model", *ROWS, *REWARD, "--samples", "4", "--k", "4,1", "--threshold", "0.3"),
        *("--out", "out/scores.json", "--answers", "out/answers.jsonl", "--limit", "5"),
        *("model.max_model_len=64", "gconfig.max_new_tokens=4"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "model: 4 answers to each prompt, temperature 1, seed 1"
    head = "data set prompts answers avg@4 pass@1 pass@4 length truncated invalid skipped"
    assert " ".join(lines[1].split()) == head
    for line, prompts, skipped in ((lines[2], 5, 0), (lines[3], 3, 2)):
        cells = line.split()
        assert (int(cells[1]), int(cells[2]), int(cells[-1])) == (prompts, 4 * prompts, skipped)

    written = json.loads((lab.folder / "out/scores.json").read_text())
    assert list(written["datasets"]) == ["one", "two"]
    assert written["threshold"] == 0.3
    for found in written["datasets"].values():
        rewards = [r for row in found["rewards"] for r in row["rewards"]]
        assert len(rewards) == found["answers"] == found["valid_rewards"]
        assert found["average"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
        passed = [sum(r >= 0.3 for r in row["rewards"]) for row in found["rewards"]]
        assert found["pass_at_k"]["1"]["mean"] == pytest.approx(sum(passed) / 4 / len(passed))
        assert found["pass_at_k"]["4"]["mean"] == sum(map(bool, passed)) / len(passed)
    answers = [json.loads(x) for x in (lab.folder / "out/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 4 * 8
    for answer in answers:
        assert answer["reward"] == len(set(answer["answer"])) / 10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_is_scored_with_its_own_tokenizer_and_rewards_and_repeats(
    offbeat: Offbeat, lab: Any, tmp_path: Path
) -> None:
    run = lab.train(*CHECKPOINTS, "gconfig.ignore_eos=true")
    assert run.end() == 0, run.output
    # Whatever lies where the model was: a run's own checkpoint has all that is needed.
    (lab.folder / "model").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def scored(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "offbeat", "eval", *arguments, "--json"]
        return scores(subprocess.run(command, cwd=elsewhere, capture_output=True, text=True))

    sampled = ("--samples", "2", "--fileroot", str(lab.folder / "runs"))
    newest = scored("latest", *sampled)
    assert newest["model"].endswith("checkpoints/step-000002")
    assert newest["datasets"]["valid_dataset"]["prompts"] == 3
    assert newest["temperature"] == 1.0
    assert scored("e2e/run", *sampled) == newest
    earlier = scored(str(lab.run_dir()), "--step", "1")
    assert earlier["model"].endswith("checkpoints/step-000001")
    # Greedy answers of the last version score as they did at the end of the run.
    last = scored(str(lab.run_dir()))["datasets"]["valid_dataset"]["average"]["mean"]
    assert last == pytest.approx(lab.summary()["eval"]["last"])


def test_an_invalid_reward_is_shown_and_left_out(offbeat: Offbeat, lab: Any) -> None:
    (lab.folder / "picky.py").write_text(
        "def reward(prompt, completion, prompt_ids, completion_ids, number, **columns):\n"
        "    if number == 1:\n        raise KeyError('no such answer')\n    return 1.0\n"
    )
    done = offbeat("eval", "config.yaml", "--reward", "picky:reward", VALID, "--json")
    found = scores(done)["datasets"]["valid_dataset"]
    assert (found["answers"], found["valid_rewards"], found["invalid_rewards"]) == (3, 2, 1)
    assert (found["average"]["mean"], found["average"]["prompts"]) == (1.0, 2)
    assert "1 of 3 rewards are invalid and left out; the first: " in done.stderr
    assert "no such answer" in done.stderr


def test_a_model_of_the_hub_comes_from_the_cache_and_else_names_the_way_out(
    offbeat: Offbeat, lab: Any
) -> None:
    asked = (*ROWS[:2], *REWARD, "model.max_model_len=64", "gconfig.max_new_tokens=4", "--json")
    absent = offbeat("eval", "acme/tiny", *asked)
    assert absent.returncode == 2
    assert "acme/tiny is no folder and no run here" in absent.stderr
    assert "Traceback" not in absent.stderr

    cached = lab.folder / "hub" / "hub" / "models--acme--tiny"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    (cached / "snapshots" / "0123abcd").symlink_to((lab.folder / "model").resolve())
    assert scores(offbeat("eval", "acme/tiny", *asked))["datasets"]["one"]["prompts"] == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("model",), "--data NAME=PATH, and what scores the answers with --reward"),
        (("model", "--data", "a", *REWARD), "--data a: write NAME=PATH"),
        (("model", "--data", "a=x", "--data", "a=y", *REWARD), "--data a=y: a is already x"),
        (("model", "--data", "a=x.jsonl", *REWARD), "--data a: valid_dataset.path: 'x.jsonl'"),
        (("config.yaml", *ROWS, "--k", "0"), "--k 0: write whole numbers of at least 1"),
        (("config.yaml", *ROWS, "--k", "2"), "--k 2: pass@2 needs that many answers"),
        (("config.yaml", *ROWS, "--threshold", "1"), "--threshold 1 has no effect without --k"),
        (("config.yaml", *ROWS, "--step", "1"), "--step 1: config.yaml is a configuration"),
        (("config.yaml", *ROWS, "--out", "model"), "model is a folder; name a file in it"),
        (("config.yaml", *ROWS, "--out", "task.py/x"), "writing task.py/x: "),
        (("latest", *ROWS), "there is no folder runs"),
    ],
)
def test_a_mistake_ends_before_anything_is_started(
    offbeat: Offbeat, arguments: tuple[str, ...], said: str
) -> None:
    done = offbeat("eval", *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
