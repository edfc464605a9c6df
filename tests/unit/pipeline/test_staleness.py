"""The staleness bound, driven on virtual time: no tasks, no sleeps, the very class that trains."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import StaleBatchError
from offbeat.pipeline.staleness import Policy, Position, SlotGauge, StalenessManager, Ticket
from offbeat.types import GroupId, PolicyVersion, Prompt, RolloutGroup


def group_of(ticket: Ticket) -> RolloutGroup:
    prompt = Prompt(
        group_id=ticket.group_id, epoch=0, row=0, token_ids=np.zeros(1, dtype=np.int64), text=""
    )
    return RolloutGroup(prompt=prompt, rollouts=(), admission_version=ticket.admission_version)


def ids(groups: Sequence[RolloutGroup]) -> list[int]:
    return [int(g.prompt.group_id) for g in groups]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``times`` are durations of the episodes and of the updates, used in turn; the groups in
    ``drops`` end without rollouts.
    """

    eta: int
    g: int
    total: int
    slots: int
    n: int
    times: tuple[int, ...]
    updates: tuple[int, ...]
    drops: frozenset[int]
    policy: Policy = Policy.PACE
    adaptive: bool = False


scenarios = st.builds(
    Scenario,
    eta=st.integers(0, 4),
    g=st.integers(1, 4),
    total=st.integers(1, 24),
    slots=st.integers(1, 12),
    n=st.integers(1, 3),
    times=st.lists(st.integers(0, 30), min_size=1, max_size=12).map(tuple),
    updates=st.lists(st.integers(0, 10), min_size=1, max_size=4).map(tuple),
    drops=st.frozensets(st.integers(0, 30), max_size=10),
    policy=st.sampled_from(Policy),
    adaptive=st.booleans(),
)


@dataclass
class World:
    """One run on virtual time: heap entries are (time, order, what, group or version)."""

    scenario: Scenario
    trained: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    admitted_while_training: int = 0

    def __post_init__(self) -> None:
        s = self.scenario
        self.manager = StalenessManager(
            max_staleness=s.eta,
            groups_per_step=s.g,
            total_groups=s.total,
            policy=s.policy,
            adaptive_lookahead=s.adaptive,
        )
        self.gauge = SlotGauge(s.slots)
        self.trainer_waits = True
        self.tickets: dict[int, Ticket] = {}
        self.events: list[tuple[int, int, str, int]] = []
        self.now = self.order = 0
        self.training = False

    def at(self, delay: int, what: str, number: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, what, number))

    def run(self) -> World:
        self.react()
        while self.events:
            self.now, _, what, number = heapq.heappop(self.events)
            if what == "episode":
                self.end_episode(number)
            else:
                self.training = False
                self.manager.publish(PolicyVersion(number))
            self.react()
        return self

    def end_episode(self, number: int) -> None:
        for _ in range(self.scenario.n):
            self.gauge.end()
        self.gauge.release(GroupId(number))
        if number in self.scenario.drops:
            self.manager.drop(GroupId(number))
            self.dropped.append(number)
        else:
            self.manager.deliver(GroupId(number), group_of(self.tickets[number]))

    def react(self) -> None:
        """What admission and training do as soon as they may."""
        s, manager = self.scenario, self.manager
        for group_id in manager.stale():
            manager.drop(group_id)
            self.stale.append(group_id)
        while manager.may_admit() and self.gauge.fits(s.n):
            ticket = manager.admit()
            self.gauge.reserve(ticket.group_id, s.n)
            for _ in range(s.n):
                self.gauge.start(ticket.group_id)
            self.tickets[ticket.group_id] = ticket
            self.admitted.append(ticket.group_id)
            self.admitted_while_training += self.training
            left = s.total - sum(map(len, self.trained)) + s.g * self.training
            assert manager.open_tickets <= min((s.eta + 1) * s.g, left)
            assert self.gauge.used <= max(s.slots, s.n)
            self.at(s.times[ticket.group_id % len(s.times)], "episode", ticket.group_id)
        if not self.training and not manager.finished and manager.batch_ready():
            groups = manager.take()
            self.lags += [manager.live - g.admission_version for g in groups]
            self.trained.append(ids(groups))
            free = self.gauge.fits(s.n)
            manager.lookahead.batch_taken(
                waited=self.trainer_waits, slots_free=free, finished=manager.finished_groups
            )
            assert s.g <= manager.lookahead.limit <= manager.max_open
            self.training, self.trainer_waits = True, False
            duration = s.updates[manager.live % len(s.updates)]
            self.at(duration, "update", manager.live + 1)
        elif not self.training:
            self.trainer_waits = True


@pytest.mark.invariant("I01")
@settings(deadline=None, max_examples=300)
@given(scenarios)
def test_no_group_trains_more_than_max_staleness_versions_after_admission(s: Scenario) -> None:
    world = World(s).run()
    assert max(world.lags) <= s.eta


@pytest.mark.invariant("I02")
@settings(deadline=None, max_examples=300)
@given(scenarios)
def test_every_admitted_group_has_one_fate_and_nothing_is_in_flight_at_the_end(s: Scenario) -> None:
    world = World(s).run()
    trained = [i for batch in world.trained for i in batch]
    fates = sorted(trained + world.dropped + world.stale)
    assert fates == world.admitted == list(range(len(world.admitted)))
    assert len(trained) == s.total
    assert world.manager.finished
    assert world.manager.open_tickets == world.gauge.used == 0
    assert world.manager.open_groups == world.manager.pending == ()
    assert world.manager.finished_groups == 0


@settings(deadline=None, max_examples=300)
@given(scenarios)
def test_pace_trains_in_admission_order_and_throws_nothing_away(s: Scenario) -> None:
    world = World(dataclasses.replace(s, policy=Policy.PACE)).run()
    trained = [i for batch in world.trained for i in batch]
    assert trained == sorted(trained)
    assert world.stale == []


@settings(deadline=None, max_examples=300)
@given(scenarios)
def test_batches_are_full_but_the_last(s: Scenario) -> None:
    world = World(s).run()
    full, short = divmod(s.total, s.g)
    assert [len(b) for b in world.trained] == [s.g] * full + [short] * (short > 0)


@settings(deadline=None, max_examples=200)
@given(scenarios)
def test_with_max_staleness_0_admission_and_training_take_turns(s: Scenario) -> None:
    world = World(dataclasses.replace(s, eta=0)).run()
    assert world.admitted_while_training == 0
    assert set(world.lags) == {0}


def mean_lengths(policy: Policy) -> tuple[float, float]:
    """Mean length trained on and mean length dispatched: a long tail, 4 versions of staleness."""
    lengths = np.exp(np.random.default_rng(1).normal(0.0, 1.2, 4000)) * 20
    world = World(
        Scenario(
            eta=4,
            g=8,
            total=2000,
            slots=40,
            n=1,
            times=tuple(int(x) + 1 for x in lengths),
            updates=(10,),
            drops=frozenset(),
            policy=policy,
        )
    ).run()
    trained = [lengths[i] for batch in world.trained for i in batch]
    return float(np.mean(trained)), float(np.mean([lengths[i] for i in world.admitted]))


def test_pace_trains_on_the_lengths_that_were_dispatched_and_drop_on_shorter_ones() -> None:
    trained, dispatched = mean_lengths(Policy.PACE)
    assert trained == dispatched
    trained, dispatched = mean_lengths(Policy.DROP)
    assert trained < 0.9 * dispatched


def fill(manager: StalenessManager) -> None:
    """Admit and deliver at once whatever may be admitted."""
    while manager.may_admit():
        ticket = manager.admit()
        manager.deliver(ticket.group_id, group_of(ticket))


@pytest.mark.invariant("I01")
@pytest.mark.parametrize(("eta", "g"), [(0, 1), (0, 3), (1, 2), (4, 3)])
def test_generation_faster_than_training_reaches_the_bound_and_never_passes_it(
    eta: int, g: int
) -> None:
    manager = StalenessManager(max_staleness=eta, groups_per_step=g, total_groups=100 * g)
    lags = []
    for version in range(1, 20):
        fill(manager)
        lags.append(max(manager.live - group.admission_version for group in manager.take()))
        manager.publish(PolicyVersion(version))
    assert max(lags) == eta


@pytest.mark.invariant("I01")
@pytest.mark.parametrize(("eta", "g"), [(0, 1), (0, 3), (1, 2), (4, 3)])
def test_tickets_that_end_before_their_version_is_live_break_the_bound_by_one(
    eta: int, g: int
) -> None:
    """The counterexample of docs/design/staleness.md; the class has no method for this order."""
    manager = StalenessManager(max_staleness=eta, groups_per_step=g, total_groups=100 * g)
    fill(manager)
    for version in range(1, eta + 2):
        manager.take()
        manager._training.clear()
        fill(manager)
        manager.publish(PolicyVersion(version))
    with pytest.raises(StaleBatchError, match=rf"{eta + 1} versions late, max_staleness is {eta}"):
        manager.take()


def test_a_batch_waits_for_its_oldest_group_and_not_for_the_fastest() -> None:
    manager = StalenessManager(max_staleness=2, groups_per_step=2, total_groups=10)
    tickets = [manager.admit() for _ in range(6)]
    for ticket in tickets[1:]:
        manager.deliver(ticket.group_id, group_of(ticket))
    assert not manager.batch_ready()
    assert manager.pending == (0,)
    manager.deliver(tickets[0].group_id, group_of(tickets[0]))
    assert ids(manager.take()) == [0, 1]


def test_a_dropped_group_is_replaced_at_the_end_of_the_line() -> None:
    manager = StalenessManager(max_staleness=0, groups_per_step=2, total_groups=4)
    fill(manager)
    manager.drop(GroupId(0))
    assert not manager.batch_ready()
    fill(manager)
    assert ids(manager.take()) == [1, 2]


def test_tickets_of_a_batch_stay_open_until_its_version_is_live() -> None:
    manager = StalenessManager(max_staleness=0, groups_per_step=2, total_groups=4)
    fill(manager)
    manager.take()
    assert manager.open_tickets == 2
    assert manager.open_groups == (0, 1)
    assert not manager.may_admit()
    with pytest.raises(RuntimeError, match="no ticket to give: 2 of 2 are open"):
        manager.admit()
    manager.publish(PolicyVersion(1))
    assert manager.open_tickets == 0
    assert manager.admit().admission_version == 1


def test_a_batch_is_not_taken_before_it_is_delivered_nor_beside_another() -> None:
    manager = StalenessManager(max_staleness=1, groups_per_step=1, total_groups=4)
    with pytest.raises(RuntimeError, match="no batch to take"):
        manager.take()
    fill(manager)
    manager.take()
    with pytest.raises(RuntimeError, match="1 groups are in training"):
        manager.take()


@pytest.mark.parametrize("version", [0, 2])
def test_versions_are_published_one_by_one(version: int) -> None:
    manager = StalenessManager(max_staleness=0, groups_per_step=1, total_groups=1)
    with pytest.raises(RuntimeError, match=f"version {version} published after 0"):
        manager.publish(PolicyVersion(version))


@pytest.mark.parametrize(
    "wrong", [{"max_staleness": -1}, {"groups_per_step": 0}, {"total_groups": 0}]
)
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be ≥ 0"):
        StalenessManager(**{"max_staleness": 0, "groups_per_step": 1, "total_groups": 1} | wrong)


def test_a_reserved_request_counts_once_when_it_runs() -> None:
    gauge = SlotGauge(4)
    gauge.reserve(GroupId(0), 3)
    assert gauge.used == 3
    assert gauge.fits(1)
    assert not gauge.fits(2)
    gauge.start(GroupId(0))
    assert gauge.used == 3
    gauge.end()
    assert gauge.used == 2


def test_a_second_turn_counts_beyond_the_reservation() -> None:
    gauge = SlotGauge(4)
    gauge.reserve(GroupId(0), 1)
    gauge.start(GroupId(0))
    gauge.start(GroupId(0))
    assert gauge.used == 2


def test_what_a_group_did_not_use_is_released_with_it() -> None:
    gauge = SlotGauge(2)
    gauge.reserve(GroupId(0), 2)
    gauge.start(GroupId(0))
    gauge.release(GroupId(0))
    assert gauge.used == 1
    gauge.end()
    assert gauge.used == 0


def test_a_group_larger_than_all_slots_starts_alone() -> None:
    gauge = SlotGauge(2)
    assert gauge.fits(5)
    gauge.reserve(GroupId(0), 5)
    assert not gauge.fits(1)


def test_under_drop_the_first_finished_groups_train_and_late_ones_are_named() -> None:
    manager = StalenessManager(
        max_staleness=1, groups_per_step=1, total_groups=10, policy=Policy.DROP
    )
    first, second = manager.admit(), manager.admit()
    for version in (1, 2):
        manager.deliver(second.group_id, group_of(second))
        assert ids(manager.take()) == [second.group_id]
        manager.publish(PolicyVersion(version))
        second = manager.admit()
    manager.deliver(first.group_id, group_of(first))  # admitted at version 0, live is 2
    assert list(manager.stale()) == [first.group_id]
    assert not manager.batch_ready()
    manager.drop(first.group_id)
    assert manager.stale() == {}
    assert manager.may_admit()


def resumed(position: Position, *, eta: int = 1, g: int = 2, total: int = 100) -> StalenessManager:
    return StalenessManager(
        max_staleness=eta, groups_per_step=g, total_groups=total, start=position
    )


@pytest.mark.invariant("I04")
def test_open_groups_of_the_snapshot_are_admitted_first_in_order_at_the_restored_version() -> None:
    before = StalenessManager(max_staleness=1, groups_per_step=2, total_groups=100)
    fill(before)
    before.take()
    before.publish(PolicyVersion(1))
    before.drop(GroupId(2))
    tickets = [before.admit() for _ in range(2)]
    before.deliver(tickets[0].group_id, group_of(tickets[0]))
    assert before.open_groups == (3, 4, 5)
    after = resumed(before.position)
    tickets = [after.admit() for _ in range(4)]
    assert [t.group_id for t in tickets] == [3, 4, 5, 6]
    assert {t.admission_version for t in tickets} == {1}
    assert not after.may_admit()


@pytest.mark.invariant("I01")
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_restart_admits_no_more_than_the_bound_even_where_the_snapshot_had_more(eta: int) -> None:
    had = tuple(GroupId(i) for i in range(10, 18))
    position = Position(live=PolicyVersion(5), next_group=GroupId(18), open_groups=had, lookahead=8)
    manager = resumed(position, eta=eta)
    admitted: list[int] = []
    for version in range(6, 12):
        while manager.may_admit():
            ticket = manager.admit()
            admitted.append(ticket.group_id)
            manager.deliver(ticket.group_id, group_of(ticket))
            assert manager.open_tickets <= (eta + 1) * 2
        # What waits to be admitted again is still open for the next snapshot.
        assert manager.position.open_groups[: manager.open_tickets] == manager.open_groups
        assert set(had) - set(admitted) <= set(manager.position.open_groups)
        assert all(manager.live - g.admission_version <= eta for g in manager.take())
        manager.publish(PolicyVersion(version))
    assert admitted == list(range(10, 10 + len(admitted)))


def test_resumed_line_ends_where_the_uninterrupted_one_would() -> None:
    position = Position(live=PolicyVersion(3), next_group=GroupId(6), open_groups=(), lookahead=2)
    manager = resumed(position, eta=0, total=7)
    assert manager.admit().group_id == 6
    assert not manager.may_admit()


def test_resumed_lookahead_goes_on_from_where_it_stood() -> None:
    position = Position(live=PolicyVersion(3), next_group=GroupId(9), open_groups=(), lookahead=5)
    manager = StalenessManager(
        max_staleness=4,
        groups_per_step=2,
        total_groups=100,
        adaptive_lookahead=True,
        start=position,
    )
    assert manager.lookahead.limit == 5 == manager.position.lookahead
