"""Who may start, who trains next, and how late: the staleness bound as a plain state machine.

Owns the tickets, the live policy version and the order of training. Knows no tasks, clocks, prompts
or weights: the loop feeds it and asks it. docs/design/staleness.md has the proof.

A ticket is one group's place in line. At most ``L = (η + 1)·g`` are open (η = ``max_staleness``,
g = groups per step). A batch is the g oldest tickets, in admission order; a dropped ticket leaves
the line and its replacement joins at the end. The tickets of a batch end when the version it
produced is live: were they ended earlier, a group could train η + 1 versions late.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from offbeat.errors import StaleBatchError
from offbeat.types import GroupId, PolicyVersion, RolloutGroup


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One group's place in line; ``group`` is there once its rollouts are."""

    group_id: GroupId
    admission_version: PolicyVersion
    group: RolloutGroup | None = None


class StalenessManager:
    """Admission and batching under a bound on the version lag.

    Args:
        max_staleness: η ≥ 0, versions; 0 is synchronous training.
        groups_per_step: g ≥ 1.
        total_groups: groups of the run; admission stops when the open tickets cover what is left,
            so nothing is in flight at the end, and only the last batch may be short.

    Example (η = 0, g = 1): admit 0 · deliver 0 · take [0] · nothing may be admitted · publish 1 ·
    admit 1 · …
    """

    def __init__(self, *, max_staleness: int, groups_per_step: int, total_groups: int) -> None:
        if max_staleness < 0 or groups_per_step < 1 or total_groups < 1:
            raise ValueError(
                f"max_staleness {max_staleness} must be ≥ 0, groups_per_step {groups_per_step} and "
                f"total_groups {total_groups} ≥ 1"
            )
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._left = total_groups
        self._line: dict[GroupId, Ticket] = {}
        self._training: dict[GroupId, Ticket] = {}
        self._next = GroupId(0)
        self.live = PolicyVersion(0)

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
    def pending(self) -> tuple[GroupId, ...]:
        """Admitted groups that were not delivered yet, oldest first."""
        return tuple(t.group_id for t in self._line.values() if t.group is None)

    @property
    def finished(self) -> bool:
        """Whether every group of the run has been trained."""
        return self._left == 0

    def may_admit(self) -> bool:
        """Whether one more ticket keeps the bound and is still needed."""
        return self.open_tickets < min(self.max_open, self._left)

    def admit(self) -> Ticket:
        """Open the next ticket, stamped with the live version."""
        if not self.may_admit():
            raise RuntimeError(
                f"no ticket to give: {self.open_tickets} of {self.max_open} are open, "
                f"{self._left} groups are left"
            )
        ticket = Ticket(group_id=self._next, admission_version=self.live)
        self._next = GroupId(self._next + 1)
        self._line[ticket.group_id] = ticket
        return ticket

    def deliver(self, group_id: GroupId, group: RolloutGroup) -> None:
        """The group's rollouts are complete."""
        self._line[group_id].group = group

    def drop(self, group_id: GroupId) -> None:
        """The group leaves the line without training; a replacement may be admitted."""
        del self._line[group_id]

    def batch_ready(self) -> bool:
        """Whether the oldest g tickets (what is left, at the end) are all delivered."""
        return len(self._delivered()) == self._batch_size()

    def take(self) -> list[RolloutGroup]:
        """The next batch, in admission order; its tickets stay open until ``publish``.

        Raises:
            StaleBatchError: a group of the batch was admitted more than ``max_staleness`` versions
                ago.
        """
        groups = self._delivered()
        if self._training or len(groups) != self._batch_size():
            raise RuntimeError(
                f"no batch to take: {len(self._training)} groups are in training, {len(groups)} of "
                f"the oldest {self._batch_size()} are delivered"
            )
        batch = self._oldest()
        for ticket in batch:
            self._check_lag(ticket)
        self._training = {t.group_id: self._line.pop(t.group_id) for t in batch}
        return groups

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

    def _oldest(self) -> list[Ticket]:
        return list(islice(self._line.values(), self._groups_per_step))

    def _delivered(self) -> list[RolloutGroup]:
        return [t.group for t in self._oldest() if t.group is not None]

    def _check_lag(self, ticket: Ticket) -> None:
        lag = self.live - ticket.admission_version
        if lag > self._max_staleness:
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
