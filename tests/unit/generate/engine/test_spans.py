"""The intervals in which an engine was busy."""

from __future__ import annotations

from offbeat.generate.engine.spans import BusySpans


def test_an_engine_that_nobody_polls_forgets_the_oldest() -> None:
    spans = BusySpans()
    for i in range(spans.MOST + 5):
        spans.add(float(i), i + 0.5)
    taken = spans.take()
    assert (taken[0][0], len(taken)) == (5.0, spans.MOST)
    assert spans.take() == ()


def test_steps_that_follow_each_other_are_one_span() -> None:
    spans = BusySpans()
    for start, end in ((0.0, 1.0), (1.0005, 2.0), (3.0, 4.0)):
        spans.add(start, end)
    assert spans.take() == ((0.0, 2.0), (3.0, 4.0))
