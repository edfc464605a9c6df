"""Which slots of a decode step are attended together, and over how many keys.

Owns the cost model of decode attention and the order of slots that it wants. Knows no tensors and
no requests: lengths in, ranges of slots and a new order out.

A decode step reads the keys of a range of slots in place, so all slots of a range are computed over
as many keys as the longest of them has. One range over everything makes 63 short answers pay for a
long one; a range for each costs calls. So neighbors of similar length form a *run*, and when
lengths are so mixed that runs would be wasteful, slots are renumbered: long ones first, free ones
last. Moving a slot's keys costs about one step's attention of that slot and is needed when its
answer grows out of a class, every 64 or more tokens. Bits do not depend on the runs: see
``model/attention.py`` on ``key_bucket``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offbeat.model.attention import KEY_BLOCK, TOKEN_ROWS, key_bucket, round_up
from offbeat.types import IntArray

RUN_COST = 256
"""What one more run costs, in keys of one row: a run of 16 rows must save 16 keys to be worth it.

Measured with heads that take 0.5 to 1.5 kB per key on one core.
"""

WASTE = 1.25
"""Slots are renumbered when that makes attention cheaper by this factor."""

_SHORT = KEY_BLOCK // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Slots ``begin`` to ``end``, attended over ``keys`` keys each."""

    begin: int
    end: int
    keys: int

    @property
    def cost(self) -> int:
        return RUN_COST + (self.end - self.begin) * self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The runs that cover the rows of a step, and whether other numbers would be much cheaper."""

    runs: tuple[Run, ...]
    renumber: bool


def key_class(lengths: IntArray) -> IntArray:
    """Class of each length: up to 64, 128 and 192 keys, then doubling; 0 for a length of 0."""
    small = -(-lengths // _SHORT)
    blocks = np.maximum(-(-lengths // KEY_BLOCK), 1)
    large = 3 + np.ceil(np.log2(blocks)).astype(np.int64)
    return np.where(lengths <= KEY_BLOCK, small, large)


def plan_runs(lengths: IntArray) -> RunPlan:
    """Runs over the slots 0..N-1 of which ``lengths`` [N] says how many keys each has.

    A length of 0 is a slot that does not decode; N is a multiple of 16 and some length is not 0.
    """
    n, longest = len(lengths), int(lengths.max())
    running = int(np.count_nonzero(lengths))
    whole = (Run(begin=0, end=n, keys=key_bucket(longest)),)
    too_many_rows = round_up(running, TOKEN_ROWS) < n
    if n * whole[0].keys - int(lengths.sum()) - TOKEN_ROWS * n <= RUN_COST:
        return RunPlan(runs=whole, renumber=too_many_rows)
    # A slot that does not decode goes with whatever is beside it.
    runs = _cheapest(_uniform(lengths))
    ordered = np.zeros_like(lengths)
    ordered[:running] = -np.sort(-lengths[lengths > 0])
    best = _cheapest(_uniform(ordered))
    wasteful = sum(r.cost for r in runs) > WASTE * sum(r.cost for r in best)
    return RunPlan(runs=runs, renumber=too_many_rows or wasteful)


def new_order(lengths: IntArray) -> IntArray:
    """Which slot each slot should get the content of: long ones first, those of length 0 last.

    Only classes are ordered, and what lies among its class already stays.
    """
    classes = key_class(lengths)
    wanted = -np.sort(-classes)
    order = np.arange(len(lengths))
    movers = np.flatnonzero(classes != wanted)
    # Both sides have each class equally often, so sorting both by class pairs them up.
    order[movers[np.argsort(-wanted[movers], kind="stable")]] = movers[
        np.argsort(-classes[movers], kind="stable")
    ]
    return order


def _uniform(lengths: IntArray) -> list[Run]:
    """The longest runs of one class each."""
    decoding = np.flatnonzero(lengths)
    classes = key_class(lengths[decoding])
    firsts = np.flatnonzero(np.diff(classes, prepend=-1))
    longest = np.maximum.reduceat(lengths[decoding], firsts)
    begins = [0, *decoding[firsts[1:]].tolist(), len(lengths)]
    return [
        Run(begin=begin, end=end, keys=key_bucket(int(n)))
        for begin, end, n in zip(begins[:-1], begins[1:], longest, strict=True)
    ]


def _cheapest(parts: list[Run]) -> tuple[Run, ...]:
    """Neighbors joined so that the sum of costs is least; many parts are joined to one."""
    if len(parts) > TOKEN_ROWS:
        return (_join(parts),)
    best: list[tuple[int, tuple[Run, ...]]] = [(0, ())]
    for end in range(1, len(parts) + 1):
        options = []
        for begin in range(end):
            last = _join(parts[begin:end])
            cost, before = best[begin]
            options.append((cost + last.cost, (*before, last)))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _join(parts: list[Run]) -> Run:
    return Run(begin=parts[0].begin, end=parts[-1].end, keys=max(r.keys for r in parts))
