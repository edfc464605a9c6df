"""What is said of failed reward calls: the first of a kind in full, then how many there were.

Knows neither processes nor answers.
"""

from __future__ import annotations

import logging
import re
from collections import Counter

from offbeat.rollout.reward_pool import RewardFailure

log = logging.getLogger(__name__)

TIMEOUT = "RewardTimeout"


class FailureLog:
    """Reports failed calls of reward functions, and keeps the first of all.

    A kind is a function and an error class. Its first failure is a warning that names the line, and
    a debug message with the traceback; the 10th, 100th, ... are one line each.
    """

    def __init__(self) -> None:
        self.first: RewardFailure | None = None
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, label: str, failure: RewardFailure) -> None:
        """A call of the function called ``label`` failed."""
        if self.first is None:
            self.first = failure
        kind = (label, failure.error)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            log.warning("%s", _in_full(label, failure))
            if failure.traceback:
                log.debug("%s", failure.traceback)
        elif _is_power_of_ten(count):
            log.warning(
                "reward function %s: %d calls failed with %s, the last: %s",
                label,
                count,
                failure.error,
                failure.reason,
            )


def _in_full(label: str, failure: RewardFailure) -> str:
    limit = " (rollout.reward_timeout_seconds)" if failure.error == TIMEOUT else ""
    return (
        f"reward function {label}: {failure.reason}{limit}{raised_at(failure)}; such an answer is "
        "left out, not counted as 0"
    )


def raised_at(failure: RewardFailure) -> str:
    """Where the innermost call of its traceback stands, in parentheses; empty without one."""
    calls = re.findall(r'^  File "(.+)", line (\d+), in ', failure.traceback, flags=re.MULTILINE)
    return f" ({calls[-1][0]}:{calls[-1][1]})" if calls else ""


def _is_power_of_ten(count: int) -> bool:
    return count > 1 and str(count).rstrip("0") == "1"
