"""Claims about what a person first sees of a run on disk."""

import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import DataError
from offbeat.observe.fates import fates_text, read_fates
from offbeat.observe.find import find_run
from offbeat.observe.ledger import SCHEMA, EventTotals, LedgerTotals, TokenTotals
from offbeat.observe.limits import RunSetup
from offbeat.observe.liveness import held
from offbeat.observe.metrics import PROX_APPROXIMATIONS, PROX_MEASURES, StepRecord, prox_name
from offbeat.observe.resuming import resumption
from offbeat.observe.series import named
from offbeat.observe.show import RunReader, RunView, as_json, load_run, run_content, run_text
from offbeat.observe.sinks import JsonlSink
from offbeat.observe.spans import SpanName
from offbeat.observe.summary import FailedSaves, RunStatus, RunTotals

SETUP = RunSetup(
    max_staleness=4,
    cores=1,
    trainer_threads=1,
    generator_threads=1,
    trains_in_bfloat16=False,
    generates_in_bfloat16=False,
    prefix_sharing=True,
    gradient_checkpointing=False,
    prox_pass=False,
)

GROUPS = LedgerTotals(admitted=0, trained=0, dropped={}, open=0)
TOKENS = TokenTotals(generated=0, trained=0, wasted={})
MakeRun = Callable[..., Path]
EndRun = Callable[..., None]
Records = Callable[[int], list[StepRecord]]


def content(view: RunView) -> dict[str, Any]:
    """The run as ``--json`` prints it."""
    found: dict[str, Any] = json.loads(as_json(run_content(view)))
    return found


def test_completed_run_shows_summary_and_curves(
    tmp_path: Path, make_run: MakeRun, end_run: EndRun
) -> None:
    end_run(make_run(tmp_path), RunStatus.COMPLETED)
    text = run_text(load_run(tmp_path))
    assert "completed after 3 steps" in text
    assert "9 admitted = 6 trained + 2 dropped (failed 2) + 1 open" in text
    assert "200 generated = 150 trained + 50 wasted, 25.0% wasted" in text
    assert "reward    ▁▅█  0.100 to 0.300" in text
    assert "\x1b" not in text


def test_limit_of_the_run_is_the_last_line(
    tmp_path: Path, make_run: MakeRun, records: Records
) -> None:
    totals = RunTotals(0.0, records(3), SETUP)
    totals.add_span(SpanName.WAIT, 0.0, 4.0)
    totals.add_training(4.0, 5.0)
    summary = totals.summary(now=5.0, status=RunStatus.COMPLETED, groups=GROUPS, tokens=TOKENS)
    summary.write(make_run(tmp_path) / "summary.json")
    view = load_run(tmp_path)
    assert summary.limit is not None
    assert run_text(view).splitlines()[-1] == f"limit     {summary.limit.sentence}"
    assert content(view)["limit"]["what"] == "nothing"


def prox_records() -> list[StepRecord]:
    def record(step: int, tokens: float, error: float, largest: float) -> StepRecord:
        metrics = {"actor/tokens_count": tokens, "actor/prox_logp_mean": -1.5} | {
            prox_name(a, m): error for a in PROX_APPROXIMATIONS for m in PROX_MEASURES
        }
        metrics["actor/prox_error_linear_max"] = largest
        return StepRecord(step=step, version=step, seconds=1.0, metrics=metrics)

    return [record(1, 30.0, 0.01, 0.75), record(2, 10.0, 0.05, 0.25)]


def test_errors_of_the_proximal_approximations_are_a_table_of_means_over_steps(
    tmp_path: Path,
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for r in [*prox_records(), StepRecord(step=3, version=3, seconds=1.0)]:
        sink.write(r.step, r.flat())
    view = load_run(tmp_path)
    table = content(view)["prox"]
    assert table["actor/prox_error_linear_mean"] == pytest.approx((0.01 * 30 + 0.05 * 10) / 40)
    assert table["actor/prox_error_linear_max"] == 0.75
    assert len(table) == 1 + len(PROX_APPROXIMATIONS) * len(PROX_MEASURES)
    text = run_text(view)
    head = next(i for i, line in enumerate(text.splitlines()) if line.startswith("prox "))
    title, columns, *rows = text.splitlines()[head:]
    assert "mean -1.5000 nats" in title
    assert "2 steps' mean" in title
    assert [row.split()[0] for row in rows] == list(PROX_APPROXIMATIONS)
    assert {len(row) for row in rows} == {len(columns)}
    assert rows[1].split()[1:5] == ["0.02", "0.02", "0.75", "2.00%"]


def test_run_that_did_not_measure_the_approximations_has_no_table(
    tmp_path: Path, make_run: MakeRun
) -> None:
    view = load_run(make_run(tmp_path))
    assert "prox" not in run_text(view)
    assert "prox" not in content(view)


def test_run_without_a_summary_shows_what_it_has_so_far(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ver')
    view = load_run(tmp_path)
    assert view.summary.status is RunStatus.UNFINISHED
    assert (view.summary.steps, view.summary.reward.last) == (3, 0.3)
    assert "unfinished (still running, or killed) after 3 steps" in run_text(view)
    assert content(view)["status"] == "unfinished"


def test_run_that_has_written_only_its_configuration_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mode: sync\n")
    assert "after 0 steps" in run_text(load_run(find_run(str(tmp_path))))


def test_saves_that_failed_are_counted_with_the_last_error(
    tmp_path: Path, make_run: MakeRun, records: Records
) -> None:
    make_run(tmp_path)
    assert "could not be saved" not in run_text(load_run(tmp_path))
    assert "failed_saves" not in content(load_run(tmp_path))
    lost = {"save/failed_count": 2.0, "snapshot/failed_count": 1.0}
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(4, StepRecord(step=4, version=4, seconds=1.0, metrics=lost).flat())
    line = "saves     2 model folders and 1 snapshot could not be saved"
    assert line in run_text(load_run(tmp_path)).splitlines()
    failed = FailedSaves(models=1, last="step 6: no\x1b space")
    totals = RunTotals(0.0, records(3))
    summary = totals.summary(
        now=5.0, status=RunStatus.COMPLETED, groups=GROUPS, tokens=TOKENS, failed=failed
    )
    summary.write(tmp_path / "summary.json")
    text = run_text(load_run(tmp_path))
    assert "saves     1 model folder could not be saved; the last: step 6: no\\x1b space" in text
    assert content(load_run(tmp_path))["failed_saves"]["models"] == 1


def test_what_was_mended_and_what_broke_the_promise_is_said_in_a_line_each(
    tmp_path: Path, make_run: MakeRun, records: Records
) -> None:
    make_run(tmp_path)
    assert "mended   " not in run_text(load_run(tmp_path))
    events = EventTotals(
        restarts={"generator-0": 2, "generator-1": 1},
        reward_workers=3,
        lost_replies=1,
        broken_by=("a reward is missing: timed out after 15 s", "a\x1b group was late"),
    )
    totals = RunTotals(0.0, records(3), SETUP)
    summary = totals.summary(
        now=5.0, status=RunStatus.COMPLETED, groups=GROUPS, tokens=TOKENS, events=events
    )
    summary.write(tmp_path / "summary.json")
    lines = run_text(load_run(tmp_path)).splitlines()
    assert (
        "mended    restarted: generator-0 2 times, generator-1 once; 3 reward processes replaced; "
        "1 lost reply asked for again" in lines
    )
    assert (
        "bits      not reproducible bit for bit: a reward is missing: timed out after 15 s; "
        "a\\x1b group was late" in lines
    )


def test_events_of_a_run_that_goes_on_are_those_of_its_ledger(
    tmp_path: Path, make_run: MakeRun
) -> None:
    make_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.db")) as file, file:
        file.executescript(SCHEMA)
        file.execute(
            "INSERT INTO events (attempt, at, kind, detail, times) "
            "VALUES (1, 0, 'reward-worker', 'exit code 7', 2)"
        )
    assert "mended    2 reward processes replaced" in run_text(load_run(tmp_path)).splitlines()
    text = fates_text(read_fates(tmp_path))
    assert text.endswith("reward-worker: exit code 7, 2 times in this attempt")


def test_failed_run_shows_its_error(tmp_path: Path, make_run: MakeRun, end_run: EndRun) -> None:
    end_run(make_run(tmp_path), RunStatus.FAILED, "StallError: group 7 waits for generator-0")
    text = run_text(load_run(tmp_path))
    assert "failed after 3 steps" in text
    assert "error     StallError: group 7 waits for generator-0" in text
    assert content(load_run(tmp_path))["error"].startswith("StallError")


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.INTERRUPTED])
def test_run_that_ended_early_says_how_to_go_on_from_its_newest_snapshot(
    tmp_path: Path, make_run: MakeRun, end_run: EndRun, status: RunStatus
) -> None:
    folder = make_run(tmp_path / "a run")
    end_run(folder, status)
    assert "resume  " not in run_text(load_run(folder)), "no configuration, so nothing to resume"
    (folder / "config.yaml").write_text("mode: sync\n")
    command = f"offbeat train '{folder}/config.yaml' --resume"
    line = f"resume    starts over, no snapshot was taken: {command}"
    assert line in run_text(load_run(folder)).splitlines()
    for name in ("step-000002", "step-000010", "step-000012.attempt-1", ".step-000014.tmp-7"):
        (folder / "snapshots" / name).mkdir(parents=True)
    line = f"resume    from step 10 (snapshots/step-000010): {command}"
    assert line in run_text(load_run(folder)).splitlines()


def test_only_a_run_that_ended_early_can_be_resumed(
    tmp_path: Path, make_run: MakeRun, end_run: EndRun
) -> None:
    make_run(tmp_path)
    (tmp_path / "config.yaml").write_text("mode: sync\n")
    with held(tmp_path):
        assert "resume  " not in run_text(load_run(tmp_path))
    assert "resume    starts over" in run_text(load_run(tmp_path)), "it was killed"
    end_run(tmp_path, RunStatus.COMPLETED)
    assert "resume  " not in run_text(load_run(tmp_path))


def test_open_groups_of_a_killed_run_come_with_what_asks_for_them_again(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mode: sync\n")
    with closing(sqlite3.connect(tmp_path / "run.db")) as file, file:
        file.executescript(SCHEMA)
        file.execute(
            "INSERT INTO groups (group_id, attempt, epoch, row, admission_version, admitted_at) "
            "VALUES (7, 1, 0, 2, 1, 0)"
        )
    fates = read_fates(tmp_path)
    assert "--resume" not in fates_text(fates)
    ended = resumption(tmp_path, RunStatus.KILLED)
    assert (
        "the run has ended; to ask for them again: "
        f"offbeat train {tmp_path}/config.yaml --resume" in fates_text(fates, ended=ended)
    )


def test_json_has_summary_keys_and_curves_by_step(
    tmp_path: Path, make_run: MakeRun, end_run: EndRun
) -> None:
    end_run(make_run(tmp_path), RunStatus.COMPLETED)
    found = content(load_run(tmp_path))
    assert found["run"] == str(tmp_path)
    assert found["groups"]["admitted"] == 9
    assert found["curves"]["reward"] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert found["curves"]["eval"] == []
    assert "samples" not in found


def test_run_whose_process_lives_is_running_and_killed_afterwards(
    tmp_path: Path, make_run: MakeRun
) -> None:
    make_run(tmp_path)
    with held(tmp_path):
        assert load_run(tmp_path).summary.status is RunStatus.RUNNING
        assert "running after 3 steps" in run_text(load_run(tmp_path))
    assert load_run(tmp_path).summary.status is RunStatus.KILLED
    assert "killed (its process is gone and wrote no summary)" in run_text(load_run(tmp_path))


def test_run_that_wrote_its_summary_has_ended_though_its_process_still_lives(
    tmp_path: Path, make_run: MakeRun, end_run: EndRun
) -> None:
    end_run(make_run(tmp_path), RunStatus.COMPLETED)
    with held(tmp_path):
        assert load_run(tmp_path).summary.status is RunStatus.COMPLETED


def test_seconds_of_a_run_without_a_summary_are_those_of_its_steps(
    tmp_path: Path, make_run: MakeRun
) -> None:
    assert load_run(make_run(tmp_path)).summary.seconds.total == 3.0


def test_reader_gives_each_step_once_and_the_curves_of_all(
    tmp_path: Path, records: Records
) -> None:
    sink, reader = JsonlSink(tmp_path / "metrics.jsonl"), RunReader(tmp_path)
    assert reader.read().new == ()
    for record in records(2):
        sink.write(record.step, record.flat())
    assert [r.step for r in reader.read().new] == [1, 2]
    assert reader.read().new == ()
    sink.write(3, records(3)[2].flat())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,')
    view = reader.read()
    assert [r.step for r in view.new] == [3]
    assert view.curves["reward"].finite() == ([1, 2, 3], [0.1, 0.2, 0.3])
    assert view.summary.steps == 3


def test_first_reading_of_a_long_run_hands_out_its_newest_step_only(
    tmp_path: Path, make_run: MakeRun
) -> None:
    reader = RunReader(make_run(tmp_path, steps=50))
    assert [r.step for r in reader.read().new] == [50]


def test_values_that_are_not_finite_are_null_in_json_and_left_out_of_curves(
    tmp_path: Path,
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, value in ((1, 0.5), (2, math.nan)):
        record = StepRecord(step=step, version=step, seconds=1.0, metrics={"reward/mean": value})
        sink.write(step, record.flat())
    view = load_run(tmp_path)
    assert content(view)["curves"]["reward"] == [[1, 0.5], [2, None]]
    assert "reward    ▁  0.500 to 0.500" in run_text(view)


def test_other_metrics_can_be_chosen_and_an_unknown_one_names_the_nearest(
    tmp_path: Path, make_run: MakeRun
) -> None:
    make_run(tmp_path)
    reader = RunReader(tmp_path, named(["lag/group_mean"]))
    assert list(reader.read().curves) == ["lag/group_mean"]
    reader.require_curves()
    reader = RunReader(tmp_path, named(["lag/group_maen"]))
    reader.read()
    with pytest.raises(
        DataError, match=r"no step .* 'lag/group_maen'; the nearest: lag/group_mean"
    ):
        reader.require_curves()
