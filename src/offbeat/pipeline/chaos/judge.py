"""What a finished run's folder must look like, whatever happened to its processes.

Reads the ledger, the rollouts and the summary; changes nothing and knows no faults. Each finding is
a claim, whether it holds, and the numbers behind it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.observe import ledger, summary
from offbeat.observe.find import METRICS_FILE
from offbeat.observe.ledger import Fate, LedgerRow
from offbeat.observe.rollouts import RolloutRow, read_rollouts, recorded_steps
from offbeat.observe.sinks import read_metrics
from offbeat.types import GroupId

LAST_STEPS = 10
"""Steps over which the training reward is averaged in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim; ``holds`` is None where there was nothing to judge."""

    claim: str
    holds: bool | None
    detail: str


def judge(run_dir: Path, *, max_staleness: int, reach: float | None = None) -> list[Finding]:
    """Everything that can be told from the folder of a run that has ended.

    Args:
        reach: the reward that it should have come to; None judges no reward.

    Raises:
        DataError: ledger, rollouts or summary are missing or cannot be read.
    """
    rows = ledger.read_groups(run_dir / ledger.FILE_NAME)
    rollouts = [row for step in recorded_steps(run_dir) for row in read_rollouts(run_dir, step)]
    return [
        _balance(run_dir),
        _in_order(rows),
        _trained_once(rows, rollouts),
        _lag(rows, max_staleness),
        _token_versions(rollouts),
        _learned(run_dir, reach),
    ]


def _balance(run_dir: Path) -> Finding:
    """I02, and that the summary counts as the ledger does."""
    totals = ledger.read_totals(run_dir / ledger.FILE_NAME)
    said = summary.read_summary(run_dir / summary.FILE_NAME).groups
    dropped = {reason.value: n for reason, n in totals.dropped.items() if n}
    agrees = (totals.admitted, totals.trained, totals.open) == (
        said.admitted,
        said.trained,
        said.open,
    )
    names = "".join(f" + {n} {reason}" for reason, n in sorted(dropped.items()))
    return Finding(
        claim="every admitted group has one fate (I02)",
        holds=agrees
        and totals.open == 0
        and totals.admitted == totals.trained + sum(dropped.values()),
        detail=f"{totals.admitted} admitted = {totals.trained} trained{names} + {totals.open} open",
    )


def _in_order(rows: Sequence[LedgerRow]) -> Finding:
    """No group of the stream was left out, and no step."""
    ids = [row.group_id for row in rows]
    steps = sorted({row.step for row in rows if row.step is not None})
    return Finding(
        claim="groups and steps are numbered without a gap",
        holds=ids == list(range(len(ids))) and steps == list(range(1, len(steps) + 1)),
        detail=f"{len(ids)} groups, {len(steps)} steps",
    )


def _trained_once(rows: Sequence[LedgerRow], rollouts: Sequence[RolloutRow]) -> Finding:
    """What was trained on is what the ledger says, each sibling once."""
    recorded = Counter((row.step, row.group_id, row.sibling) for row in rollouts)
    steps = {row.step for row in rollouts}
    said: set[tuple[int | None, GroupId]] = {
        (row.step, row.group_id) for row in rows if row.fate is Fate.TRAINED
    }
    twice = sum(n > 1 for n in recorded.values())
    return Finding(
        claim="every trained group was trained once, in its step",
        holds=not twice and said == {(step, group) for step, group, _ in recorded},
        detail=f"{len(said)} groups in the rollouts of {len(steps)} steps, {twice} twice",
    )


def _lag(rows: Sequence[LedgerRow], max_staleness: int) -> Finding:
    lags = [
        row.start_version - row.admission_version for row in rows if row.start_version is not None
    ]
    return Finding(
        claim="no group was trained later than max_staleness allows (I01)",
        holds=max(lags) <= max_staleness if lags else None,
        detail=f"largest lag {max(lags, default=0)} of {max_staleness}",
    )


def _token_versions(rollouts: Sequence[RolloutRow]) -> Finding:
    """I06 as far as numbers tell: written after the admission, before the update."""
    wrong = 0
    for row in rollouts:
        written = row.versions[row.loss_mask]
        live = row.step - 1
        wrong += bool(
            len(written) and not row.admission_version <= written.min() <= written.max() <= live
        )
    return Finding(
        claim="every token was written between admission and training (I06)",
        holds=wrong == 0 if rollouts else None,
        detail=f"{wrong} of {len(rollouts)} answers have others",
    )


def _learned(run_dir: Path, reach: float | None) -> Finding:
    """Information for a person where nobody said how far the run has to come."""
    found = summary.read_summary(run_dir / summary.FILE_NAME)
    ends = [(name, c.first, c.last) for name, c in (("eval", found.eval), ("train", found.reward))]
    known = [f"{name} {a:.3f} to {b:.3f}" for name, a, b in ends if a is not None and b is not None]
    way = f"{', '.join(known) or 'none'} in {found.steps} steps"
    if reach is None:
        return Finding(claim="reward", holds=None, detail=way)
    name, best = _best_reward(run_dir, found)
    return Finding(
        claim=f"the reward reached {reach:g}",
        holds=best is not None and best >= reach,
        detail=f"{name} {'none' if best is None else f'{best:.3f}'}; {way}",
    )


def _best_reward(run_dir: Path, found: summary.Summary) -> tuple[str, float | None]:
    """The best on the validation set; of a run without one, the mean of the last training steps."""
    if found.eval.best is not None:
        return "best eval", found.eval.best
    metrics = run_dir / METRICS_FILE
    records = read_metrics(metrics) if metrics.is_file() else ()
    rewards = [r.metrics["reward/mean"] for r in records if "reward/mean" in r.metrics]
    last = rewards[-LAST_STEPS:]
    return f"mean of the last {len(last)} steps", statistics.fmean(last) if last else None
