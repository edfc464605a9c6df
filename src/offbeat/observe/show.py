"""What ``offbeat show`` prints: a run found on disk, as plain text or JSON.

Consumes a run directory that is finished, failed, killed or still being written; changes nothing in
it. Returns strings, prints nothing. Text that a model wrote is made harmless for a terminal first:
control characters are escaped.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import DataError
from offbeat.observe import ledger, summary
from offbeat.observe.metrics import (
    PROX_APPROXIMATIONS,
    PROX_PREFIX,
    MetricReducer,
    StepRecord,
    prox_name,
)
from offbeat.observe.rollouts import RolloutRow, read_rollouts
from offbeat.observe.sinks import read_metrics
from offbeat.observe.summary import RunStatus, RunTotals, Summary

METRICS_FILE = "metrics.jsonl"

_MARKS = ("config.yaml", METRICS_FILE, ledger.FILE_NAME, summary.FILE_NAME)
_BARS = "▁▂▃▄▅▆▇█"
_CURVES = {
    "reward": "reward/mean",
    "eval": "eval/reward_mean",
    "lag": "lag/group_mean",
    "entropy": "actor/entropy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it lies on disk. ``summary`` has status ``unfinished`` when the run wrote none."""

    path: Path
    summary: Summary
    records: tuple[StepRecord, ...]


def find_run(run: str, fileroot: Path = Path("runs")) -> Path:
    """The run directory that ``run`` means.

    Args:
        run: a run directory, one of its two parents (then the newest run below it), a path relative
            to ``fileroot``, or ``latest`` for the newest run under ``fileroot``.
        fileroot: where runs are kept.

    Raises:
        DataError: nothing there, or nothing that is a run; says what was looked for.
    """
    candidates = [fileroot] if run == "latest" else [Path(run), fileroot / run]
    found = next((c for c in candidates if c.is_dir()), None)
    if found is None:
        looked = " nor ".join(str(c) for c in candidates)
        raise DataError(f"run {run!r}: there is no folder {looked}")
    below = [p for pattern in ("*", "*/*") for p in found.glob(pattern) if _is_run(p)]
    runs = [found] if _is_run(found) else below
    if not runs:
        raise DataError(
            f"{found}: not a run, nor does a run lie in it: looked for {', '.join(_MARKS)} there, "
            "in its folders and in theirs"
        )
    return max(runs, key=_changed_at)


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS)


def _changed_at(path: Path) -> float:
    return max((path / mark).stat().st_mtime for mark in _MARKS if (path / mark).is_file())


def load_run(path: Path) -> RunView:
    """Read the run at ``path`` (from `find_run`). Raises DataError when a file in it cannot be
    read.
    """
    metrics = path / METRICS_FILE
    records = read_metrics(metrics) if metrics.is_file() else ()
    if (path / summary.FILE_NAME).is_file():
        return RunView(
            path=path, summary=summary.read_summary(path / summary.FILE_NAME), records=records
        )
    return RunView(path=path, summary=_so_far(path / ledger.FILE_NAME, records), records=records)


def _so_far(db: Path, records: Sequence[StepRecord]) -> Summary:
    """The summary of a run that has not written one, from what its steps and its ledger say."""
    groups = ledger.LedgerTotals(admitted=0, trained=0, dropped={}, open=0)
    tokens = ledger.TokenTotals(generated=0, trained=0, wasted={})
    if db.is_file():
        groups, tokens = ledger.read_totals(db), ledger.read_tokens(db)
    totals = RunTotals(0.0, records)
    return totals.summary(now=0.0, status=RunStatus.UNFINISHED, groups=groups, tokens=tokens)


def run_json(view: RunView, samples: Sequence[RolloutRow] = ()) -> str:
    """The run as one JSON object: the keys of ``summary.json``, ``run`` and ``curves``; where there
    are any, also ``prox`` (`prox_table`) and ``samples``.
    """
    content = json.loads(view.summary.to_json())
    content["run"] = str(view.path)
    content["curves"] = {
        name: [[r.step, _finite(r.metrics[metric])] for r in view.records if metric in r.metrics]
        for name, metric in _CURVES.items()
    }
    prox = prox_table(view.records)
    if prox:
        content["prox"] = prox
    if samples:
        content["samples"] = [_sample_json(row) for row in samples]
    return json.dumps(content, indent=2, allow_nan=False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sample_json(row: RolloutRow) -> dict[str, object]:
    return {
        "step": row.step,
        "group_id": row.group_id,
        "sibling": row.sibling,
        "prompt": row.prompt,
        "answer": row.answer,
        "reward": row.reward,
        "invalid_reason": row.invalid_reason,
        "reward_parts": dict(row.reward_parts),
        "stop_reason": row.stop_reason.value,
        "admission_version": row.admission_version,
        "versions": written_versions(row),
    }


def written_versions(row: RolloutRow) -> list[int]:
    """The policy versions that wrote tokens of ``row``, ascending."""
    return sorted({int(v) for v in row.versions[row.loss_mask]})


def run_text(view: RunView) -> str:
    """Summary and curves as plain text, for a terminal or a pipe."""
    lines = [f"run       {view.path}", *_summary_lines(view.summary)]
    for name, metric in _CURVES.items():
        points = [
            r.metrics[metric]
            for r in view.records
            if math.isfinite(r.metrics.get(metric, math.nan))
        ]
        if points:
            ends = f"{points[0]:.3f} to {points[-1]:.3f}"
            lines.append(f"{name:<9} {sparkline(points)}  {ends}")
    lines.extend(_prox_lines(view.records))
    if view.summary.limit is not None:
        lines.append(f"limit     {view.summary.limit.sentence}")
    return "\n".join(lines)


def prox_table(records: Sequence[StepRecord]) -> dict[str, float]:
    """How far the approximations of the proximal log-prob were off, by name of the metric.

    Of the steps that measured it: means weighted by trained tokens, and the largest of what is a
    largest value. Empty when no step did.
    """
    reducer = MetricReducer()
    for record in records:
        for name, value in record.metrics.items():
            if name.startswith(PROX_PREFIX) and math.isfinite(value):
                reducer.add(name, value, max(1.0, record.metrics.get("actor/tokens_count", 1.0)))
    return reducer.reduced()


_PROX_COLUMNS = (
    ("log-prob", "logp_mean"),
    ("error", "error_mean"),
    ("largest", "error_max"),
    ("relative", "relative_error_mean"),
    ("squared", "squared_error_mean"),
    ("behave w", "behave_weight_mean"),
    ("error", "behave_error_mean"),
    ("relative", "behave_relative_error_mean"),
    ("ratio", "ratio_mean"),
    ("error", "ratio_error_mean"),
    ("relative", "ratio_relative_error_mean"),
)


def _prox_lines(records: Sequence[StepRecord]) -> list[str]:
    found = prox_table(records)
    if not found:
        return []
    steps = sum("actor/prox_logp_mean" in r.metrics for r in records)
    truth = _num(found.get("actor/prox_logp_mean"), ".4f")
    lines = [
        f"prox      approximations of the recomputed log-prob (mean {truth} nats), {steps} steps' "
        "mean: log-probs in nats, behave w = proximal/behavior, ratio = current/proximal",
        f"{'':<10}{'':<10}" + "".join(f"{title:>10}" for title, _ in _PROX_COLUMNS),
    ]
    for approximation in PROX_APPROXIMATIONS:
        values = [(m, found.get(prox_name(approximation, m))) for _, m in _PROX_COLUMNS]
        cells = "".join(f"{_num(v, '.2%' if 'relative' in m else '.3g'):>10}" for m, v in values)
        lines.append(f"{'':<10}{approximation:<10}{cells}")
    return lines


def _summary_lines(s: Summary) -> list[str]:
    dropped = {reason: n for reason, n in s.groups.dropped.items() if n}
    reasons = f" ({', '.join(f'{r} {n}' for r, n in dropped.items())})" if dropped else ""
    wasted = f", {s.tokens.wasted / s.tokens.generated:.1%} wasted" if s.tokens.generated else ""
    status = (
        "unfinished (still running, or killed)" if s.status is RunStatus.UNFINISHED else s.status
    )
    lines = [
        f"status    {status} after {s.steps} steps",
        f"seconds   {s.seconds.total:.1f} total, {s.seconds.training:.1f} training, "
        f"{s.seconds.waiting:.1f} waiting",
        f"reward    first {_num(s.reward.first)}, last {_num(s.reward.last)}",
        f"eval      first {_num(s.eval.first)}, last {_num(s.eval.last)}, best {_num(s.eval.best)}"
        + "".join(f", last {name} {value:.3f}" for name, value in s.eval.parts.items()),
        f"lag       group mean {_num(s.lag.group_mean)}, group max {_num(s.lag.group_max, '.0f')}, "
        f"token mean {_num(s.lag.token_mean)}",
        f"groups    {s.groups.admitted} admitted = {s.groups.trained} trained + "
        f"{sum(dropped.values())} dropped{reasons} + {s.groups.open} open",
        f"tokens    {s.tokens.generated} generated = {s.tokens.trained} trained + "
        f"{s.tokens.wasted} wasted{wasted}; {s.tokens.prefill} prefill",
        f"overlap   decode share of training {_num(s.decode_share_of_training_time, '.1%')}, "
        f"engine busy {_num(s.engine_busy_fraction, '.1%')}, "
        f"{s.completions_with_two_versions} answers with two versions",
        f"memory    {_num(s.peak_rss_bytes / 2**20 or None, '.0f')} MiB peak, all processes",
    ]
    return lines if s.error is None else [lines[0], f"error     {harmless(s.error)}", *lines[1:]]


def _num(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """``values`` (finite, not empty) as at most ``width`` bars between their minimum and maximum.

    More values than bars: each bar is the mean of an equal share.
    """
    n = min(width, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((m - low) * scale)] for m in means)


def read_samples(path: Path, count: int, step: int | None = None) -> tuple[RolloutRow, ...]:
    """``count`` rollouts of ``step`` (default: the newest), spread evenly over the recorded ones.

    Raises:
        DataError: nothing was recorded for that step.
    """
    rows = read_rollouts(path, step)
    n = min(count, len(rows))
    return tuple(rows[i * len(rows) // n] for i in range(n))


def samples_text(rows: Sequence[RolloutRow], limit: int = 2000) -> str:
    """Prompts, answers and what became of them; a text longer than ``limit`` characters is cut, and
    says so.
    """
    return "\n\n".join(_sample_text(row, limit) for row in rows)


def _sample_text(row: RolloutRow, limit: int) -> str:
    reward = f"invalid ({row.invalid_reason})" if row.reward is None else f"{row.reward:.3f}"
    versions = ", ".join(str(v) for v in written_versions(row)) or "none"
    head = [
        f"step {row.step}  group {row.group_id}.{row.sibling}  "
        f"reward {harmless(reward)}{_parts(row.reward_parts)}",
        f"stop {row.stop_reason}  {len(row.token_ids)} tokens  versions {versions} "
        f"(admitted at {row.admission_version})",
    ]
    return "\n".join(
        [*head, *_block("prompt", row.prompt, limit), *_block("answer", row.answer, limit)]
    )


def _parts(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{harmless(name)} {value:.3g}" for name, value in parts.items())
    return f" ({listed})" if listed else ""


def _block(title: str, text: str, limit: int) -> list[str]:
    cut = f"\n[{len(text) - limit} more characters]" if len(text) > limit else ""
    lines = (harmless(text[:limit]) + cut).split("\n")
    labels = [title, *[""] * (len(lines) - 1)]
    return [f"  {label:<6} | {line}" for label, line in zip(labels, lines, strict=True)]


def harmless(text: str) -> str:
    """``text`` with every character escaped that is not printable, except newlines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
