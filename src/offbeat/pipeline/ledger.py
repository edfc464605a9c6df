"""The ledger of a run: every admitted group, and the one fate it had.

Owns every change of ``run.db``; its schema and queries are `offbeat.observe.ledger`. Consumes
admissions and ends in the order in which the pipeline decides them; each change is one transaction,
visible to other processes when the call returns. Waits for the file system only. Knows no tickets:
that a group ends once is checked here a second time.

Why a change is cheap and still survives SIGKILL: with WAL and ``synchronous=NORMAL`` a commit is
one ``write`` into the page cache, which belongs to the system, not to the process. Only a crash of
the *machine* can lose the last commits, and it cannot tear the file; the snapshot decides what a
resumed run continues from, never the ledger. Where the file system has no WAL the journal is DELETE
and each commit is flushed: slower, equally safe.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import CheckpointError, CorruptCheckpoint
from offbeat.observe.ledger import (
    SCHEMA,
    SCHEMA_VERSION,
    EventKind,
    EventTotals,
    LedgerTotals,
    TokenTotals,
    counts_events,
    event_totals,
    group_totals,
    token_totals,
)
from offbeat.types import DropReason, GroupId, PolicyVersion

_CACHE_KIB = 256
"""SQLite's cache of pages: rows end soon after they begin, so a few pages at the end of the file
are all that is ever asked for. Its default of 2 MiB filled over the first thousand steps."""

_END = """
UPDATE groups SET fate = ?, reason = ?, step = ?, start_version = ?, ended_at = ?, detail = ?,
                  generated_tokens = ?, trained_tokens = ?
WHERE group_id = ? AND superseded_by IS NULL AND fate IS NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroup:
    """One group of a finished step: tokens that were generated for it, and those of them with a
    loss.
    """

    group_id: GroupId
    generated_tokens: int = 0
    trained_tokens: int = 0


class Ledger:
    """The writing side of ``run.db``; one per run. Open it with `Ledger.open`, close it at the end.

    Calls may come from different threads, one at a time.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, attempt: int, clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._connection = connection
        self._attempt = attempt
        self._clock = clock

    @classmethod
    def open(cls, path: Path, *, clock: Callable[[], float] = time.time) -> Ledger:
        """Open or create the ledger, in the newest attempt that it knows.

        Args:
            path: ``run.db``.
            clock: seconds since the epoch.

        Raises:
            CheckpointError: the file cannot be opened or written.
            CorruptCheckpoint: it is not a ledger, or one of another format.
        """
        with _writing(path):
            # Autocommit: each statement is its own transaction unless one is opened by hand.
            connection = sqlite3.connect(
                path, timeout=30.0, isolation_level=None, check_same_thread=False
            )
            try:
                attempt = _prepare(path, connection, clock())
            except BaseException:
                connection.close()
                raise
        return cls(path, connection, attempt, clock)

    @property
    def attempt(self) -> int:
        """1 for a run that was never resumed."""
        return self._attempt

    def begin_attempt(self, *, open_groups: Sequence[GroupId], next_group_id: GroupId) -> int:
        """A resumed run starts: what a snapshot does not know of is superseded. Returns the new
        attempt.

        Args:
            open_groups: groups that were open in the snapshot; they will be admitted again.
            next_group_id: the first group that had not been admitted in the snapshot.
        """
        new = self._attempt + 1
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO attempts (attempt, started_at, next_group_id) VALUES (?, ?, ?)",
                (new, self._clock(), next_group_id),
            )
            cursor.execute(
                "UPDATE groups SET superseded_by = ? WHERE group_id >= ? AND superseded_by IS NULL",
                (new, next_group_id),
            )
            cursor.executemany(
                "UPDATE groups SET superseded_by = ? WHERE group_id = ? AND superseded_by IS NULL",
                [(new, group_id) for group_id in open_groups],
            )
        self._attempt = new
        return new

    def admit(
        self, group_id: GroupId, *, epoch: int, row: int, admission_version: PolicyVersion
    ) -> None:
        """A group joins the line. Raises RuntimeError when it is, or was, in it already."""
        values = (group_id, self._attempt, epoch, row, admission_version, self._clock())
        with _writing(self._path):
            try:
                self._connection.execute(
                    "INSERT INTO groups "
                    "(group_id, attempt, epoch, row, admission_version, admitted_at) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    values,
                )
            except sqlite3.IntegrityError as exc:
                raise RuntimeError(f"group {group_id} was admitted twice") from exc

    def trained(
        self,
        group_id: GroupId,
        step: int,
        start_version: PolicyVersion,
        *,
        generated_tokens: int = 0,
        trained_tokens: int = 0,
    ) -> None:
        """One group was trained in ``step``. Raises RuntimeError when it is not open."""
        group = TrainedGroup(
            group_id=group_id, generated_tokens=generated_tokens, trained_tokens=trained_tokens
        )
        self.step_trained([group], step, start_version)

    def step_trained(
        self, groups: Sequence[TrainedGroup], step: int, start_version: PolicyVersion
    ) -> None:
        """All groups of a step were trained: one transaction, all or none. Raises RuntimeError when
        one is not open.
        """
        now = self._clock()
        with self._transaction() as cursor:
            for g in groups:
                tokens = (g.generated_tokens, g.trained_tokens)
                self._end(
                    cursor, g.group_id, ("trained", None, step, start_version, now, "", *tokens)
                )

    def dropped(
        self,
        group_id: GroupId,
        reason: DropReason,
        detail: str = "",
        *,
        generated_tokens: int = 0,
    ) -> None:
        """One group ended without training. Raises RuntimeError when it is not open."""
        detail = _storable(detail)
        values = ("dropped", reason.value, None, None, self._clock(), detail, generated_tokens, 0)
        with self._transaction() as cursor:
            self._end(cursor, group_id, values)

    def event(
        self,
        kind: EventKind,
        detail: str,
        *,
        subject: str = "",
        group_id: GroupId | None = None,
    ) -> None:
        """Record something that a person will ask about later; what is equal is one row, counted.

        Args:
            detail: for a person; it should not differ where nothing else does.
            subject: see ``EventKind``.
            group_id: the group that it happened to, if any; kept of the first time.
        """
        detail = _storable(detail)
        values = (self._attempt, self._clock(), kind.value, subject, group_id, detail)
        with _writing(self._path):
            self._connection.execute(
                "INSERT INTO events (attempt, at, kind, subject, group_id, detail) "
                "VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET times = times + 1, at = excluded.at",
                values,
            )

    def totals(self) -> LedgerTotals:
        """Groups of the surviving line."""
        with _writing(self._path):
            return group_totals(self._connection)

    def tokens(self) -> TokenTotals:
        """Tokens of the groups that ended."""
        with _writing(self._path):
            return token_totals(self._connection)

    def events(self) -> EventTotals:
        """What happened to the run so far."""
        with _writing(self._path):
            return event_totals(self._connection)

    def open_groups(self) -> tuple[GroupId, ...]:
        """Groups without a fate, in order."""
        query = (
            "SELECT group_id FROM groups WHERE superseded_by IS NULL AND fate IS NULL "
            "ORDER BY group_id"
        )
        with _writing(self._path):
            return tuple(GroupId(i) for (i,) in self._connection.execute(query))

    def close(self) -> None:
        """Fold the WAL back into the one file, which can then be copied alone, and close."""
        # Refused while another process reads: then its -wal file stays beside it, which readers
        # know to use.
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()

    def _end(self, cursor: sqlite3.Cursor, group_id: GroupId, values: tuple[object, ...]) -> None:
        cursor.execute(_END, (*values, group_id))
        if cursor.rowcount == 1:
            return
        found = cursor.execute(
            "SELECT fate, reason, step FROM groups WHERE group_id = ? AND superseded_by IS NULL",
            (group_id,),
        ).fetchone()
        if found is None:
            raise RuntimeError(f"group {group_id} cannot end as {values[0]}: it was never admitted")
        fate, reason, step = found
        how = f"trained in step {step}" if fate == "trained" else f"dropped ({reason})"
        raise RuntimeError(f"group {group_id} cannot end as {values[0]}: it was {how} already")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with _writing(self._path):
            cursor = self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself, after a full disk for instance.
                with contextlib.suppress(sqlite3.Error):
                    cursor.execute("ROLLBACK")
                raise


def _storable(text: str) -> str:
    """``text`` without half surrogate pairs, which a row of JSON may bring into a message."""
    return text.encode("utf-8", "backslashreplace").decode()


def choose_journal(connection: sqlite3.Connection) -> str:
    """WAL where the file system can, DELETE otherwise; returns which."""
    try:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode == "wal":
            # A file system without shared memory admits it at the first read only.
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return "wal"
    except sqlite3.OperationalError:
        pass
    (mode,) = connection.execute("PRAGMA journal_mode=DELETE").fetchone()
    return str(mode)


def _prepare(path: Path, connection: sqlite3.Connection, now: float) -> int:
    """Check the format, create the tables, and return the newest attempt."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found not in (0, SCHEMA_VERSION):
        raise CorruptCheckpoint(
            f"{path}: ledger of format {found}, this version of offbeat reads {SCHEMA_VERSION}"
        )
    choose_journal(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA cache_size={-_CACHE_KIB}")
    if not counts_events(connection):
        connection.execute("DROP TABLE IF EXISTS events")
    connection.executescript(
        f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;"
    )
    connection.execute(
        "INSERT INTO attempts (attempt, started_at, next_group_id) "
        "SELECT 1, ?, 0 WHERE NOT EXISTS (SELECT 1 FROM attempts)",
        (now,),
    )
    (newest,) = connection.execute("SELECT max(attempt) FROM attempts").fetchone()
    return int(newest)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file, and the way out, in every error of SQLite."""
    try:
        yield
    except sqlite3.DatabaseError as exc:
        if exc.sqlite_errorname in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            raise CorruptCheckpoint(
                f"{path}: not a ledger of a run ({exc}); move it away to start a new one"
            ) from exc
        raise CheckpointError(
            f"{path}: the ledger cannot be written: {exc}. Free space on that file system, or fix "
            "its permissions, then resume the run"
        ) from exc
