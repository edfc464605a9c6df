"""Claims about ``offbeat checkpoint``: what it prints, as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.checkpoint.folders import point_latest, replacing, step_folder
from offbeat.checkpoint.manifest import SaveManifest, seal
from offbeat.cli import app
from offbeat.errors import DataError
from offbeat.types import PolicyVersion

Call = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the model folders of steps 2 and 4, in the working directory's ``runs``."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs") / "sums" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    for step in (2, 4):
        folder = step_folder(run / "checkpoints", step)
        with replacing(folder) as aside:
            (aside / "config.json").write_text("{}")
            seal(aside, SaveManifest(step=step, version=PolicyVersion(step)), known={})
        point_latest(folder)
    return run


@pytest.fixture
def call() -> Call:
    """``call(ARGUMENTS)``: runs ``offbeat checkpoint ARGUMENTS``."""
    return lambda *words: CliRunner().invoke(app, ["checkpoint", *words], catch_exceptions=False)


@pytest.mark.parametrize("named", [(), ("latest",), ("one",), ("sums/one",), ("runs/sums/one",)])
def test_the_run_is_found_as_everywhere(run: Path, call: Call, named: tuple[str, ...]) -> None:
    for verb in ("ls", "verify"):
        done = call(verb, *named)
        assert done.exit_code == 0, done.output
        assert "step-000004" in done.output


def test_list_and_its_json_say_the_same(run: Path, call: Call) -> None:
    rows = [line.split() for line in call("ls").output.splitlines() if line.startswith("model ")]
    assert [(row[1], row[2]) for row in rows] == [("step-000002", "2"), ("step-000004", "latest")]
    found = json.loads(call("ls", "--json").output)
    assert [(f["step"], f["latest"]) for f in found["folders"]] == [(2, False), (4, True)]
    assert found["nbytes"] == sum(f["nbytes"] for f in found["folders"])


def test_a_damaged_folder_is_code_1_and_does_not_hide_the_others(run: Path, call: Call) -> None:
    (run / "checkpoints" / "step-000002" / "config.json").write_text("{ }")
    done = call("verify")
    assert done.exit_code == 1
    bad, good, summed, way_out = done.output.splitlines()
    assert bad.startswith("damaged")
    assert "step-000002: config.json has 3 bytes, the manifest says 2" in bad
    assert good.split()[:2] == ["ok", str(run / "checkpoints" / "step-000004")]
    assert summed == "1 of 2 folders is damaged"
    assert "remove it" in way_out
    found = call("verify", "--json")
    assert found.exit_code == 1
    assert [verdict["state"] for verdict in json.loads(found.output)] == ["damaged", "ok"]


def test_one_folder_can_be_verified_alone(run: Path, call: Call) -> None:
    (run / "checkpoints" / "step-000002" / "config.json").unlink()
    done = call("verify", str(run / "checkpoints" / "latest"))
    assert (done.exit_code, len(done.output.splitlines())) == (0, 1)


def test_a_model_that_offbeat_has_not_saved_is_said_to_have_no_manifest(
    run: Path, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    done = call("verify", "hub")
    assert done.exit_code == 1
    assert done.output.startswith("no manifest  hub: there is no manifest.json to compare with")


def test_what_is_neither_a_run_nor_a_folder_names_the_runs_there_are(call: Call, run: Path) -> None:
    for verb in ("ls", "verify"):
        with pytest.raises(DataError, match="the newest runs are sums/one"):
            call(verb, "two")


@pytest.mark.invariant("I16")
def test_listing_loads_no_torch() -> None:
    script = "import sys, offbeat.checkpoint.inspection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
