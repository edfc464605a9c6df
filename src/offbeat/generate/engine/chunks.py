"""Attention of prompt chunks over their slots' cached keys.

Owns where the rows of several chunks lie behind a step's decode rows, and the blocks they are
attended in. Knows no requests and does not own the cache: its caller has written the rows' keys.

A chunk may start anywhere in its prompt. Its queries see all keys of the slot from position 0 up to
themselves, over a ``key_bucket`` of keys, so they have the bits of one pass over the whole prompt.

Shapes: C slots, K key heads, T positions, D head size, H heads; S pieces of M query rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from offbeat.generate.engine.prompts import Chunk
from offbeat.model.attention import KEY_BLOCK, TOKEN_ROWS, attend_core, key_bucket, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows ``row ..`` of the step: positions ``first .. end`` of ``slot``."""

    row: int
    slot: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Pieces of one shape: ``queries`` [S · M] are rows of the step, ``targets`` [S · M] says where
    results go, ``slots`` [S], ``keys`` T, ``bias`` [S or 1, M, T].
    """

    queries: Tensor
    targets: Tensor
    slots: Tensor
    only: int | None
    keys: int
    bias: Tensor

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> None:
        heads, dim = query.shape[1:]
        kv_heads, s = keys.shape[1], len(self.slots)
        q = query.index_select(0, self.queries).view(s, -1, kv_heads, heads // kv_heads, dim)
        k, v = self._of_slots(keys), self._of_slots(values)
        o = attend_core(q.permute(0, 2, 3, 1, 4), k, v, self.bias, scale)
        out.index_copy_(0, self.targets, o.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim))

    def _of_slots(self, cache: Tensor) -> Tensor:
        if self.only is not None:
            return cache[self.only : self.only + 1, :, : self.keys]
        return cache[:, :, : self.keys].index_select(0, self.slots)


class ChunkLayout:
    """The rows of ``chunks``, padded to a multiple of 16, from row ``begin`` of the step on.

    ``slots`` and ``positions`` [m] say where each row's key belongs; ``tokens`` [m] are its ids;
    ``ends`` are the rows of the last token of each prompt that is complete; ``longest``: the most
    keys that a query sees.
    """

    def __init__(self, chunks: Sequence[Chunk], *, begin: int, device: torch.device) -> None:
        sizes = [c.end - c.begin for c in chunks]
        starts = np.cumsum([0, *sizes])[:-1].tolist()
        self.total = sum(sizes)
        self.rows = round_up(self.total, TOKEN_ROWS)
        self.longest = max(c.end for c in chunks)
        self.ends = [
            begin + start + n - 1
            for c, start, n in zip(chunks, starts, sizes, strict=True)
            if c.last
        ]
        padding = np.zeros(self.rows - self.total, dtype=np.int64)
        self.tokens = _join([c.ids[c.begin : c.end] for c in chunks], padding, device)
        self.positions = _join([np.arange(c.begin, c.end) for c in chunks], padding, device)
        self.slots = _join(
            [np.full(n, c.slot) for c, n in zip(chunks, sizes, strict=True)], padding, device
        )
        pieces = [
            piece
            for c, start in zip(chunks, starts, strict=True)
            for piece in _cut(c, begin + start)
        ]
        self._blocks = _blocks(pieces, nowhere=begin + self.rows, device=device)

    def positions_or(self, scratch: int) -> Tensor:
        """Where keys are written: padding rows at ``scratch``."""
        places = self.positions.clone()
        places[self.total :] = scratch
        return places

    def attend(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> None:
        """Write the chunks' rows of ``out`` [N + 1, H, D]; the last one takes what is not needed.

        Args:
            query: [N, H, D], all rows of the step.
            keys, values: [C, K, T, D], one layer's cache.
            scale: factor on the scores.
        """
        for block in self._blocks:
            block.attend(out, query, keys, values, scale)


def _cut(chunk: Chunk, row: int) -> list[_Piece]:
    """Pieces that end at multiples of ``KEY_BLOCK``: early queries need not meet late keys."""
    edges = [chunk.begin, *range(_next(chunk.begin), chunk.end, KEY_BLOCK), chunk.end]
    return [
        _Piece(row=row + first - chunk.begin, slot=chunk.slot, first=first, end=end)
        for first, end in pairwise(edges)
    ]


def _next(position: int) -> int:
    return (position // KEY_BLOCK + 1) * KEY_BLOCK


def _blocks(pieces: Sequence[_Piece], *, nowhere: int, device: torch.device) -> tuple[_Block, ...]:
    by_shape: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
    for p in pieces:
        by_shape[round_up(p.end - p.first, TOKEN_ROWS), key_bucket(p.end)].append(p)
    return tuple(
        _block(by_shape[shape], *shape, nowhere=nowhere, device=device)
        for shape in sorted(by_shape)
    )


def _block(
    pieces: Sequence[_Piece], rows: int, keys: int, *, nowhere: int, device: torch.device
) -> _Block:
    """``pieces`` padded to ``rows`` queries each: the last one is repeated, its copies dropped."""
    row, first, count = (
        np.array(x)[:, None]
        for x in zip(*((p.row, p.first, p.end - p.first) for p in pieces), strict=True)
    )
    place = np.arange(rows)
    queries = row + np.minimum(place, count - 1)
    targets = np.where(place < count, row + place, nowhere)
    if bool((first == first[0]).all()):
        first = first[:1]
    hidden = np.arange(keys) > (first + place)[:, :, None]
    bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
    queries_t, targets_t, slots, bias_t = (
        torch.from_numpy(x).to(device)
        for x in (
            queries.reshape(-1),
            targets.reshape(-1),
            np.array([p.slot for p in pieces]),
            bias,
        )
    )
    return _Block(
        queries=queries_t,
        targets=targets_t,
        slots=slots,
        only=pieces[0].slot if len(pieces) == 1 else None,
        keys=keys,
        bias=bias_t,
    )


def _join(parts: Sequence[np.ndarray], padding: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, padding])).to(device)
