"""Sets aside what a resumed run supersedes: a snapshot decides, and the files after it belong to an
abandoned attempt.

``metrics.jsonl`` keeps the steps up to the snapshot; later ones move to
``metrics.attempt-1.jsonl``. Rollouts of later steps, all spans (their clock ended with the
machine's or the process's) and the summary are renamed likewise. Running it again after a crash in
the middle finishes the work. Knows neither snapshots nor the ledger.
"""

from __future__ import annotations

from pathlib import Path

from offbeat.observe.files import replacing
from offbeat.observe.metrics import StepRecord
from offbeat.observe.rollouts import recorded_steps, rollouts_path
from offbeat.observe.sinks import JsonlSink, read_metrics


def supersede(run_dir: Path, *, after_step: int, attempt: int) -> tuple[StepRecord, ...]:
    """Rename what was recorded after ``after_step``; ``attempt`` is the number of the one that
    ends.

    Returns:
        The records of the surviving steps, for `offbeat.observe.summary.RunTotals`.

    Raises:
        DataError: ``metrics.jsonl`` is damaged elsewhere than in its last line.
        OSError: a file cannot be renamed or written.
    """
    survivors = _cut_metrics(run_dir / "metrics.jsonl", after_step, attempt)
    for step in recorded_steps(run_dir):
        if step > after_step:
            _set_aside(rollouts_path(run_dir, step), attempt)
    if (run_dir / "spans.jsonl").is_file():
        _set_aside(run_dir / "spans.jsonl", attempt)
    return survivors


def reopen(run_dir: Path, attempt: int) -> None:
    """Set the summary of ``attempt`` aside, if there is one: the run has not ended any more."""
    if (run_dir / "summary.json").is_file():
        _set_aside(run_dir / "summary.json", attempt)


def _named(path: Path, attempt: int) -> Path:
    return path.with_name(f"{path.stem}.attempt-{attempt}{path.suffix}")


def _set_aside(path: Path, attempt: int) -> None:
    path.replace(_named(path, attempt))


def _cut_metrics(path: Path, after_step: int, attempt: int) -> tuple[StepRecord, ...]:
    records = read_metrics(path) if path.is_file() else ()
    later = [r for r in records if r.step > after_step]
    survivors = tuple(r for r in records if r.step <= after_step)
    if later:
        # The copy first: a crash in between leaves both, and the next call writes the same copy
        # again.
        _rewrite(_named(path, attempt), later)
        _rewrite(path, survivors)
    return survivors


def _rewrite(path: Path, records: list[StepRecord] | tuple[StepRecord, ...]) -> None:
    with replacing(path) as aside:
        aside.touch()
        sink = JsonlSink(aside)
        for r in records:
            sink.write(r.step, {"version": r.version, "seconds": r.seconds, **r.metrics})
