"""Where a row keeps the right answer. Knows no reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.errors import DataError

REFERENCE_COLUMNS = ("answer", "ground_truth", "reference", "reward_model")
"""Looked up in this order; ``reward_model`` is a mapping that holds ``ground_truth``."""


def reference_of(columns: Mapping[str, object], names: Sequence[str] = REFERENCE_COLUMNS) -> object:
    """The right answer of a row: the first of ``names`` that it has.

    Raises:
        DataError: it has none of them; the message names the columns that it has.
    """
    for name in names:
        value = columns.get(name)
        if name == "reward_model" and isinstance(value, Mapping):
            value = value.get("ground_truth")
        if value is not None:
            return value
    wanted = ", ".join("reward_model.ground_truth" if n == "reward_model" else n for n in names)
    found = ", ".join(map(str, columns)) or "none"
    raise DataError(
        f"the row has no reference answer: none of the columns {wanted}; its other columns: "
        f"{found}. Name the right one with train_dataset.columns: {{answer: COLUMN}}"
    )


def reference_text(columns: Mapping[str, object]) -> str:
    """The right answer of a row as text; numbers as Python writes them. Raises DataError."""
    value = reference_of(columns)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"the reference answer must be text or a number, got {type(value).__name__}"
        )
    return str(value)
