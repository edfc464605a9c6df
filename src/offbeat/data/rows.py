"""Rows as they were read: one mapping from column to value for each.

Owns the two types; knows neither where rows come from nor what their columns mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

Row: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Sequence[Row]):
    """The rows of one data set, in file order, and the name that error messages give it."""

    name: str
    items: Sequence[Row]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(name=self.name, items=self.items[index])
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)
