"""How many tickets are opened when the trainer needs few, and when it needs many."""

from __future__ import annotations

import pytest

from offbeat.pipeline.lookahead import Lookahead


def lookahead(*, adaptive: bool = True) -> Lookahead:
    return Lookahead(groups_per_step=8, max_open=40, adaptive=adaptive)


def test_full_lookahead_is_the_bound_whatever_happens() -> None:
    full = lookahead(adaptive=False)
    full.batch_taken(waited=False, slots_free=False, finished=32)
    full.batch_taken(waited=True, slots_free=True, finished=0)
    assert full.limit == 40


def test_adaptive_lookahead_starts_with_one_batch_ahead() -> None:
    assert lookahead().limit == 16
    assert Lookahead(groups_per_step=8, max_open=8, adaptive=True).limit == 8


def test_it_grows_up_to_the_bound_while_the_trainer_waits_and_slots_are_free() -> None:
    moving = lookahead()
    seen = []
    for _ in range(15):
        moving.batch_taken(waited=True, slots_free=True, finished=0)
        seen.append(moving.limit)
    assert seen[:3] == [18, 20, 22]
    assert seen[-1] == 40


def test_it_shrinks_down_to_one_batch_while_finished_groups_queue() -> None:
    moving = lookahead()
    for _ in range(15):
        moving.batch_taken(waited=False, slots_free=False, finished=8)
    assert moving.limit == 8


@pytest.mark.parametrize(
    ("waited", "slots_free", "finished"), [(True, False, 0), (False, True, 7), (False, False, 0)]
)
def test_it_stays_where_neither_would_help(waited: bool, slots_free: bool, finished: int) -> None:
    moving = lookahead()
    moving.batch_taken(waited=waited, slots_free=slots_free, finished=finished)
    assert moving.limit == 16


def test_a_bound_below_one_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="must be between 1 and max_open 4"):
        Lookahead(groups_per_step=8, max_open=4, adaptive=True)
