"""Where step metrics go: a JSON-lines file, and a set of sinks that survives any one of them.

Consumes the flat mapping of a `StepRecord`; synchronous and plain: the loop calls it in the
executor that it keeps for files. Also reads ``metrics.jsonl`` back. Knows nothing of the pipeline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from offbeat.errors import DataError
from offbeat.observe.files import Guard, append_lines
from offbeat.observe.metrics import StepRecord
from offbeat.protocols import JsonValue, Sink

NONFINITE_KEY = "nonfinite"
"""Present in a line of ``metrics.jsonl`` when values were NaN or infinite: how many are written as
null.
"""


class JsonlSink:
    """One JSON object per step, appended with one system call, so that a run can be watched with
    ``tail -f``.

    NaN and infinity are not JSON: they are written as null and counted under ``nonfinite``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nonfinite = 0

    def __str__(self) -> str:
        return str(self._path)

    @property
    def nonfinite(self) -> int:
        """Values written as null so far."""
        return self._nonfinite

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Append one line. Raises OSError when it cannot be written."""
        bad = [name for name, value in metrics.items() if _is_nonfinite(value)]
        line: dict[str, JsonValue] = {"step": step, **metrics, **dict.fromkeys(bad)}
        if bad:
            line[NONFINITE_KEY] = len(bad)
        text = json.dumps(line, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        append_lines(self._path, text.encode("utf-8", "replace") + b"\n")
        self._nonfinite += len(bad)

    def close(self) -> None:
        """Nothing to do: the file is not kept open between steps."""


def _is_nonfinite(value: JsonValue) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def read_metrics(path: Path) -> tuple[StepRecord, ...]:
    """The steps of ``metrics.jsonl``, in file order; nulls become NaN, a half-written last line is
    left out.

    Raises:
        DataError: a line that is not the last, half-written one cannot be read; names file and
            line.
        OSError: the file cannot be opened.
    """
    return tuple(MetricsTail(path).read())


class MetricsTail:
    """Reads ``metrics.jsonl`` while it grows, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = 0

    def read(self) -> Iterator[StepRecord]:
        """The steps written since the last call, as `read_metrics` gives them; raises as it does.

        One record at a time is in memory: a long run has hundreds of megabytes of them.
        """
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # Its writer was killed, or has not finished.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._lines += 1
                if line.strip():
                    yield _record(self._path, self._lines, line)


_DECODER = msgspec.json.Decoder(dict[str, float | None])


def _record(path: Path, number: int, line: bytes) -> StepRecord:
    try:
        found = _DECODER.decode(line)
        step, version, seconds = (_number(found.pop(n)) for n in ("step", "version", "seconds"))
        if found.pop(NONFINITE_KEY, None) or None in found.values():
            found = {name: _number(value) for name, value in found.items()}
        # No value is None any more.
        metrics = cast(dict[str, float], found)
        return StepRecord(step=int(step), version=int(version), seconds=seconds, metrics=metrics)
    except (msgspec.MsgspecError, KeyError, ValueError) as exc:
        raise DataError(f"{path}: line {number} is not a step record: {exc!r}") from exc


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class SinkSet:
    """Several sinks as one; one that fails is reported once and left out from then on."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._guarded = [(sink, Guard("metrics", sink)) for sink in sinks]

    @property
    def failures(self) -> tuple[str, ...]:
        """One message for each sink that was given up."""
        return tuple(g.failure for _, g in self._guarded if g.failure is not None)

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Write to every sink that still works; never raises for a failing one."""
        for sink, guard in self._guarded:
            guard.run(partial(sink.write, step, metrics))

    def record(self, record: StepRecord) -> None:
        """Write one step record."""
        self.write(record.step, record.flat())

    def close(self) -> None:
        """Close every sink, failed ones too."""
        for sink, guard in self._guarded:
            # A sink that was given up still holds a connection or a file: its closing has a guard
            # of its own.
            closing = guard if guard.failure is None else Guard("metrics", sink)
            closing.run(sink.close)
