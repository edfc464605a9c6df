"""The folder of a run that begins: its name, and that nothing is in it.

Owns names from the clock and the refusal of names that are taken; makes nothing. Two runs that
choose the same name at the same moment are told apart by who can create the configuration file.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from offbeat.config import RunConfig
from offbeat.errors import ConfigError, boundary
from offbeat.pipeline.resume import is_unfinished

CLOCK_NAMES = 1000
"""Runs of one experiment that may be named in the same second."""


def free_run_dir(cfg: RunConfig) -> Path:
    """The folder of a run that has a name.

    Raises:
        ConfigError: something is in it, or it cannot be made.
    """
    run_dir = _run_dir(cfg)
    with boundary(ConfigError, f"fileroot: the run folder {run_dir} cannot be made"):
        _check_can_be_made(run_dir)
    if cfg.trial_name is not None and _is_taken(run_dir):
        goes_on = "; it was not finished: --resume continues it" if is_unfinished(run_dir) else ""
        raise ConfigError(
            f"trial_name: {run_dir} holds a run already; choose another trial_name, or leave it "
            f"out to have one made from the clock{goes_on}"
        )
    return run_dir


def _check_can_be_made(run_dir: Path) -> None:
    """As far as that can be known without making it."""
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not there.is_dir():
        problem = f"{there} is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} cannot be written to"
    else:
        return
    raise ConfigError(
        f"fileroot: the run folder {run_dir} cannot be made: {problem}; choose another fileroot"
    )


def named_by_clock(cfg: RunConfig) -> RunConfig:
    """``cfg`` with a trial name from the clock, with -2, -3, ... where a run has that one."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, CLOCK_NAMES + 1))):
        named = dataclasses.replace(cfg, trial_name=stamp + suffix)
        if not _is_taken(_run_dir(named)):
            return named
    raise ConfigError(
        f"trial_name: {CLOCK_NAMES} runs of {cfg.experiment_name} began in this second; set it"
    )


def _run_dir(cfg: RunConfig) -> Path:
    """Where the run that has ``cfg``'s name is, or will be."""
    return Path(cfg.fileroot) / cfg.experiment_name / (cfg.trial_name or "")


def _is_taken(run_dir: Path) -> bool:
    return run_dir.exists() and any(run_dir.iterdir())
