"""What ``offbeat chaos`` says in the end: what was broken, what holds, and what that comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.pipeline.chaos.faults import Fault, Injection
from offbeat.pipeline.chaos.judge import Finding
from offbeat.pipeline.chaos.soak import Report

HIT = Injection(fault=Fault.KILL_GENERATOR, at=1.0, target="generator-0", pid=7)


def report(
    run_dir: Path, *verdicts: bool | None, injections: tuple[Injection, ...] = (HIT,)
) -> str:
    findings = [
        Finding(claim=f"claim {i}", holds=holds, detail="") for i, holds in enumerate(verdicts)
    ]
    return Report(run_dir=run_dir, injections=injections, findings=findings).text()


@pytest.mark.parametrize(
    ("verdicts", "sum_line"),
    [
        ((True, None, True), "every claim holds"),
        ((True, None, False), "1 of 2 claims fails"),
        ((False, True, False), "2 of 3 claims fail"),
    ],
)
def test_the_report_ends_with_a_verdict_on_what_was_judged_and_where_to_look(
    tmp_path: Path, verdicts: tuple[bool | None, ...], sum_line: str
) -> None:
    assert report(tmp_path, *verdicts).splitlines()[-2:] == [
        sum_line,
        f"look at the run: offbeat show {tmp_path}",
    ]
    assert report(tmp_path / "none", *verdicts).splitlines()[-1] == sum_line


def test_a_run_that_nothing_has_broken_is_no_proof(tmp_path: Path) -> None:
    said = report(tmp_path, True, injections=())
    assert said.startswith("no fault was injected\n")
    assert "every claim holds, but nothing was broken" in said


def test_the_help_names_every_fault() -> None:
    said = CliRunner().invoke(app, ["chaos", "--help"]).output
    assert [fault for fault in Fault if fault not in said] == []
