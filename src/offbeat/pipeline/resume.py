"""Continuing a run: which one, from where, and what becomes of what it did after that.

Owns the choice of the run and of the snapshot, the check that the configuration still means the
same prompts, and the setting aside of what is superseded. The snapshot decides: ledger rows,
metrics, rollouts and model folders of later steps belong to the attempt that ended, and are kept
under its number. A run without a snapshot is started over in its own folder.

Each step of it may be interrupted and is finished by the next attempt: files go first, and the
ledger's new attempt, one transaction, comes last.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint import snapshot as snapshots
from offbeat.checkpoint.folders import CHECKPOINTS, LATEST, set_aside, step_folders
from offbeat.checkpoint.snapshot import RunState, Snapshot, newest_snapshot, read_snapshot
from offbeat.config import RunConfig, load, to_mapping, to_yaml
from offbeat.config.actor import LRSchedule
from offbeat.errors import CheckpointError, ConfigError, boundary
from offbeat.observe import liveness
from offbeat.observe.attempts import reopen, supersede
from offbeat.observe.files import replacing
from offbeat.observe.find import CONFIG_FILE, changed_at
from offbeat.observe.ledger import FILE_NAME as LEDGER_FILE
from offbeat.observe.liveness import Life
from offbeat.observe.metrics import StepRecord
from offbeat.observe.summary import FILE_NAME as SUMMARY_FILE
from offbeat.observe.summary import RunStatus, read_summary
from offbeat.pipeline.ledger import Ledger
from offbeat.types import Environment, GroupId

log = logging.getLogger(__name__)

BEFORE_THE_FIRST_STEP = -1
"""The step after which everything is superseded, the evaluation before step 1 included."""

_FIXED = ("seed", "train_dataset")
"""Keys that decide which prompt a group number is."""

_FREE = ("trial_name", "config_dir", "recover")
"""Keys whose change needs no mention."""

_BESIDE = (
    *_FREE,
    "fileroot",
    "megatron",
    "saver",
    "stats_logger",
    "gateway",
    "evaluator",
    "valid_dataset",
    "eval_gconfig",
)
"""Keys that no bit of the weights depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Where a run goes on: ``snapshot`` is None when it starts, or starts over; ``earlier`` are the
    step records that still hold.
    """

    snapshot: Snapshot | None = None
    earlier: tuple[StepRecord, ...] = ()

    @property
    def state(self) -> RunState | None:
        """The controller's part of the snapshot."""
        return None if self.snapshot is None else self.snapshot.state.run


def is_unfinished(run_dir: Path, steps: int | None = None) -> bool:
    """Whether a run was begun there and did not complete; ``steps`` it should have by now."""
    if not (run_dir / CONFIG_FILE).is_file():
        return False
    if not (run_dir / SUMMARY_FILE).is_file():
        return True
    summary = read_summary(run_dir / SUMMARY_FILE)
    complete = summary.status is RunStatus.COMPLETED
    return not complete or (steps is not None and summary.steps < steps)


def run_to_continue(cfg: RunConfig, *, asked: bool) -> Path | None:
    """The folder of the run that ``cfg`` names, or of the newest of its experiment; None where
    there is none, it is complete, or nobody ``asked`` and it was configured otherwise.

    Raises:
        ConfigError: it is still running, and was named or ``asked`` for, otherwise it is none; or
            it is complete and can be trained no further.
    """
    experiment = Path(cfg.fileroot) / cfg.experiment_name
    if cfg.trial_name is not None:
        candidates = [experiment / cfg.trial_name]
    else:
        candidates = [path for path in experiment.glob("*") if (path / CONFIG_FILE).is_file()]
    newest = max(candidates, key=_age, default=None)
    if newest is None or not is_unfinished(newest, cfg.total_train_steps):
        return None
    if not is_unfinished(newest) and not step_folders(newest / snapshots.FOLDER):
        raise ConfigError(
            f"total_train_steps: the run in {newest} is complete, and no snapshot of it was taken "
            "from which it could go on (recover.freq_steps, recover.freq_secs take them); "
            f"choose another trial_name, with model.path={newest / CHECKPOINTS / LATEST} to begin "
            "with its weights"
        )
    if cfg.trial_name is None and not asked and not _is_configured_as(newest, cfg):
        log.info("%s is unfinished, but was configured otherwise: a new run begins", newest)
        return None
    if liveness.life_of(newest) is not Life.ALIVE:
        return newest
    if asked or cfg.trial_name is not None:
        raise ConfigError(f"trial_name: {newest} is still running; there is nothing to resume")
    return None


def _is_configured_as(run_dir: Path, cfg: RunConfig) -> bool:
    """Whether a run is what ``cfg`` would start."""
    try:
        changed = _changes(run_dir, cfg)
    except ConfigError:  # of another version, or torn when it was written
        return False
    return all(_is_one_of(key, _FREE) for key, _ in changed)


def _changes(run_dir: Path, cfg: RunConfig) -> list[tuple[str, str]]:
    """The keys that differ between a run's own configuration and ``cfg``, and a line on each."""
    return list(_differences(to_mapping(load(run_dir / CONFIG_FILE)), to_mapping(cfg)))


def run_of_snapshot(cfg: RunConfig, snapshot: Path) -> Path:
    """The folder of the run that ``snapshot`` was taken of; ``cfg`` must mean the same one.

    Raises:
        ConfigError: it is no snapshot, or one of another run; or that run is still running.
    """
    there = snapshot.resolve()
    run_dir = there.parent.parent
    if there.parent.name != snapshots.FOLDER or there not in step_folders(there.parent):
        raise ConfigError(
            f"--resume-from: {snapshot} is no snapshot; name a folder such as "
            f"runs/EXPERIMENT/TRIAL/{snapshots.FOLDER}/step-000100 (`offbeat checkpoint ls` lists "
            "them)"
        )
    meant = Path(cfg.fileroot) / cfg.experiment_name / (cfg.trial_name or run_dir.name)
    if meant.resolve() != run_dir:
        raise ConfigError(
            f"--resume-from: {snapshot} is of the run in {run_dir}, and the configuration means "
            f"{meant} (fileroot, experiment_name, trial_name)"
        )
    if liveness.life_of(meant) is Life.ALIVE:
        raise ConfigError(f"--resume-from: {meant} is still running; there is nothing to resume")
    return meant


def _age(run_dir: Path) -> float:
    return changed_at(run_dir) if (run_dir / CONFIG_FILE).is_file() else 0.0


def nothing_to_continue(cfg: RunConfig) -> ConfigError:
    """Why ``--resume`` finds no run."""
    where = Path(cfg.fileroot) / cfg.experiment_name / (cfg.trial_name or "")
    if cfg.trial_name is not None and (where / CONFIG_FILE).is_file():
        return is_complete(where)
    return ConfigError(
        f"trial_name: there is no unfinished run in {where} to resume; name one with trial_name=…, "
        "or leave --resume out to start one"
    )


def is_complete(run_dir: Path) -> ConfigError:
    """Why this run is not continued."""
    return ConfigError(
        f"trial_name: the run in {run_dir} is complete; to train it further, from its newest "
        "snapshot, raise total_train_steps, to train again choose another trial_name and leave "
        "--resume out"
    )


def named_after(cfg: RunConfig, run_dir: Path) -> RunConfig:
    """``cfg`` for the run in ``run_dir``; what differs from its own configuration is said.

    Raises:
        ConfigError: a difference that would give other prompts to the groups of the ledger.
    """
    cfg = dataclasses.replace(cfg, trial_name=run_dir.name)
    if not (run_dir / LEDGER_FILE).is_file():
        _require_no_snapshot(run_dir)
        return cfg  # it was stopped before it began, maybe while it wrote its configuration
    changed = _changes(run_dir, cfg)
    fixed = [line for key, line in changed if _is_one_of(key, _FIXED)]
    if fixed:
        raise ConfigError(
            f"{'; '.join(fixed)}: the run in {run_dir} cannot go on with other prompts than it "
            "began with; leave the change out, or start another run"
        )
    for key, line in changed:
        if not _is_one_of(key, _FREE):
            log.warning("the configuration has changed since this run began: %s", line)
    return cfg


def _is_one_of(key: str, names: Sequence[str]) -> bool:
    """Whether ``key`` is one of ``names``, or a key of one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _require_no_snapshot(run_dir: Path) -> None:
    """A run that has taken a snapshot has trained, and its ledger knows on what."""
    taken = step_folders(run_dir / snapshots.FOLDER)
    if taken:
        raise CheckpointError(
            f"{run_dir / LEDGER_FILE} is missing, and {taken[0]} was taken of a run that had one: "
            "without it nobody knows which prompts were trained; bring it back, or start another "
            "run"
        )


def _differences(
    old: Mapping[str, object], new: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    for name in sorted(old.keys() | new.keys()):
        before, after, key = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{key}.")
        elif before != after:
            yield key, f"{key}: {before!r} became {after!r}"


def rewrite_config(cfg: RunConfig, run_dir: Path, attempt: int) -> None:
    """Let ``config.yaml`` hold ``cfg``; the one before is kept under the number of ``attempt``.

    It is the configuration of the newest step, or of a run that has none.
    """
    path, text = run_dir / CONFIG_FILE, to_yaml(cfg)
    kept = path.with_name(f"config.attempt-{attempt}.yaml")
    with boundary(CheckpointError, f"write {path}"):
        before = path.read_text(encoding="utf-8")
        if before == text:
            return
        if not kept.exists():  # else a resume failed after this: ``before`` is what it asked for
            with replacing(kept) as aside:
                aside.write_text(before, encoding="utf-8")
        with replacing(path) as aside:
            aside.write_text(text, encoding="utf-8")


def changed_bits(run_dir: Path, cfg: RunConfig) -> tuple[str, ...]:
    """A line on each key that differs from the run's own configuration and that weights depend on.

    The number of steps is one of them where the learning rate follows it.
    """
    optimizer = cfg.actor.optimizer
    steady = optimizer.lr_scheduler_type is LRSchedule.CONSTANT and not (
        optimizer.warmup_steps_proportion
    )
    beside = (*_BESIDE, "total_train_steps") if steady else _BESIDE
    return tuple(line for key, line in _changes(run_dir, cfg) if not _is_one_of(key, beside))


def snapshot_to_continue(run_dir: Path, named: Path | None) -> Snapshot | None:
    """``named``, or else the newest good one; None where there is none.

    Raises:
        CheckpointError: ``named`` is damaged; or there are some, and none can be used.
    """
    there = run_dir / snapshots.FOLDER
    return newest_snapshot(there) if named is None else read_snapshot(there / named.resolve().name)


def continue_run(run_dir: Path, ledger: Ledger, found: Snapshot | None) -> Continuation:
    """Begin the next attempt at ``found``, or at the start where there is none.

    Raises:
        CheckpointError: the disk refused.
        DataError: ``metrics.jsonl`` is damaged in its middle.
    """
    ended, step = ledger.attempt, BEFORE_THE_FIRST_STEP
    open_groups: tuple[GroupId, ...] = ()
    next_group = GroupId(0)
    if found is not None:
        run = found.state.run
        step, open_groups, next_group = run.step, run.open_groups, run.next_group_id
    with boundary(CheckpointError, f"set aside what {run_dir} holds of later steps"):
        # Should this be interrupted, the next attempt must find a run that is not complete, and no
        # later snapshot, whose steps may be gone already.
        reopen(run_dir, ended)
        for folder in (snapshots.FOLDER, CHECKPOINTS):
            set_aside(run_dir / folder, after_step=step, attempt=ended)
        earlier = supersede(run_dir, after_step=step, attempt=ended)
    attempt = ledger.begin_attempt(open_groups=open_groups, next_group_id=next_group)
    if found is None:
        log.warning("%s has no snapshot: the run starts over, as attempt %d", run_dir, attempt)
    else:
        log.warning(
            "resuming from %s as attempt %d: step %d comes next, %d open groups are asked again",
            found.folder,
            attempt,
            step + 1,
            len(open_groups),
        )
    return Continuation(snapshot=found, earlier=earlier)


def machine_changes(before: Environment, now: Environment) -> list[str]:
    """What of it decides over bits and is not the same."""
    changes = [
        f"{name} was {getattr(before, name)!r}, is {getattr(now, name)!r}"
        for name in ("torch", "threads", "processor")
        if getattr(before, name) != getattr(now, name)
    ]
    changes += [
        f"the {what} differ"
        for what, name in (("build options of torch", "build"), ("CPU's instructions", "cpu_flags"))
        if getattr(before, name) != getattr(now, name)
    ]
    return changes
