"""Claims about the ledger: every admitted group has one recorded fate, whatever dies when."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import CheckpointError, CorruptCheckpoint, DataError
from offbeat.observe.ledger import (
    SUPERSEDED,
    UNTRAINED,
    Breach,
    EventKind,
    EventTotals,
    Fate,
    LedgerTotals,
    read_attempts,
    read_event_totals,
    read_events,
    read_groups,
    read_tokens,
    read_totals,
)
from offbeat.pipeline.ledger import Ledger, TrainedGroup, choose_journal
from offbeat.types import DropReason, GroupId, PolicyVersion

V0 = PolicyVersion(0)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "run.db", clock=lambda: 5.0)
    yield opened
    opened.close()


def admit(ledger: Ledger, *ids: int) -> None:
    for i in ids:
        ledger.admit(GroupId(i), epoch=0, row=i, admission_version=V0)


def assert_adds_up(totals: LedgerTotals) -> None:
    assert totals.admitted == totals.trained + sum(totals.dropped.values()) + totals.open


@pytest.mark.invariant("I02")
def test_admitted_is_trained_plus_dropped_plus_open(ledger: Ledger, tmp_path: Path) -> None:
    admit(ledger, 0, 1, 2, 3, 4)
    ledger.trained(GroupId(0), 1, V0, generated_tokens=20, trained_tokens=15)
    ledger.dropped(GroupId(1), DropReason.STALE, generated_tokens=7)
    ledger.dropped(GroupId(3), DropReason.FAILED, "generator-0 died")
    totals = ledger.totals()
    assert (totals.admitted, totals.trained, totals.open) == (5, 1, 2)
    expected = dict.fromkeys(DropReason, 0) | {DropReason.STALE: 1, DropReason.FAILED: 1}
    assert totals.dropped == expected
    assert read_totals(tmp_path / "run.db") == totals
    assert ledger.open_groups() == (2, 4)


@pytest.mark.invariant("I02")
def test_generated_tokens_are_trained_plus_wasted_by_reason(ledger: Ledger, tmp_path: Path) -> None:
    admit(ledger, 0, 1, 2)
    groups = [
        TrainedGroup(group_id=GroupId(0), generated_tokens=20, trained_tokens=15),
        TrainedGroup(group_id=GroupId(1), generated_tokens=10, trained_tokens=10),
    ]
    ledger.step_trained(groups, 1, V0)
    ledger.dropped(GroupId(2), DropReason.FILTERED, generated_tokens=7)
    tokens = ledger.tokens()
    assert (tokens.generated, tokens.trained) == (37, 25)
    assert {k: n for k, n in tokens.wasted.items() if n} == {"filtered": 7, UNTRAINED: 5}
    assert set(tokens.wasted) == {*(r.value for r in DropReason), UNTRAINED, SUPERSEDED}
    assert read_tokens(tmp_path / "run.db") == tokens


@pytest.mark.invariant("I02")
def test_tokens_of_a_superseded_attempt_are_wasted_whether_trained_or_dropped(
    ledger: Ledger,
) -> None:
    def first_steps() -> None:
        admit(ledger, 1, 2)
        ledger.trained(GroupId(1), 2, V0, generated_tokens=10, trained_tokens=8)
        ledger.dropped(GroupId(2), DropReason.STALE, generated_tokens=4)

    admit(ledger, 0)
    ledger.trained(GroupId(0), 1, V0, generated_tokens=20, trained_tokens=15)
    first_steps()
    ledger.begin_attempt(open_groups=(), next_group_id=GroupId(1))
    first_steps()
    tokens = ledger.tokens()
    assert (tokens.generated, tokens.trained) == (48, 23)
    wasted = {k: n for k, n in tokens.wasted.items() if n}
    assert wasted == {"stale": 4, UNTRAINED: 7, SUPERSEDED: 14}


def test_row_holds_the_whole_story_of_a_group(ledger: Ledger, tmp_path: Path) -> None:
    for i in (8, 9):
        ledger.admit(GroupId(i), epoch=1, row=2, admission_version=PolicyVersion(3))
    ledger.trained(GroupId(8), 5, PolicyVersion(4))
    ledger.dropped(GroupId(9), DropReason.TOO_LONG, "512 tokens")
    trained, dropped = read_groups(tmp_path / "run.db")
    assert (trained.group_id, trained.attempt, trained.admission_version) == (8, 1, 3)
    assert (trained.epoch, trained.row) == (1, 2)
    assert (trained.fate, trained.reason, trained.step) == (Fate.TRAINED, None, 5)
    assert (trained.start_version, trained.admitted_at, trained.ended_at) == (4, 5.0, 5.0)
    assert (dropped.fate, dropped.reason) == (Fate.DROPPED, DropReason.TOO_LONG)
    assert (dropped.detail, dropped.step) == ("512 tokens", None)


@pytest.mark.invariant("I02")
def test_group_that_ends_twice_is_our_own_bug(ledger: Ledger) -> None:
    admit(ledger, 0, 1)
    ledger.trained(GroupId(0), 3, V0)
    ledger.dropped(GroupId(1), DropReason.STALE)
    with pytest.raises(
        RuntimeError, match=r"group 0 cannot end as dropped: it was trained in step 3"
    ):
        ledger.dropped(GroupId(0), DropReason.STALE)
    with pytest.raises(RuntimeError, match=r"group 1 .* it was dropped \(stale\) already"):
        ledger.trained(GroupId(1), 4, V0)
    with pytest.raises(RuntimeError, match=r"group 7 cannot end as trained: it was never admitted"):
        ledger.trained(GroupId(7), 4, V0)
    with pytest.raises(RuntimeError, match="group 0 was admitted twice"):
        admit(ledger, 0)
    assert_adds_up(ledger.totals())
    assert ledger.totals().admitted == 2


def test_step_with_one_group_that_is_not_open_changes_nothing(ledger: Ledger) -> None:
    admit(ledger, 0, 1)
    groups = [TrainedGroup(group_id=GroupId(i)) for i in (0, 1, 2)]
    with pytest.raises(RuntimeError, match="group 2"):
        ledger.step_trained(groups, 1, V0)
    assert ledger.open_groups() == (0, 1)
    ledger.step_trained(groups[:2], 1, V0)
    assert ledger.totals().trained == 2


def test_more_trained_than_generated_tokens_are_refused(ledger: Ledger) -> None:
    admit(ledger, 0)
    with pytest.raises(CheckpointError, match="CHECK constraint"):
        ledger.trained(GroupId(0), 1, V0, generated_tokens=1, trained_tokens=2)
    assert ledger.open_groups() == (0,)


@pytest.mark.invariant("I02")
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["admit", "train", "drop"]))))
def test_any_sequence_of_changes_adds_up_and_refuses_the_impossible(
    changes: list[tuple[int, str]],
) -> None:
    ledger, state = Ledger.open(Path(":memory:")), dict[int, str]()
    for i, change in changes:
        possible = i not in state if change == "admit" else state.get(i) == "admit"
        try:
            if change == "admit":
                admit(ledger, i)
            elif change == "train":
                ledger.trained(GroupId(i), 1, V0)
            else:
                ledger.dropped(GroupId(i), DropReason.FILTERED)
        except RuntimeError:
            assert not possible
        else:
            assert possible
            state[i] = change
    totals, fates = ledger.totals(), list(state.values())
    assert_adds_up(totals)
    assert (totals.open, totals.trained) == (fates.count("admit"), fates.count("train"))
    ledger.close()


@pytest.mark.invariant("I04")
def test_resumed_run_supersedes_what_the_snapshot_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    ledger = Ledger.open(path)
    admit(ledger, 0, 1, 2, 3)
    ledger.trained(GroupId(0), 1, V0)
    ledger.dropped(GroupId(1), DropReason.STALE)
    # The snapshot is taken here: 2 and 3 are open, 4 comes next.
    ledger.trained(GroupId(2), 2, V0)
    admit(ledger, 4)
    ledger.close()

    ledger = Ledger.open(path)
    assert ledger.attempt == 1
    assert ledger.begin_attempt(open_groups=[GroupId(2), GroupId(3)], next_group_id=GroupId(4)) == 2
    totals = ledger.totals()
    assert (totals.admitted, totals.trained, totals.open) == (2, 1, 0)
    admit(ledger, 2, 3, 4)
    ledger.trained(GroupId(2), 2, PolicyVersion(1))
    assert_adds_up(ledger.totals())
    assert ledger.totals().admitted == 5
    ledger.close()

    rows = read_groups(path, superseded=True)
    assert [(r.group_id, r.attempt, r.superseded_by) for r in rows] == [
        (0, 1, None),
        (1, 1, None),
        (2, 1, 2),
        (2, 2, None),
        (3, 1, 2),
        (3, 2, None),
        (4, 1, 2),
        (4, 2, None),
    ]
    assert [r.group_id for r in read_groups(path)] == [0, 1, 2, 3, 4]
    again = Ledger.open(path)
    assert again.attempt == 2
    again.close()


def lose_workers(ledger: Ledger, times: int, why: str = "exit code 7") -> None:
    for _ in range(times):
        ledger.event(EventKind.REWARD_WORKER, why)


def test_equal_events_of_an_attempt_are_one_row_with_a_count(
    ledger: Ledger, tmp_path: Path
) -> None:
    lose_workers(ledger, 2000)
    lose_workers(ledger, 1, "killed")
    ledger.begin_attempt(open_groups=[], next_group_id=GroupId(0))
    lose_workers(ledger, 3)
    found = read_events(tmp_path / "run.db", 10)
    assert [(e.attempt, e.detail, e.times) for e in found] == [
        (1, "exit code 7", 2000),
        (1, "killed", 1),
        (2, "exit code 7", 3),
    ]
    assert ledger.events().reward_workers == 2004


def test_events_are_told_by_kind_and_who_they_happened_to(ledger: Ledger, tmp_path: Path) -> None:
    for name in ("generator-0", "generator-1", "generator-0"):
        ledger.event(EventKind.RESTART, f"{name} was killed", subject=name)
    ledger.event(EventKind.LOST_REPLY, "cut", subject="generator-1")
    late = ("late once", "late again")
    for i, why in enumerate(late):
        ledger.event(
            EventKind.DETERMINISM, why, subject=Breach.GROUP_DEADLINE, group_id=GroupId(i + 3)
        )
    ledger.event(EventKind.DETERMINISM, "no reward", subject=Breach.REWARD)
    assert read_event_totals(tmp_path / "run.db") == EventTotals(
        restarts={"generator-0": 2, "generator-1": 1},
        lost_replies=1,
        broken_by=("late once", "no reward"),
    )
    assert [e.group_id for e in read_events(tmp_path / "run.db", 3)] == [3, 4, None]


def test_a_ledger_from_before_events_were_counted_is_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as old:
        old.executescript(
            "DROP TABLE events; CREATE TABLE events (id INTEGER PRIMARY KEY, attempt INTEGER, "
            "at REAL, kind TEXT, group_id INTEGER, detail TEXT);"
        )
    assert read_events(path, 10) == ()
    assert read_event_totals(path) == EventTotals()
    with closing(Ledger.open(path)) as again:
        lose_workers(again, 1)
        assert again.events().reward_workers == 1


_WRITER = """
import sys
from pathlib import Path
from offbeat.pipeline.ledger import Ledger, TrainedGroup
from offbeat.types import DropReason

ledger = Ledger.open(Path(sys.argv[1]))
for step in range(10**6):
    ids = range(step * 4, step * 4 + 4)
    for i in ids:
        ledger.admit(i, epoch=0, row=i, admission_version=step)
    ledger.dropped(ids[0], DropReason.FILTERED, generated_tokens=5)
    trained = [TrainedGroup(group_id=i, generated_tokens=9, trained_tokens=9) for i in ids[1:3]]
    ledger.step_trained(trained, step, step)
    print(step, flush=True)
"""


@pytest.mark.invariant("I04")
@pytest.mark.invariant("I02")
def test_second_process_sees_whole_changes_while_the_first_works_and_after_it_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.db"
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0\n"
        for _ in range(50):
            totals = read_totals(path)
            assert_adds_up(totals)
            assert totals.trained % 2 == 0  # a step's groups end together or not at all
        writer.send_signal(signal.SIGKILL)
        finished = int(["0", *writer.stdout.read().split("\n")[:-1]][-1]) + 1
    totals, tokens = read_totals(path), read_tokens(path)
    assert_adds_up(totals)
    # What was acknowledged before the kill is there; at most the step in flight came on top.
    assert totals.trained in (2 * finished, 2 * finished + 2)
    assert totals.dropped[DropReason.FILTERED] in (finished, finished + 1)
    assert tokens.generated == tokens.trained + sum(tokens.wasted.values())
    reopened = Ledger.open(path)
    assert reopened.totals() == totals
    reopened.close()


def test_a_file_without_tables_is_the_ledger_of_a_run_that_was_killed_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.db"
    sqlite3.connect(path).execute("PRAGMA journal_mode=WAL").connection.close()
    assert read_totals(path).admitted == 0
    assert read_tokens(path).generated == 0
    assert read_attempts(path) == ()
    reopened = Ledger.open(path)  # and a run can go on in it
    assert reopened.attempt == 1
    reopened.close()


def test_a_change_takes_less_than_a_hundred_microseconds(ledger: Ledger) -> None:
    n = 2000
    began = time.process_time()
    admit(ledger, *range(n))
    for i in range(n):
        ledger.dropped(GroupId(i), DropReason.FILTERED)
    seconds = (time.process_time() - began) / (2 * n)
    assert seconds < 200e-6, f"{seconds * 1e6:.0f} us"  # twice the aim: the machine may be busy


def test_closed_ledger_is_one_file_that_a_read_only_folder_can_hold(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "run.db")
    admit(ledger, 0)
    ledger.close()
    assert os.listdir(tmp_path) == ["run.db"]
    # Header bytes 18 and 19 are 1 for a rollback journal: no reader needs to make a -shm file.
    assert (tmp_path / "run.db").read_bytes()[18:20] == b"\x01\x01"
    tmp_path.chmod(0o555)
    try:
        assert read_totals(tmp_path / "run.db").open == 1
    finally:
        tmp_path.chmod(0o755)


def test_wal_is_used_where_the_file_system_has_it(ledger: Ledger, tmp_path: Path) -> None:
    admit(ledger, 0)
    assert (tmp_path / "run.db-wal").exists()


def test_delete_journal_is_used_where_wal_is_impossible(tmp_path: Path) -> None:
    # The dotfile locking of SQLite has no shared memory, like a network file system.
    uri = f"file:{tmp_path / 'run.db'}?vfs=unix-dotfile"
    connection = sqlite3.connect(uri, uri=True)
    assert choose_journal(connection) == "delete"
    connection.close()


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/run\.db.*resume the run"):
        Ledger.open(tmp_path / "nowhere" / "run.db")


def test_file_that_is_no_ledger_is_named_by_writer_and_reader(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(CorruptCheckpoint, match=r"run\.db: not a ledger"):
        Ledger.open(path)
    with pytest.raises(DataError, match=r"run\.db"):
        read_totals(path)
    with pytest.raises(DataError, match="no such ledger"):
        read_totals(tmp_path / "other.db")


def test_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(CorruptCheckpoint, match="format 99"):
        Ledger.open(tmp_path / "run.db")


_LIMITED = """
import resource, sys
from pathlib import Path
from offbeat.errors import CheckpointError
from offbeat.observe.ledger import read_totals
from offbeat.pipeline.ledger import Ledger
from offbeat.types import DropReason

path = Path(sys.argv[1])
ledger = Ledger.open(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
admitted = 0
try:
    for i in range(100_000):
        ledger.admit(i, epoch=0, row=i, admission_version=0)
        admitted += 1
except CheckpointError as exc:
    print(exc)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert read_totals(path).admitted == admitted > 0, admitted
ledger.dropped(0, DropReason.CANCELLED)
print(ledger.totals().dropped[DropReason.CANCELLED])
"""


def test_full_disk_raises_with_the_path_and_loses_no_acknowledged_change(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "run.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, cancelled = done.stdout.splitlines()
    assert str(tmp_path / "run.db") in message
    assert "Free space" in message
    assert cancelled == "1"


def test_half_a_surrogate_pair_in_a_reason_is_written_as_an_escape(
    ledger: Ledger, tmp_path: Path
) -> None:
    admit(ledger, 0)
    ledger.dropped(GroupId(0), DropReason.FAILED, "bad row \ud83d")
    ledger.event(EventKind.LOST_REPLY, "gone \ud83d")
    (row,) = read_groups(tmp_path / "run.db")
    assert row.detail == "bad row \\ud83d"
