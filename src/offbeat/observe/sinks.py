"""Where step metrics go: a JSON-lines file, the console, and a set of sinks that survives any one
of them.

Consumes the flat mapping of a `StepRecord`; synchronous and plain: the loop calls it in the
executor that it keeps for files. Also reads ``metrics.jsonl`` back. Knows nothing of the pipeline.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from offbeat.errors import DataError
from offbeat.observe.files import Guard, append_lines
from offbeat.observe.metrics import StepRecord, dropped_name
from offbeat.protocols import JsonValue, Sink
from offbeat.types import DropReason

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
    lines = path.read_bytes().split(b"\n")
    # What follows the last newline is empty, or a line whose writer was killed or has not finished.
    return tuple(_record(path, i, line) for i, line in enumerate(lines[:-1], 1) if line.strip())


def _record(path: Path, number: int, line: bytes) -> StepRecord:
    try:
        found = json.loads(line)
        step, version, seconds = int(found["step"]), int(found["version"]), found["seconds"]
        plain = {"step", "version", "seconds", NONFINITE_KEY}
        values = {k: _number(v) for k, v in found.items() if k not in plain}
        return StepRecord(step=step, version=version, seconds=_number(seconds), metrics=values)
    except (ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{path}: line {number} is not a step record: {exc!r}") from exc


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


class ConsoleSink:
    """One line per step, plain text, readable at 100 to 120 columns.

    Args:
        total_steps: shown beside the step number; None when the run has no fixed length.
        stream: where to write; ``None`` is the standard output.
    """

    def __init__(self, *, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = sys.stdout if stream is None else stream

    def __str__(self) -> str:
        return "the console"

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None:
        """Write and flush the line. Raises OSError when the reader of a pipe is gone."""
        self._stream.write(step_line(step, metrics, self._total) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to do: the stream belongs to the caller."""


def step_line(step: int, metrics: Mapping[str, JsonValue], total: int | None = None) -> str:
    """One step as one line; a value that the step did not measure is ``-``.

    Example (one line)::

        step 12/60  reward 0.512  eval -      lag 1.2/3    1.2k tok/s  wait 0.3s  ent 1.23
        clip 0.012  grad 0.81  drop 1 stale
    """
    width = len(str(total)) if total else 1
    of = f"/{total}" if total else ""
    lag = f"{_show(metrics, 'lag/group_mean', '.1f')}/{_show(metrics, 'lag/group_max', '.0f')}"
    parts = [
        f"step {step:>{width}}{of}",
        f"reward {_show(metrics, 'reward/mean', '.3f'):<5}",
        f"eval {_show(metrics, 'eval/reward_mean', '.3f'):<5}",
        f"lag {lag:<5}",
        f"{_compact(metrics.get('throughput/tokens_per_second')):>5} tok/s",
        f"wait {_show(metrics, 'wait/data_seconds', '.1f')}s",
        f"ent {_show(metrics, 'actor/entropy', '.2f')}",
        f"clip {_show(metrics, 'actor/clip_fraction', '.3f')}",
        f"grad {_show(metrics, 'actor/grad_norm', '.2f')}",
        _dropped(metrics),
    ]
    invalid = metrics.get("reward/invalid_count")
    if isinstance(invalid, int | float) and invalid > 0:
        parts.append(f"invalid rewards {invalid:.0f}")
    return "  ".join(parts)


def _show(metrics: Mapping[str, JsonValue], name: str, spec: str) -> str:
    value = metrics.get(name)
    return format(float(value), spec) if isinstance(value, int | float) else "-"


def _compact(value: JsonValue) -> str:
    """``value`` in at most five characters."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < limit * 0.9995:
            scaled = value / divisor
            digits = 1 if suffix and scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def _dropped(metrics: Mapping[str, JsonValue]) -> str:
    counts = [(r.value, metrics.get(dropped_name(r))) for r in DropReason]
    some = [(name, int(n)) for name, n in counts if isinstance(n, int | float) and n > 0]
    return "drop " + (", ".join(f"{n} {name}" for name, n in some) or "0")


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
