"""What each worker did when: spans on disk, and the arithmetic of overlapping intervals.

Times are CLOCK_MONOTONIC seconds, comparable between the processes of one machine. Owns
``spans.jsonl`` and the two shares a run is judged by; knows neither engines nor trainers.

    decode share of training time = seconds in decode and in training / seconds in training
    engine busy fraction          = busy seconds of the engines / (run seconds x engines)
"""

from __future__ import annotations

import bisect
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from offbeat.errors import DataError
from offbeat.observe.files import Guard, append_lines
from offbeat.types import GroupId

Interval: TypeAlias = tuple[float, float]
"""(start, end) with start <= end, seconds."""


class SpanName(StrEnum):
    """The kinds of work that are recorded."""

    GENERATE = "generate"
    PREFILL = "prefill"
    DECODE = "decode"
    REWARD = "reward"
    WAIT = "wait"
    TRAIN = "train"
    PUBLISH = "publish"
    STAGE = "stage"
    COMMIT = "commit"
    SAVE = "save"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``worker`` did ``name`` from ``start`` to ``end``, for a group or a step if there is one."""

    name: SpanName
    start: float
    end: float
    worker: str
    group_id: GroupId | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if not self.start <= self.end:
            raise ValueError(f"span {self.name} of {self.worker}: {self.start} .. {self.end}")


class SpanLog:
    """Collects spans in memory and appends them to ``spans.jsonl`` at each `flush`.

    ``add`` may be called on the event loop while ``flush`` runs in an executor: no span is lost or
    written twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[Span] = deque()
        self._guard = Guard("spans", path)

    def add(self, span: Span) -> None:
        """Remember one span until the next flush."""
        if self._guard.failure is None:
            self._pending.append(span)

    def extend(self, spans: Iterable[Span]) -> None:
        """Remember several."""
        for span in spans:
            self.add(span)

    def flush(self) -> None:
        """Append what was added since the last flush; a failure is logged once and ends the
        recording.
        """
        taken = list(self._take())
        if taken:
            lines = "".join(_line(span) for span in taken)
            self._guard.run(lambda: append_lines(self._path, lines.encode("utf-8", "replace")))

    def _take(self) -> Iterator[Span]:
        # As many as there are now: a producer that adds meanwhile must not keep the flush from
        # ending.
        for _ in range(len(self._pending)):
            yield self._pending.popleft()


def _line(span: Span) -> str:
    fields = {
        "name": span.name.value,
        "start": round(span.start, 6),
        "end": round(span.end, 6),
        "worker": span.worker,
        "group_id": span.group_id,
        "step": span.step,
    }
    present = {k: v for k, v in fields.items() if v is not None}
    return json.dumps(present, separators=(",", ":")) + "\n"


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of ``spans.jsonl``; a half-written last line is left out.

    Raises:
        DataError: no such file, or another line cannot be read; names file and line.
        OSError: the file cannot be opened.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError as exc:
        raise DataError(
            f"{path}: no such file, hence no picture: the run ended before its first step, or its "
            "folder was copied without it"
        ) from exc
    return tuple(_span(path, i, line) for i, line in enumerate(lines, 1) if line.strip())


def _span(path: Path, number: int, line: bytes) -> Span:
    try:
        found = json.loads(line)
        group = found.get("group_id")
        return Span(
            name=SpanName(found["name"]),
            start=float(found["start"]),
            end=float(found["end"]),
            worker=str(found["worker"]),
            group_id=None if group is None else GroupId(int(group)),
            step=found.get("step"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"{path}: line {number} is not a span: {exc!r}") from exc


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in ascending order; touching ones are joined, empty ones left
    out.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - start for start, end in merge(intervals))


def overlap_seconds(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Seconds that lie in the union of ``a`` and in the union of ``b``: one sweep over both,
    sorted.
    """
    left, right = merge(a), merge(b)
    i = j = 0
    seconds = 0.0
    while i < len(left) and j < len(right):
        seconds += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return seconds


class BusyTotals:
    """The two shares of a whole run, kept without keeping every span.

    Engine spans arrive with each poll, the trainer's when its update ends, so engine spans are held
    back until `settle` says up to when the trainer's are known.
    """

    def __init__(self) -> None:
        self._training: list[Interval] = []
        self._decode: list[Interval] = []
        self._engine: dict[str, list[Interval]] = {}
        self._engine_seconds: dict[str, float] = {}
        self._overlap = 0.0

    @property
    def training_seconds(self) -> float:
        """Seconds in which the trainer was busy."""
        return sum(end - start for start, end in self._training)

    @property
    def engine_seconds(self) -> float | None:
        """Seconds in which an engine was busy, settled, mean over the engines; None without one."""
        engines = self._engine_seconds
        return sum(engines.values()) / len(engines) if engines else None

    def add_training(self, start: float, end: float) -> None:
        """One busy interval of the trainer; they come in order and do not overlap."""
        if self._training and start < self._training[-1][1]:
            start = min(self._training[-1][1], end)
        self._training.append((start, end))

    def add_engine(
        self, worker: str, *, decode: Sequence[Interval], prefill: Sequence[Interval]
    ) -> None:
        """Forward passes of one engine since its last poll."""
        self._decode.extend(decode)
        self._engine_seconds.setdefault(worker, 0.0)
        self._engine.setdefault(worker, []).extend((*decode, *prefill))

    def settle(self, upto: float) -> None:
        """Fold in the engine spans before ``upto``: every training interval that starts before it
        is known.
        """
        done, self._decode = _split(self._decode, upto)
        if done:
            first = min(start for start, _ in done)
            known = bisect.bisect_right(self._training, first, key=lambda interval: interval[1])
            self._overlap += overlap_seconds(done, self._training[known:])
        for worker, intervals in self._engine.items():
            done, rest = _split(intervals, upto)
            self._engine_seconds[worker] += total_seconds(done)
            self._engine[worker] = rest

    def decode_share(self) -> float | None:
        """Share of the trainer's busy seconds in which a decode forward ran, of what was settled;
        None when it was never busy.
        """
        seconds = self.training_seconds
        return min(1.0, self._overlap / seconds) if seconds > 0 else None

    def engine_busy(self, run_seconds: float) -> float | None:
        """Busy seconds of the engines / seconds of the run, averaged over the engines; None without
        an engine or a run of no length.
        """
        seconds = self.engine_seconds
        return None if seconds is None or run_seconds <= 0 else min(1.0, seconds / run_seconds)


def _split(intervals: Iterable[Interval], at: float) -> tuple[list[Interval], list[Interval]]:
    before: list[Interval] = []
    after: list[Interval] = []
    for start, end in intervals:
        if start < at:
            before.append((start, min(end, at)))
        if end > at:
            after.append((max(start, at), end))
    return before, after
