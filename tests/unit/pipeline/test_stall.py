"""What a stalled run says."""

from __future__ import annotations

import asyncio

from offbeat.pipeline.stall import MOST_GROUPS, Patience, PendingGroup, pending_text, task_stacks


def pending(group_id: int, *requests: str) -> PendingGroup:
    return PendingGroup(group_id=group_id, row=group_id, age_seconds=12.4, generating=requests)


def test_a_pending_group_names_its_row_its_age_and_who_has_it() -> None:
    assert str(pending(3, "train-3-0-0")) == (
        "group 3 (row 4, admitted 12 s ago): a generator has train-3-0-0"
    )
    assert str(pending(3)).endswith("in its rewards or its workflow")
    assert str(pending(3, "a", "b", "c", "d")).endswith("a generator has a, b, c, …")


def test_the_oldest_groups_are_listed_and_the_others_counted() -> None:
    lines = pending_text([pending(i) for i in range(MOST_GROUPS + 5)]).splitlines()
    assert len(lines) == MOST_GROUPS + 1
    assert lines[-1] == "  and 5 more"


async def test_each_task_shows_where_it_waits() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(inner(), name="one that waits")
        await asyncio.sleep(0)
        text = task_stacks(asyncio.all_tasks())
        task.cancel()
    (line,) = [line for line in text.splitlines() if "one that waits" in line]
    assert ".inner (test_stall.py:" in line


async def test_tasks_that_wait_at_the_same_place_are_one_line_with_their_number() -> None:
    async def sibling() -> None:
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        siblings = [group.create_task(sibling(), name=f"sibling-{i}") for i in (2, 1, 3)]
        await asyncio.sleep(0)
        text = task_stacks(asyncio.all_tasks())
        for task in siblings:
            task.cancel()
    (line,) = [line for line in text.splitlines() if ".sibling (" in line]
    assert line.startswith("  3 tasks such as sibling-1: ")


def test_patience_waits_for_requests_until_their_own_deadline() -> None:
    patience = Patience(10.0, 25.0, tokens=5)
    # The deadline passes after 25 s; from then on the wait for the successor counts.
    assert [patience.is_spent(generating=True, tokens=5) for _ in range(4)] == [False] * 3 + [True]


def test_tokens_and_events_give_new_patience() -> None:
    patience = Patience(10.0, 0.0, tokens=5)
    assert not patience.is_spent(generating=True, tokens=6)
    assert patience.is_spent(generating=True, tokens=6)
    patience = Patience(10.0, 5.0, tokens=5)
    assert not patience.is_spent(generating=True, tokens=5)
    patience.something_happened()
    assert not patience.is_spent(generating=True, tokens=5)


def test_tokens_of_others_are_no_progress_where_nothing_is_generated() -> None:
    assert Patience(10.0, 60.0, tokens=5).is_spent(generating=False, tokens=500)
