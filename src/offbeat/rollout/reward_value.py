"""What a reward function may return, checked where it was returned.

Owns the one rule of what counts as a reward: a finite number (int, float, bool, a numpy scalar, an
array or tensor without dimensions), or a mapping ``{"reward": number, **parts}`` whose parts are
finite numbers too. Imports no numpy and no torch: a reward process that needs neither stays without
them.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping

from offbeat.errors import RewardError

EXPECTED = 'a finite number or a mapping {"reward": number, **parts}'

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80


def _number(value: object, name: str) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        # numpy.bool_ is no numbers.Real, and neither is an array or tensor that holds one number.
        value = value.item()  # type: ignore[attr-defined]  # whatever has ndim 0 has item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{name} {_shown.repr(value)}, expected {EXPECTED}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{name} {_shown.repr(value)}, expected {EXPECTED}")
    return number


def reward_of(returned: object) -> tuple[float, dict[str, float]]:
    """The value and the parts of what a reward function returned.

    Raises:
        RewardError: it is not a reward; the message shows what it was.
    """
    if not isinstance(returned, Mapping):
        return _number(returned, "returned"), {}
    if "reward" not in returned:
        found = ", ".join(sorted(str(key) for key in returned)) or "none"
        raise RewardError(f'returned a mapping without the key "reward"; its keys: {found}')
    parts = {
        str(key): _number(part, f"returned the part {str(key)!r} =")
        for key, part in returned.items()
        if key != "reward"
    }
    return _number(returned["reward"], 'returned "reward" ='), parts
