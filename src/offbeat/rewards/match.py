"""Rewards that compare an answer with the row's reference: as text, or as a number.

Owns what counts as the number of a text; knows neither models nor processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from offbeat.errors import DataError
from offbeat.rewards.reference import reference_text

# A minus sign belongs to the number unless what is subtracted from stands right before it (16-3);
# a point or a slash does only when digits follow, so 1/2 is one number and 5. is 5.
_SIGN = r"(?:(?<![\w)])[-+]\$?|\$[-+]?)?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    rf"{_SIGN}(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}}(?![\w.]))?(?:/{_DIGITS})?"
)


def exact_match(
    completion: str,
    columns: Mapping[str, object],
    *,
    ignore_case: bool = False,
    ignore_whitespace: bool = False,
) -> float:
    """1.0 when the answer is the reference, otherwise 0.0; white space at the ends never counts.

    Args:
        completion: the answer.
        columns: the row's columns; the reference is ``answer``, ``ground_truth`` or ``reference``.
        ignore_case: letters are compared without their case.
        ignore_whitespace: runs of white space count as one space.

    Raises:
        DataError: the row has no reference.
    """

    def plain(text: str) -> str:
        text = " ".join(text.split()) if ignore_whitespace else text.strip()
        return text.casefold() if ignore_case else text

    return float(plain(completion) == plain(reference_text(columns)))


def numeric_match(
    completion: str,
    columns: Mapping[str, object],
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> float:
    """1.0 when the last number of the answer is the last number of the reference, otherwise 0.0.

    Numbers are compared by value, exactly: ``1,000``, ``1000.0``, ``1e3`` and ``2000/2`` are equal.
    Units do not count: ``$5`` and ``5 %`` are 5. In a reference with ``####`` only what follows it
    counts.

    Args:
        completion: the answer.
        columns: the row's columns; the reference is ``answer``, ``ground_truth`` or ``reference``.
        relative: allowed difference as a share of the reference.
        absolute: allowed difference; the larger of both holds.

    Raises:
        DataError: the row has no reference, or it has no number.
    """
    if relative < 0 or absolute < 0:
        raise ValueError(f"tolerances must be >= 0, got relative={relative}, absolute={absolute}")
    reference = reference_text(columns)
    wanted = last_number(reference.rpartition("####")[2])
    if wanted is None:
        raise DataError(f"the reference answer has no number: {reference!r}")
    given = last_number(completion)
    if given is None:
        return 0.0
    allowed = max(Fraction(relative) * abs(wanted), Fraction(absolute))
    return float(abs(given - wanted) <= allowed)


def last_number(text: str) -> Fraction | None:
    """The last number of ``text``, exactly; None when there is none."""
    found = [_value(match) for match in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))]
    values = [value for value in found if value is not None]
    return values[-1] if values else None


def _value(written: str) -> Fraction | None:
    """The number that ``written`` is; None where it divides by zero."""
    over, _, under = re.sub(r"[$,]", "", written).partition("/")
    divisor = Fraction(under) if under else Fraction(1)
    if divisor == 0:
        return None
    return Fraction(over) / divisor
