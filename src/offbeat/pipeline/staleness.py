"""Who may start, who trains next, and how late: the staleness bound as a plain state machine.

Owns the tickets, the live policy version and the order of training. Knows no tasks, clocks, prompts
or weights: the loop feeds it and asks it. docs/design/staleness.md has the proof.

A ticket is one group's place in line. At most ``L = (η + 1)·g`` are open (η = ``max_staleness``,
g = groups per step). The tickets of a batch end when the version it produced is live: were they
ended earlier, a group could train η + 1 versions late. Which groups make a batch is the ``Policy``:

    pace   the g oldest tickets, once all of them are delivered; the bound follows, nothing is
           thrown away, and the answers trained on are those that were asked for
    drop   the first g that are delivered and not too late; a group that is must be dropped and is
           replaced, so whoever answers slowly is trained on less

In both a dropped ticket leaves the line and its replacement joins at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from offbeat.errors import StaleBatchError
from offbeat.pipeline.lookahead import Lookahead
from offbeat.types import GroupId, PolicyVersion, RolloutGroup


class Policy(StrEnum):
    """Which groups make a batch: the oldest, or the first that are ready in time."""

    PACE = "pace"
    DROP = "drop"


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One group's place in line; ``group`` is there once its rollouts are."""

    group_id: GroupId
    admission_version: PolicyVersion
    group: RolloutGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the line stands between two updates: what a resumed run continues from.

    ``open_groups``, oldest first, are admitted again before ``next_group``, which never was.
    ``lookahead``: see ``Lookahead``.
    """

    live: PolicyVersion
    next_group: GroupId
    open_groups: tuple[GroupId, ...]
    lookahead: int


BEGINNING = Position(live=PolicyVersion(0), next_group=GroupId(0), open_groups=(), lookahead=0)


class StalenessManager:
    """Admission and batching under a bound on the version lag.

    Args:
        max_staleness: η ≥ 0, versions; 0 is synchronous training.
        groups_per_step: g ≥ 1.
        total_groups: groups of the run; admission stops when the open tickets cover what is left,
            so nothing is in flight at the end, and only the last batch may be short.
        policy: which groups make a batch.
        adaptive_lookahead: open no more tickets than the trainer needs; see ``Lookahead``.
        start: where a resumed run stood. Its open groups get new tickets, stamped with the restored
            version and under the same bound: a restart admits no burst.

    Example (η = 0, g = 1): admit 0 · deliver 0 · take [0] · nothing may be admitted · publish 1 ·
    admit 1 · …
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        total_groups: int,
        policy: Policy = Policy.PACE,
        adaptive_lookahead: bool = False,
        start: Position = BEGINNING,
    ) -> None:
        if max_staleness < 0 or groups_per_step < 1 or total_groups < 1:
            raise ValueError(
                f"max_staleness {max_staleness} must be ≥ 0, groups_per_step {groups_per_step} and "
                f"total_groups {total_groups} ≥ 1"
            )
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._left = total_groups - min(total_groups, start.live * groups_per_step)
        self._policy = policy
        self.lookahead = Lookahead(
            groups_per_step=groups_per_step,
            max_open=self.max_open,
            adaptive=adaptive_lookahead,
            start=start.lookahead,
        )
        self._line: dict[GroupId, Ticket] = {}
        self._completed: dict[GroupId, Ticket] = {}
        self._training: dict[GroupId, Ticket] = {}
        self._again = deque(start.open_groups)
        self._next = start.next_group
        self.live = start.live

    @property
    def max_open(self) -> int:
        """L = (max_staleness + 1) · groups_per_step."""
        return (self._max_staleness + 1) * self._groups_per_step

    @property
    def open_tickets(self) -> int:
        """Tickets without an end: waiting, delivered or in training."""
        return len(self._line) + len(self._training)

    @property
    def open_groups(self) -> tuple[GroupId, ...]:
        """Group ids of the open tickets, oldest first."""
        return (*self._training, *self._line)

    @property
    def position(self) -> Position:
        """Where the line stands; ask between an update's publication and the next ``take``."""
        return Position(
            live=self.live,
            next_group=self._next,
            open_groups=(*self.open_groups, *self._again),
            lookahead=self.lookahead.limit,
        )

    @property
    def pending(self) -> tuple[GroupId, ...]:
        """Admitted groups that were not delivered yet, oldest first."""
        return tuple(t.group_id for t in self._line.values() if t.group is None)

    @property
    def finished(self) -> bool:
        """Whether every group of the run has been trained."""
        return self._left == 0

    def may_admit(self) -> bool:
        """Whether one more ticket keeps the bound, is still needed, and is not too far ahead."""
        return self.open_tickets < min(self.lookahead.limit, self._left)

    def admit(self) -> Ticket:
        """Open the next ticket, stamped with the live version."""
        if not self.may_admit():
            raise RuntimeError(
                f"no ticket to give: {self.open_tickets} of {self.lookahead.limit} are open, "
                f"{self._left} groups are left"
            )
        ticket = Ticket(group_id=self._next_group(), admission_version=self.live)
        self._line[ticket.group_id] = ticket
        return ticket

    def _next_group(self) -> GroupId:
        if self._again:
            return self._again.popleft()
        group_id, self._next = self._next, GroupId(self._next + 1)
        return group_id

    def deliver(self, group_id: GroupId, group: RolloutGroup) -> None:
        """The group's rollouts are complete."""
        ticket = self._line[group_id]
        ticket.group = group
        self._completed[group_id] = ticket

    def drop(self, group_id: GroupId) -> None:
        """The group leaves the line without training; a replacement may be admitted."""
        del self._line[group_id]
        self._completed.pop(group_id, None)

    @property
    def finished_groups(self) -> int:
        """Groups that are complete and wait for their batch."""
        return len(self._completed)

    def stale(self) -> Mapping[GroupId, RolloutGroup]:
        """Complete groups that are too late to train: drop them. ``pace`` lets none become so."""
        if self._policy is Policy.PACE:
            return {}
        late = (t for t in self._completed.values() if not self._in_time(t))
        return {t.group_id: t.group for t in late if t.group is not None}

    def batch_ready(self) -> bool:
        """Whether the next batch (g groups, or what is left at the end) is complete."""
        return len(self._next_batch()) == self._batch_size()

    def take(self) -> list[RolloutGroup]:
        """The next batch, in admission order; its tickets stay open until ``publish``.

        Raises:
            StaleBatchError: a group of the batch was admitted more than ``max_staleness`` versions
                ago.
        """
        batch = self._next_batch()
        if self._training or len(batch) != self._batch_size():
            raise RuntimeError(
                f"no batch to take: {len(self._training)} groups are in training, {len(batch)} of "
                f"the next {self._batch_size()} are delivered"
            )
        for ticket in batch:
            self._check_lag(ticket)
            del self._completed[ticket.group_id]
        self._training = {t.group_id: self._line.pop(t.group_id) for t in batch}
        return [t.group for t in batch if t.group is not None]

    def publish(self, version: PolicyVersion) -> None:
        """``version`` is live on every generator: the tickets of its batch end.

        Both in this one call, so that no admission can come between.
        """
        if version != self.live + 1:
            raise RuntimeError(f"version {version} published after {self.live}")
        self.live = version
        self._left -= len(self._training)
        self._training.clear()

    def _batch_size(self) -> int:
        return min(self._groups_per_step, self._left)

    def _next_batch(self) -> list[Ticket]:
        """The tickets of the next batch that are delivered."""
        if self._policy is Policy.DROP:
            in_time = (t for t in self._completed.values() if self._in_time(t))
            return list(islice(in_time, self._batch_size()))
        oldest = islice(self._line.values(), self._groups_per_step)
        return [t for t in oldest if t.group is not None]

    def _in_time(self, ticket: Ticket) -> bool:
        return self.live - ticket.admission_version <= self._max_staleness

    def _check_lag(self, ticket: Ticket) -> None:
        if not self._in_time(ticket):
            lag = self.live - ticket.admission_version
            raise StaleBatchError(
                f"group {ticket.group_id} was admitted at version {ticket.admission_version} and "
                f"would train at version {self.live}: {lag} versions late, max_staleness is "
                f"{self._max_staleness}"
            )


class SlotGauge:
    """Counts generation requests so that a group is admitted only when its requests can start.

    Admitting earlier would add lag and no speed. A group reserves ``n`` requests on admission; each
    of its requests turns one reservation, while there is one, into a running request; what the
    group did not use is released at its end.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reserved: dict[GroupId, int] = {}
        self._running = 0

    @property
    def used(self) -> int:
        """Requests running or reserved."""
        return self._running + sum(self._reserved.values())

    def fits(self, n: int) -> bool:
        """Whether ``n`` more requests can start; a group larger than everything starts alone."""
        return self.used == 0 or self.used + n <= self._capacity

    def reserve(self, group_id: GroupId, n: int) -> None:
        """Set ``n`` requests aside for the group."""
        self._reserved[group_id] = n

    def start(self, group_id: GroupId) -> None:
        """One request of the group starts."""
        if self._reserved.get(group_id, 0) > 0:
            self._reserved[group_id] -= 1
        self._running += 1

    def end(self) -> None:
        """One request ended."""
        self._running -= 1

    def release(self, group_id: GroupId) -> None:
        """The group ended; forget what it did not use."""
        self._reserved.pop(group_id, None)
