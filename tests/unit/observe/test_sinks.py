"""Claims about the metrics file, the console line and sets of sinks."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.observe.metrics import StepRecord, dropped_name
from offbeat.observe.sinks import ConsoleSink, JsonlSink, SinkSet, read_metrics, step_line
from offbeat.protocols import Sink
from offbeat.types import DropReason

FULL = {
    "reward/mean": 0.51234,
    "eval/reward_mean": 0.43,
    "lag/group_mean": 1.25,
    "lag/group_max": 4.0,
    "throughput/tokens_per_second": 12345.6,
    "wait/data_seconds": 123.45,
    "actor/entropy": 1.234,
    "actor/clip_fraction": 0.0123,
    "actor/grad_norm": 10.811,
    dropped_name(DropReason.STALE): 1.0,
    dropped_name(DropReason.FILTERED): 2.0,
}


def record(step: int, **more: float) -> StepRecord:
    return StepRecord(step=step, version=step, seconds=0.5, metrics={"reward/mean": 0.25} | more)


def test_every_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sinks = SinkSet([JsonlSink(path)])
    for step in (1, 2, 3):
        sinks.record(record(step))
        assert [r.step for r in read_metrics(path)] == list(range(1, step + 1))
    assert read_metrics(path)[2] == record(3)


def test_nan_and_infinity_are_null_and_counted_and_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    metrics = {"actor/loss": math.nan, "actor/grad_norm": math.inf, "reward/mean": 1.0}
    sink.write(1, StepRecord(step=1, version=1, seconds=1.0, metrics=metrics).flat())
    sink.write(2, record(2).flat())

    def refuse(name: str) -> None:
        raise AssertionError(name)

    first, second = (
        json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()
    )
    assert first["actor/loss"] is None
    assert first["actor/grad_norm"] is None
    assert first["nonfinite"] == 2
    assert "nonfinite" not in second
    assert sink.nonfinite == 2
    assert math.isnan(read_metrics(path)[0].metrics["actor/loss"])


def test_reader_leaves_out_a_half_written_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, record(1).flat())
    sink.write(2, record(2).flat())
    path.write_bytes(path.read_bytes()[:-9])
    assert [r.step for r in read_metrics(path)] == [1]
    sink.write(2, record(2).flat())
    assert [r.step for r in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"step": 2}', '{"step":2,"version":2,"seconds":"x"}'])
def test_reader_names_the_line_that_is_no_record(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlSink(path).write(1, record(1).flat())
    with path.open("a") as file:
        file.write(bad + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2"):
        read_metrics(path)


def test_full_disk_switches_one_sink_off_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    console = io.StringIO()
    sinks = SinkSet([JsonlSink(Path("/dev/full")), ConsoleSink(stream=console)])
    for step in (1, 2, 3):
        sinks.record(record(step))
    assert console.getvalue().count("\n") == 3
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text
    assert "No space left" in caplog.text
    assert len(sinks.failures) == 1


class BrokenTracker:
    """A user's tracker that fails with an exception of its own, also when it is closed."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, step: int, metrics: object) -> None:
        raise LookupError("the service is down")

    def close(self) -> None:
        self.closed = True
        raise LookupError("still down")


def test_failing_tracker_is_closed_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    tracker = BrokenTracker()
    sinks = SinkSet([tracker])
    sinks.record(record(1))
    sinks.close()
    assert tracker.closed
    assert "the service is down" in caplog.text


def test_sinks_satisfy_the_protocol(tmp_path: Path) -> None:
    sinks: list[Sink] = [JsonlSink(tmp_path / "m"), ConsoleSink(stream=io.StringIO()), SinkSet([])]
    for sink in sinks:
        sink.write(1, record(1).flat())
        sink.close()
    assert (tmp_path / "m").exists()


def test_console_line_is_one_line_that_fits_120_columns_with_its_first_drop_reason() -> None:
    stream = io.StringIO()
    ConsoleSink(total_steps=1000, stream=stream).write(12, FULL)
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert len(line.partition("  drop")[0]) <= 111
    for part in ("step   12/1000", "reward 0.512", "eval 0.430", "lag 1.2/4", "12.3k tok/s"):
        assert part in line
    for part in (
        "wait 123.5s",
        "ent 1.23",
        "clip 0.012",
        "grad 10.81",
        "drop 2 filtered, 1 stale",
    ):
        assert part in line


def test_console_line_names_invalid_rewards_only_when_there_are_some() -> None:
    assert step_line(3, {"reward/invalid_count": 7.0}).endswith("invalid rewards 7")
    assert "invalid" not in step_line(3, {"reward/invalid_count": 0.0})
    assert "invalid" not in step_line(3, {})


def test_console_line_shows_what_was_not_measured_as_a_dash() -> None:
    line = step_line(1, {"reward/mean": math.nan})
    assert "reward nan" in line
    assert "eval -" in line
    assert "lag -/-" in line
    assert line.endswith("drop 0")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (999.4, "999"),
        (999.9, "1.0k"),
        (12_345.0, "12.3k"),
        (999_999.0, "1.0M"),
        (2e9, "2.0G"),
    ],
)
def test_token_rates_are_shown_in_five_characters(value: float, shown: str) -> None:
    assert f" {shown} tok/s" in step_line(1, {"throughput/tokens_per_second": value})


_PIPED = """
import sys
from offbeat.observe.sinks import ConsoleSink, SinkSet
sinks = SinkSet([ConsoleSink()])
for step in (1, 2):
    sinks.write(step, {"reward/mean": 0.5})
"""


def test_line_reaches_a_pipe_before_the_process_ends_and_a_closed_pipe_stops_nothing() -> None:
    command = [sys.executable, "-c", _PIPED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("reward 0.500") == 2
    assert done.stderr == ""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        closed = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert closed.stderr.count("training goes on") == 1
