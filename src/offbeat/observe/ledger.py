"""The ledger of a run as a reader sees it: what ``run.db`` holds and how it adds up.

Owns the schema, the totals and every query; `offbeat.pipeline.ledger` owns every change. A reader
may be another process while the run goes on, or come long after the run was killed.

    admitted  = trained + dropped(by reason) + open                 groups
    generated = trained + wasted(by reason)                         tokens of the groups that ended

Rows that a resumed run superseded stay in the file: as groups they count nowhere, their tokens are
wasted, also those that were trained, for that training was lost.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from offbeat.errors import DataError
from offbeat.types import DropReason, GroupId

FILE_NAME = "run.db"

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id           INTEGER NOT NULL,
    attempt            INTEGER NOT NULL,
    superseded_by      INTEGER,
    epoch              INTEGER NOT NULL,
    row                INTEGER NOT NULL,
    admission_version  INTEGER NOT NULL,
    admitted_at        REAL    NOT NULL,
    fate               TEXT CHECK (fate IN ('trained', 'dropped')),
    reason             TEXT CHECK ((reason IS NOT NULL) = (fate IS 'dropped')),
    step               INTEGER CHECK ((step IS NOT NULL) = (fate IS 'trained')),
    start_version      INTEGER,
    ended_at           REAL    CHECK ((ended_at IS NULL) = (fate IS NULL)),
    detail             TEXT    NOT NULL DEFAULT '',
    generated_tokens   INTEGER NOT NULL DEFAULT 0,
    trained_tokens     INTEGER NOT NULL DEFAULT 0 CHECK (trained_tokens <= generated_tokens),
    PRIMARY KEY (group_id, attempt)
);
CREATE UNIQUE INDEX IF NOT EXISTS one_surviving_row
    ON groups (group_id) WHERE superseded_by IS NULL;
CREATE TABLE IF NOT EXISTS attempts (
    attempt            INTEGER PRIMARY KEY,
    started_at         REAL    NOT NULL,
    next_group_id      INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS events (
    id                 INTEGER PRIMARY KEY,
    attempt            INTEGER NOT NULL,
    at                 REAL    NOT NULL,
    kind               TEXT    NOT NULL,
    subject            TEXT    NOT NULL DEFAULT '',
    group_id           INTEGER,
    detail             TEXT    NOT NULL DEFAULT '',
    times              INTEGER NOT NULL DEFAULT 1
);
CREATE UNIQUE INDEX IF NOT EXISTS one_row_for_equal_events
    ON events (attempt, kind, subject, detail);
"""

UNTRAINED = "untrained"
"""Why tokens of a *trained* group were wasted: their rollout left the loss (invalid, masked)."""

SUPERSEDED = "superseded"
"""Why tokens were wasted that a resumed run had to generate again."""


class EventKind(StrEnum):
    """What can happen to a run that goes on, and who or what it happened to (the subject)."""

    RESTART = "restart"
    """A generator's process was lost and replaced; its name."""
    LOST_REPLY = "lost-reply"
    """A generator's reply was lost, and came the second time; its name."""
    REWARD_WORKER = "reward-worker"
    """A reward process was replaced."""
    DETERMINISM = "determinism"
    """A synchronous run can no longer be repeated bit for bit; a `Breach`."""


class Breach(StrEnum):
    """What keeps a synchronous run from being repeated bit for bit."""

    CONFIG = "config"
    ENGINE = "engine"
    MACHINE = "machine"
    GROUP_DEADLINE = "group-deadline"
    REWARD = "reward"


class Fate(StrEnum):
    """How a group ended."""

    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotals:
    """Groups of the surviving line: ``admitted = trained + sum(dropped) + open``; every reason has
    a key.
    """

    admitted: int
    trained: int
    dropped: Mapping[DropReason, int]
    open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Generated tokens of the groups that ended: ``generated = trained + sum(wasted)``.

    ``wasted`` has a key per `DropReason` value, ``untrained`` and ``superseded``.
    """

    generated: int
    trained: int
    wasted: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One admission of one group. ``fate`` is None while it is open; times are seconds since the
    epoch.
    """

    group_id: GroupId
    attempt: int
    superseded_by: int | None
    epoch: int
    row: int
    admission_version: int
    admitted_at: float
    fate: Fate | None
    reason: DropReason | None
    step: int | None
    start_version: int | None
    ended_at: float | None
    detail: str
    generated_tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """Something worth knowing later, which happened ``times`` times in one attempt: the last time
    ``at`` (seconds since the epoch), the first time to ``group_id``. For ``kind`` and ``subject``
    see `EventKind`.
    """

    attempt: int
    at: float
    kind: str
    subject: str
    group_id: GroupId | None
    detail: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTotals:
    """What happened to the run in all attempts: restarts of each generator by name, and why it
    cannot be repeated bit for bit, one sentence for each `Breach`.
    """

    restarts: Mapping[str, int] = field(default_factory=dict)
    reward_workers: int = 0
    lost_replies: int = 0
    broken_by: tuple[str, ...] = ()


def group_totals(connection: sqlite3.Connection) -> LedgerTotals:
    """`LedgerTotals` from one query, hence of one moment."""
    found = connection.execute(
        "SELECT fate, reason, count(*) FROM groups "
        "WHERE superseded_by IS NULL GROUP BY fate, reason"
    ).fetchall()
    counts = {(fate, reason): int(n) for fate, reason, n in found}
    return LedgerTotals(
        admitted=sum(counts.values()),
        trained=counts.get((Fate.TRAINED, None), 0),
        dropped={reason: counts.get((Fate.DROPPED, reason), 0) for reason in DropReason},
        open=counts.get((None, None), 0),
    )


def token_totals(connection: sqlite3.Connection) -> TokenTotals:
    """`TokenTotals` from one query."""
    found = connection.execute(
        f"SELECT CASE WHEN superseded_by IS NULL THEN ifnull(reason, '{UNTRAINED}') "
        f"ELSE '{SUPERSEDED}' END AS why, sum(generated_tokens), "
        "sum(CASE WHEN superseded_by IS NULL THEN trained_tokens ELSE 0 END) "
        "FROM groups WHERE fate IS NOT NULL GROUP BY why"
    ).fetchall()
    reasons = [*(r.value for r in DropReason), UNTRAINED, SUPERSEDED]
    wasted: dict[str, int] = dict.fromkeys(reasons, 0)
    for why, generated, trained in found:
        wasted[why] += generated - trained
    return TokenTotals(
        generated=sum(int(g) for _, g, _ in found),
        trained=sum(int(t) for _, _, t in found),
        wasted=wasted,
    )


def event_totals(connection: sqlite3.Connection) -> EventTotals:
    """`EventTotals` of a ledger that has the table."""
    found = connection.execute(
        "SELECT kind, subject, sum(times) FROM events GROUP BY kind, subject"
    )
    counts = {(kind, subject): int(n) for kind, subject, n in found}
    reasons = connection.execute(
        # Of each breach the first: SQLite takes the other columns from the row of the minimum.
        "SELECT min(id), detail FROM events WHERE kind = ? GROUP BY subject ORDER BY 1",
        (EventKind.DETERMINISM,),
    )
    return EventTotals(
        restarts={name: n for (kind, name), n in counts.items() if kind == EventKind.RESTART},
        reward_workers=counts.get((EventKind.REWARD_WORKER, ""), 0),
        lost_replies=sum(n for (kind, _), n in counts.items() if kind == EventKind.LOST_REPLY),
        broken_by=tuple(detail for _, detail in reasons),
    )


def counts_events(connection: sqlite3.Connection) -> bool:
    """False of an earlier ledger: its table of events has other columns, and no rows."""
    query = "SELECT count(*) FROM pragma_table_info('events') WHERE name = 'times'"
    return bool(connection.execute(query).fetchone()[0])


def read_totals(path: Path) -> LedgerTotals:
    """The groups of ``run.db``. Raises DataError when it is missing or not a ledger."""
    with _reading(path) as connection:
        return group_totals(connection)


def read_tokens(path: Path) -> TokenTotals:
    """The tokens of ``run.db``. Raises DataError when it is missing or not a ledger."""
    with _reading(path) as connection:
        return token_totals(connection)


def read_groups(path: Path, *, superseded: bool = False) -> tuple[LedgerRow, ...]:
    """Every row in order of group id; with ``superseded`` those of abandoned attempts too. Raises
    DataError.
    """
    where = "true" if superseded else "superseded_by IS NULL"
    with _reading(path) as connection:
        return _ledger_rows(connection, f"{where} ORDER BY group_id, attempt")


def _ledger_rows(
    connection: sqlite3.Connection, where: str, *arguments: object
) -> tuple[LedgerRow, ...]:
    names = list(LedgerRow.__dataclass_fields__)
    found = connection.execute(f"SELECT {', '.join(names)} FROM groups WHERE {where}", arguments)
    return tuple(_ledger_row(dict(zip(names, row, strict=True))) for row in found)


def _ledger_row(values: dict[str, object]) -> LedgerRow:
    fate, reason = values["fate"], values["reason"]
    values["fate"] = None if fate is None else Fate(str(fate))
    values["reason"] = None if reason is None else DropReason(str(reason))
    return LedgerRow(**values)  # type: ignore[arg-type]  # the schema fixes the type of every column


def read_open(path: Path, limit: int) -> tuple[LedgerRow, ...]:
    """The ``limit`` oldest of the open groups. Raises DataError."""
    where = "superseded_by IS NULL AND fate IS NULL ORDER BY group_id LIMIT ?"
    with _reading(path) as connection:
        return _ledger_rows(connection, where, limit)


def read_reasons(path: Path, limit: int) -> tuple[tuple[DropReason, str, int], ...]:
    """Why groups were dropped: reason, detail and how many, the ``limit`` most frequent first.
    Raises DataError.
    """
    query = (
        "SELECT reason, detail, count(*) AS n FROM groups "
        "WHERE superseded_by IS NULL AND fate = 'dropped' "
        "GROUP BY reason, detail ORDER BY n DESC, reason, detail LIMIT ?"
    )
    with _reading(path) as connection:
        found = connection.execute(query, (limit,)).fetchall()
    return tuple((DropReason(reason), detail, int(n)) for reason, detail, n in found)


def read_attempts(path: Path) -> tuple[float, ...]:
    """When each attempt began, seconds since the epoch, the first one first. Raises DataError."""
    with _reading(path) as connection:
        found = connection.execute("SELECT started_at FROM attempts ORDER BY attempt").fetchall()
    return tuple(float(at) for (at,) in found)


def read_event_totals(path: Path) -> EventTotals:
    """What happened to the run of ``run.db``. Raises DataError."""
    with _reading(path) as connection:
        return event_totals(connection) if counts_events(connection) else EventTotals()


def read_events(path: Path, limit: int) -> tuple[LedgerEvent, ...]:
    """The ``limit`` events that happened last, in that order. Raises DataError."""
    names = list(LedgerEvent.__dataclass_fields__)
    query = f"SELECT {', '.join(names)} FROM events ORDER BY at DESC, id DESC LIMIT ?"
    with _reading(path) as connection:
        if not counts_events(connection):
            return ()
        found = connection.execute(query, (limit,)).fetchall()
    return tuple(LedgerEvent(**dict(zip(names, row, strict=True))) for row in reversed(found))


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise DataError(f"{path}: no such ledger")
    try:
        with ExitStack() as stack:
            connection = stack.enter_context(closing(_open_read_only(path)))
            has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,)
            yield connection if has_tables else stack.enter_context(closing(_empty()))
    except sqlite3.Error as exc:
        raise DataError(f"{path}: cannot be read as a run's ledger: {exc}") from exc


def _empty() -> sqlite3.Connection:
    """What a ledger holds whose run was killed before its first transaction."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    # Reading a WAL database needs its -wal and -shm files. In a folder where they cannot be made
    # and there is no -wal, nobody writes, and the file alone is complete.
    alone = not path.with_name(f"{path.name}-wal").exists() and not os.access(path.parent, os.W_OK)
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    return sqlite3.connect(uri, uri=True, timeout=10.0)
