"""The reward of mathematical equality, by the package math-verify.

Knows neither models nor processes. Needs the extra ``math``.
"""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.errors import ConfigError, DataError, RewardError
from offbeat.rewards.reference import reference_text

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")


def math_verify(
    completion: str,
    columns: Mapping[str, object],
    *,
    seconds: int = 4,
    digits: int = 6,
) -> float:
    r"""1.0 when the answer's expression equals the reference as mathematics, otherwise 0.0.

    ``$\frac{1}{2}$``, ``\boxed{0.5}`` and ``1/2`` are equal. An answer without an expression is
    0.0; one that cannot be judged within the time is an error, so that it has no reward.
    math-verify keeps its time with a signal: outside of a reward process, call this in the main
    thread.

    Args:
        completion: the answer.
        columns: the row's columns; the reference is ``answer``, ``ground_truth`` or ``reference``:
            an expression, or text with one in ``$...$`` or ``\boxed{...}``.
        seconds: time for each of reading the reference, reading the answer and comparing, >= 1.
        digits: places after the point to which decimal numbers are compared.

    Raises:
        DataError: the row has no reference, or it has no expression.
        RewardError: the time is over.
        ConfigError: math-verify is not installed.
    """
    try:
        import math_verify as library
        from math_verify.errors import TimeoutException
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "the reward math_verify needs the math-verify package, which is not installed: "
            "pip install math-verify (offbeat's extra math)"
        ) from exc
    reference = reference_text(columns)
    marked = any(mark in reference for mark in _DELIMITERS)
    try:
        gold = library.parse(reference if marked else f"${reference}$", parsing_timeout=seconds)
        if not gold:
            raise DataError(f"the reference answer has no expression: {reference!r}")
        answer = library.parse(completion, parsing_timeout=seconds, raise_on_error=True)
        equal = library.verify(
            gold, answer, float_rounding=digits, timeout_seconds=seconds, raise_on_error=True
        )
    except TimeoutException as exc:
        raise RewardError(f"math-verify was not done after {seconds} s") from exc
    return float(equal)
