"""Claims about spans on disk and the arithmetic of intervals."""

import itertools
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import DataError
from offbeat.observe.spans import (
    BusyTotals,
    Interval,
    Span,
    SpanLog,
    SpanName,
    merge,
    overlap_seconds,
    read_spans,
    total_seconds,
)
from offbeat.types import GroupId

TICKS = 40
intervals = st.lists(
    st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(
        lambda p: (float(min(p)), float(max(p)))
    ),
    max_size=12,
)


def ticks(some: list[Interval], upto: int = TICKS) -> set[int]:
    """The unit cells [t, t + 1) that an interval covers: the naive discretization."""
    return {t for t in range(upto) for start, end in some if start <= t and t + 1 <= end}


@settings(deadline=None)
@given(intervals)
def test_merge_covers_the_same_ticks_with_disjoint_ascending_intervals(
    some: list[Interval],
) -> None:
    merged = merge(some)
    assert ticks(merged) == ticks(some)
    assert all(start < end for start, end in merged)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))
    assert total_seconds(some) == len(ticks(some))


@settings(deadline=None)
@given(intervals, intervals)
def test_overlap_equals_the_ticks_in_both(a: list[Interval], b: list[Interval]) -> None:
    assert overlap_seconds(a, b) == len(ticks(a) & ticks(b))
    assert overlap_seconds(b, a) == overlap_seconds(a, b)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20),
)
def test_running_totals_equal_the_shares_of_the_whole_run(
    settles: list[int], training: list[tuple[int, int]], decode: list[tuple[int, int]]
) -> None:
    train_spans, decode_spans = _in_sequence(training), _in_sequence(decode)
    busy, known, at = BusyTotals(), 0, 0.0
    pending = list(decode_spans)
    for step in [*settles, 1000]:
        at += step
        while known < len(train_spans) and train_spans[known][0] < at:
            busy.add_training(*train_spans[known])
            known += 1
        busy.add_engine("g0", decode=[s for s in pending if s[1] <= at], prefill=())
        pending = [s for s in pending if s[1] > at]
        # A span that is still running will tell of time before `at` later.
        busy.settle(min([at, *(s[0] for s in pending)]))
    trained, decoded = (ticks(spans, 500) for spans in (train_spans, decode_spans))
    assert busy.decode_share() == (len(decoded & trained) / len(trained) if trained else None)
    assert busy.engine_busy(500.0) == len(decoded) / 500


def _in_sequence(gaps_and_lengths: list[tuple[int, int]]) -> list[Interval]:
    spans, at = [], 0.0
    for gap, length in gaps_and_lengths:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans


def test_busy_totals_average_over_engines_and_count_prefill_as_busy_but_not_as_decode() -> None:
    busy = BusyTotals()
    busy.add_training(0.0, 10.0)
    busy.add_engine("g0", decode=[(0.0, 4.0)], prefill=[(4.0, 6.0)])
    busy.add_engine("g1", decode=[(2.0, 5.0)], prefill=())
    busy.settle(10.0)
    assert busy.decode_share() == 0.5
    assert busy.engine_busy(10.0) == pytest.approx((6 + 3) / 20)
    assert busy.training_seconds == 10.0


def test_shares_without_training_or_engines_are_unknown_not_zero() -> None:
    busy = BusyTotals()
    busy.settle(10.0)
    assert busy.decode_share() is None
    assert busy.engine_busy(10.0) is None


def test_a_hundred_thousand_spans_are_swept_in_well_under_a_second() -> None:
    rng = random.Random(1)
    spans = [(t, t + rng.random()) for t in (rng.random() * 1e5 for _ in range(100_000))]
    began = time.process_time()
    seconds = overlap_seconds(spans, spans)
    assert seconds == pytest.approx(total_seconds(spans))
    assert time.process_time() - began < 2.0


def span(**changes: object) -> Span:
    fields = {"name": SpanName.GENERATE, "start": 1.0, "end": 2.5, "worker": "generator-0"}
    return Span(**(fields | changes))  # type: ignore[arg-type]  # a test's shorthand


def test_spans_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    written = (span(group_id=GroupId(7)), span(name=SpanName.TRAIN, step=3), span())
    log = SpanLog(path)
    log.extend(written[:2])
    log.flush()
    log.add(written[2])
    log.flush()
    log.flush()
    assert read_spans(path) == written


def test_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="generator-0"):
        span(start=3.0)


def test_reader_leaves_out_a_half_line_and_names_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    log = SpanLog(path)
    log.add(span())
    log.flush()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert read_spans(path) == (span(),)
    path.write_bytes(whole + b"{}\n")
    with pytest.raises(DataError, match=r"spans\.jsonl: line 2"):
        read_spans(path)


def test_spans_added_during_flushes_are_written_exactly_once(tmp_path: Path) -> None:
    log = SpanLog(tmp_path / "spans.jsonl")
    done = threading.Event()

    def flush_always() -> None:
        while not done.is_set():
            log.flush()

    thread = threading.Thread(target=flush_always)
    thread.start()
    for i in range(5000):
        log.add(span(group_id=GroupId(i)))
    done.set()
    thread.join()
    log.flush()
    assert [s.group_id for s in read_spans(tmp_path / "spans.jsonl")] == list(range(5000))


def test_full_disk_ends_the_recording_and_frees_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = SpanLog(Path("/dev/full"))
    for _ in range(3):
        log.add(span())
        log.flush()
    assert len(caplog.records) == 1
    assert "/dev/full" in caplog.text
    assert not log._pending
