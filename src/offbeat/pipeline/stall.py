"""What a run is waiting for, and for how long: pending groups, who has each, where every task is.

Owns the wording and the judgment of silence; the loop knows the groups. Pure but for the stacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

MOST_GROUPS = 8
MOST_FRAMES = 4


class Patience:
    """Judges silence: a wait in which nothing has happened for ``stall_seconds``, once or again.

    Requests have a deadline of their own, ``request_seconds``, after which their generator is
    replaced: as long as some are open, the wait goes on until that has passed too.
    """

    def __init__(self, stall_seconds: float, request_seconds: float, tokens: int) -> None:
        self.stall_seconds = stall_seconds
        self._limit = stall_seconds + request_seconds
        self._tokens = tokens
        self._silent = 0.0

    def something_happened(self) -> None:
        """An answer came, or a group ended."""
        self._silent = 0.0

    def is_spent(self, *, generating: bool, tokens: int) -> bool:
        """Whether to give up after another ``stall_seconds`` without an event.

        Args:
            generating: whether what is waited for has requests without an answer.
            tokens: written by all generators so far; they count while it has some.
        """
        wrote, self._tokens = tokens != self._tokens, tokens
        if not generating:
            return True
        self._silent = 0.0 if wrote else self._silent + self.stall_seconds
        return self._silent >= self._limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """An admitted group that is not complete.

    ``generating`` are its requests that have no answer yet; without any, its rewards or the
    workflow itself are at work.
    """

    group_id: int
    row: int
    age_seconds: float
    generating: Sequence[str]

    def __str__(self) -> str:
        requests = ", ".join(self.generating[:3]) + (", …" if len(self.generating) > 3 else "")
        holder = f"a generator has {requests}" if requests else "in its rewards or its workflow"
        return (
            f"group {self.group_id} (row {self.row + 1}, admitted {self.age_seconds:.0f} s ago): "
            f"{holder}"
        )


def pending_text(groups: Sequence[PendingGroup]) -> str:
    """The oldest groups, one per line, and how many more there are."""
    lines = [f"  {group}" for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        lines.append(f"  and {len(groups) - MOST_GROUPS} more")
    return "\n".join(lines)


def task_stacks(tasks: Iterable[asyncio.Task[object]]) -> str:
    """Where the tasks are: innermost frames first, one line for all tasks at the same place."""
    names: dict[str, list[str]] = {}
    for task in sorted(tasks, key=lambda t: t.get_name()):
        frames = " < ".join(_place(f) for f in reversed(task.get_stack(limit=MOST_FRAMES)))
        names.setdefault(frames or "has not started", []).append(task.get_name())
    return "\n".join(f"  {_named(tasks_there)}: {place}" for place, tasks_there in names.items())


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tasks such as {names[0]}"


def _place(frame: FrameType) -> str:
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})"
