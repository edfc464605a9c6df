"""The picture of who worked when."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import ConfigError, DataError
from offbeat.observe.gantt import COLORS, LANES, draw, gantt, some_steps
from offbeat.observe.spans import Span, SpanName


def span(name: SpanName, start: float, end: float, step: int | None = None) -> Span:
    return Span(name=name, start=start, end=end, worker="w", step=step)


SPANS = (
    span(SpanName.DECODE, 0.0, 12.0),
    span(SpanName.WAIT, 10.0, 11.0, step=1),
    span(SpanName.TRAIN, 11.0, 13.0, step=1),
    span(SpanName.COMMIT, 13.0, 14.0, step=1),
    span(SpanName.WAIT, 14.0, 16.0, step=2),
    span(SpanName.PREFILL, 14.0, 15.0),
    span(SpanName.DECODE, 15.0, 16.0),
    span(SpanName.TRAIN, 16.0, 18.0, step=2),
    span(SpanName.COMMIT, 18.0, 20.0, step=2),
    span(SpanName.DECODE, 19.0, 30.0),
)


def test_every_kind_of_span_but_whole_requests_has_a_lane_with_a_color() -> None:
    drawn = {name for names in LANES.values() for name in names}
    assert drawn == set(SpanName) - {SpanName.GENERATE}
    assert LANES.keys() == COLORS.keys()


def test_spans_are_cut_to_the_steps_shown_and_start_at_zero() -> None:
    picture = gantt(SPANS, 1, 2)
    assert picture.seconds == 10.0
    assert picture.lanes["generator"] == [(0.0, 2.0), (4.0, 6.0), (9.0, 10.0)]
    assert picture.lanes["trainer"] == [(1.0, 3.0), (6.0, 8.0)]
    assert picture.versions == [(1, 4.0), (2, 10.0)]
    assert "save" not in picture.lanes


def test_one_step_is_enough() -> None:
    picture = gantt(SPANS, 2, 2)
    assert picture.seconds == 6.0
    assert picture.lanes["generator"] == [(0.0, 2.0), (5.0, 6.0)]


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [(3, 4, "no step 3; the run has 1 to 2"), (2, 1, "step 2 comes after step 1")],
)
def test_steps_that_are_not_there_are_refused(first: int, last: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        gantt(SPANS, first, last)


def test_a_run_without_a_finished_step_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to draw"):
        some_steps(SPANS[:3], 1, 1)


def test_without_being_asked_five_steps_from_the_second_on_are_drawn() -> None:
    def commits(*steps: int) -> list[Span]:
        return [
            Span(name=SpanName.COMMIT, start=s, end=s, worker="w", group_id=None, step=s)
            for s in steps
        ]

    assert some_steps(commits(*range(1, 30)), None, None) == (2, 6)
    assert some_steps(commits(1), None, None) == (1, 1)
    assert some_steps(commits(61, 62, 63), None, None) == (62, 63)
    assert some_steps(commits(*range(1, 30)), 4, None) == (4, 8)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written_in_the_format_of_its_ending(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"picture.{ending}"
    draw(gantt(SPANS, 1, 2), file, "two steps")
    assert file.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[ending]


def test_an_unknown_format_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"picture\.bmpx"):
        draw(gantt(SPANS, 1, 2), tmp_path / "picture.bmpx", "two steps")
