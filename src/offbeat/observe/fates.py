"""What became of every group and token of a run: the ledger as ``offbeat show --ledger`` says it.

Reads ``run.db``, also while the run writes it; returns text and plain data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from offbeat.observe import ledger
from offbeat.observe.ledger import LedgerEvent, LedgerRow, LedgerTotals, TokenTotals
from offbeat.observe.resuming import Resumption
from offbeat.observe.terminal import harmless, table
from offbeat.types import DropReason

_ROWS = 20
"""The longest list that is printed."""

_EVENTS = 10
"""As many events are, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """The ledger of one run: totals, why groups were dropped (most frequent first), the oldest open
    groups, when each attempt began, and what happened last.
    """

    groups: LedgerTotals
    tokens: TokenTotals
    reasons: tuple[tuple[DropReason, str, int], ...]
    open: tuple[LedgerRow, ...]
    attempts: tuple[float, ...]
    events: tuple[LedgerEvent, ...]


def read_fates(run_dir: Path) -> Fates:
    """The ledger of ``run_dir``. Raises DataError when there is none or it cannot be read."""
    db = run_dir / ledger.FILE_NAME
    return Fates(
        groups=ledger.read_totals(db),
        tokens=ledger.read_tokens(db),
        reasons=ledger.read_reasons(db, _ROWS),
        open=ledger.read_open(db, _ROWS),
        attempts=ledger.read_attempts(db),
        events=ledger.read_events(db, _EVENTS),
    )


def fates_content(fates: Fates) -> dict[str, object]:
    """The ledger as plain data for JSON."""
    content: dict[str, object] = msgspec.to_builtins(fates)
    names = ("reason", "detail", "groups")
    return content | {"reasons": [dict(zip(names, r, strict=True)) for r in fates.reasons]}


def fates_text(fates: Fates, *, now: float | None = None, ended: Resumption | None = None) -> str:
    """The ledger for a person.

    Args:
        now: seconds since the epoch.
        ended: how the run goes on, when it ended early.
    """
    at = time.time() if now is None else now
    sections = [
        _balance(fates),
        _dropped(fates.reasons),
        _open(fates.open, fates.groups.open, at, ended),
        _events(fates.attempts, fates.events),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _balance(fates: Fates) -> list[str]:
    """Both equations of the ledger, each fate and reason a line of the table."""
    groups, tokens = fates.groups, fates.tokens
    rows = [
        ("admitted", str(groups.admitted), "generated", str(tokens.generated)),
        ("= trained", str(groups.trained), "= trained", str(tokens.trained)),
    ]
    dropped_by = {reason.value: n for reason, n in groups.dropped.items()}
    for reason, wasted in tokens.wasted.items():
        dropped = dropped_by.get(reason, 0)
        if dropped or wasted:
            known = f"+ dropped, {reason}" if dropped else ""
            rows.append((known, str(dropped or ""), f"+ wasted, {reason}", str(wasted)))
    rows.append(("+ open", str(groups.open), "", ""))
    return table(("groups", "", "tokens of ended groups", ""), rows)


def _dropped(reasons: Sequence[tuple[DropReason, str, int]]) -> list[str]:
    if not reasons:
        return []
    rows = [(reason.value, str(n), harmless(d).replace("\n", " ")) for reason, d, n in reasons]
    return table(("dropped because", "groups", "detail"), rows, left=3)


def _open(rows: Sequence[LedgerRow], count: int, now: float, ended: Resumption | None) -> list[str]:
    if not rows:
        return []
    cells = [
        (str(r.group_id), str(r.epoch), str(r.row), str(r.admission_version), _age(r, now))
        for r in rows
    ]
    lines = table(("open group", "epoch", "row", "admitted at version", "seconds ago"), cells)
    return [
        *lines,
        *([f"and {count - len(rows)} more"] if count > len(rows) else []),
        *(
            [f"the run has ended; to ask for them again: {harmless(ended.command)}"]
            if ended
            else []
        ),
    ]


def _age(row: LedgerRow, now: float) -> str:
    return f"{max(0.0, now - row.admitted_at):.0f}"


def _events(attempts: Sequence[float], events: Sequence[LedgerEvent]) -> list[str]:
    began = [(at, f"attempt {i} began") for i, at in enumerate(attempts, 1)]
    happened = [(e.at, _event(e)) for e in events]
    return [
        f"{datetime.fromtimestamp(at).strftime('%Y-%m-%d %H:%M:%S')}  "
        + harmless(text).replace("\n", " ")
        for at, text in sorted([*began, *happened])[-_ROWS:]
    ]


def _event(event: LedgerEvent) -> str:
    group = "" if event.group_id is None else f", group {event.group_id}"
    times = "" if event.times == 1 else f", {event.times} times in this attempt"
    return f"{event.kind}: {event.detail}{group}{times}"
