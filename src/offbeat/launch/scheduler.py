"""Which scheduler a configuration names: the literal dictionary and its one reader.

Knows no worker and no configuration object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.launch.inline import InlineScheduler
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import Scheduler


def _inline(_log_dir: Path) -> InlineScheduler:
    # Inline services log through the controller's own logging: there is no file of theirs.
    return InlineScheduler()


SCHEDULERS: Mapping[str, Callable[[Path], Scheduler]] = {
    "local": LocalScheduler,
    "inline": _inline,
}


def make_scheduler(kind: str, log_dir: Path) -> Scheduler:
    """The scheduler called ``kind``, to be entered as an async context; logs go to ``log_dir``.

    Raises:
        ConfigError: there is no such scheduler.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(f"scheduler.type: {kind!r} is not one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[kind](log_dir)
