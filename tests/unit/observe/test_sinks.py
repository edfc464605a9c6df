"""Claims about the metrics file and sets of sinks."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.observe.console import ConsoleSink
from offbeat.observe.metrics import StepRecord
from offbeat.observe.sinks import JsonlSink, SinkSet, read_metrics
from offbeat.protocols import Sink


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


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[1]",
        '{"step":null,"version":1,"seconds":1}',
        '{"step": 2}',
        '{"step":2,"version":2,"seconds":"x"}',
    ],
)
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


_PIPED = """
import sys
from offbeat.observe.console import console_sink
from offbeat.observe.sinks import SinkSet
sinks = SinkSet([console_sink()])
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
