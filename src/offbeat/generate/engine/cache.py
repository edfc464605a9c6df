"""The slot KV cache: one preallocated tensor for keys, one for values, a row per running request.

Owns the memory and how attention touches it: a decode step over slots in place, and chunks of
prompts that are written to their slots. Knows no requests. A slot's keys stay valid after its
request ended, until the slot is given away: that is what siblings copy.

Shapes: L layers, C slots, K key heads, T positions, D head size; N rows of a step: n decode rows,
which are slots 0..n-1, then the rows of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from offbeat.generate.engine.chunks import ChunkLayout
from offbeat.generate.engine.runs import Run
from offbeat.model.attention import QUERY_ROWS, TOKEN_ROWS, attend_core, key_bucket, round_up
from offbeat.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Attention of each layer of a model: query heads, key heads and the size of a head."""

    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> HeadShape:
        config = model.config
        heads: int = config.num_attention_heads
        return cls(
            heads=heads,
            # Families that never share keys have no such option.
            kv_heads=getattr(config, "num_key_value_heads", heads),
            dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


class SlotCache:
    """Keys and values ``[L, C, K, T, D]``; T grows up to ``limit``.

    In float32 it doubles. A CPU product of bfloat16 copies its operands unless they are contiguous,
    which the keys of a decode step are only when T is what the longest answer needs. So there T
    follows the longest, in steps of 16 or more tokens: a copy now and then instead of at each step.

    The last position is never a token's: rows of a step that carry no token write there, so they
    never touch what a sibling may still copy. Everything starts as zero because a masked key still
    meets a probability of 0, and 0 · NaN is NaN.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._limit = key_bucket(limit + 1)
        self._tight = dtype != torch.float32 and device.type == "cpu"
        size = TOKEN_ROWS if self._tight else min(128, self._limit)
        shape = (layers, slots, kv_heads, size, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that tokens may use at the present size."""
        return self.keys.shape[3] - 1

    @property
    def scratch(self) -> int:
        """The position where rows without a token write."""
        return self.keys.shape[3] - 1

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` tokens per slot. The caller has checked the limit."""
        if positions <= self.capacity:
            return
        size = positions + 1 if self._tight else self.keys.shape[3]
        while size - 1 < positions:
            size = min(2 * size, self._limit)
        size = key_bucket(size)
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros((*old.shape[:3], size, old.shape[4]))
            # The old scratch column becomes an ordinary position: leave it zero.
            new[:, :, :, : old.shape[3] - 1] = old[:, :, :, :-1]
            setattr(self, name, new)

    def clear(self) -> None:
        """Forget everything: after a pass with non-finite weights, NaN would outlive them."""
        self.keys.zero_()
        self.values.zero_()

    def clear_slot(self, slot: int) -> None:
        """Forget ``slot``, for the same reason."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Give ``targets`` the first ``length`` positions of ``source``."""
        for cache in (self.keys, self.values):
            prefix = cache[:, source, :, :length]
            for target in targets:
                cache[:, target, :, :length].copy_(prefix)

    def renumber(self, order: IntArray, length: int) -> None:
        """Give each slot i the first ``length`` positions of what was slot ``order[i]``."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        to, origin = (torch.from_numpy(x).to(self.keys.device) for x in (moved, order[moved]))
        for cache in (self.keys, self.values):
            for layer in cache:
                # One layer at a time: the copy in between stays small.
                prefix = layer[:, :, :length]
                prefix.index_copy_(0, to, prefix.index_select(0, origin))

    def flat(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Indices [N · K] of places in a layer seen as ``[C · K · T, D]``."""
        kv_heads, size = self.keys.shape[2:4]
        heads = torch.arange(kv_heads, device=slots.device)
        return ((slots[:, None] * kv_heads + heads) * size + positions[:, None]).view(-1)


class DecodeContext:
    """Attention of one step: every row writes its key, then reads its own slot's keys.

    Decode row i is slot i. ``positions`` [n]: where it writes (``scratch`` for rows without a
    request); ``visible`` [n]: how many keys it sees, itself included, at least 1; ``longest``: the
    largest of ``visible``, known to the caller without a device sync. ``runs`` cover the n rows.
    ``chunks``: the rows behind them.
    """

    def __init__(
        self,
        cache: SlotCache,
        positions: Tensor,
        visible: Tensor,
        longest: int,
        *,
        runs: Sequence[Run],
        chunks: ChunkLayout | None = None,
    ) -> None:
        self._cache = cache
        self._n = n = len(positions)
        self._chunks = chunks
        self._runs = tuple(runs)
        self.longest = longest
        device = positions.device
        slots = torch.arange(n, device=device)
        if chunks is not None:
            self.longest = max(longest, chunks.longest)
            slots, positions = (
                torch.cat([slots, chunks.slots]),
                torch.cat([positions, chunks.positions_or(cache.scratch)]),
            )
        self._places = cache.flat(slots, positions)
        self._biases = [self._bias(run, visible) for run in self._runs]
        self._padded: Tensor | None = None
        self._out: Tensor | None = None

    def _bias(self, run: Run, visible: Tensor) -> Tensor:
        """[rows, 1, keys]: 0 where visible, -inf where not."""
        place = torch.arange(run.keys, device=visible.device)
        hidden = place[None, :] >= visible[run.begin : run.end, None]
        bias = torch.zeros(hidden.shape, dtype=self._cache.keys.dtype, device=visible.device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        dim = key.shape[-1]
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, dim).index_copy_(0, self._places, new.reshape(-1, dim))
        q = self._with_padded_heads(query, key.shape[1])
        if len(self._runs) == 1 and self._chunks is None:
            return self._attend_run(0, q, keys, values, scale, query.shape)
        out = self._buffer(query)
        for i, run in enumerate(self._runs):
            shape = (run.end - run.begin, *query.shape[1:])
            out[run.begin : run.end] = self._attend_run(i, q, keys, values, scale, shape)
        if self._chunks is not None:
            self._chunks.attend(out, query, keys, values, scale)
        return out[: len(query)]

    def _attend_run(
        self, i: int, q: Tensor, keys: Tensor, values: Tensor, scale: float, shape: Sequence[int]
    ) -> Tensor:
        run = self._runs[i]
        k, v = (c[run.begin : run.end, :, : run.keys] for c in (keys, values))
        o = attend_core(q[run.begin : run.end], k, v, self._biases[i], scale)
        return o[:, :, : shape[1] // k.shape[1], 0].reshape(tuple(shape))

    def _with_padded_heads(self, query: Tensor, kv_heads: int) -> Tensor:
        """The decode rows as [n, K, G, 1, D], G a multiple of ``QUERY_ROWS``."""
        _, heads, dim = query.shape
        ratio = heads // kv_heads
        rows = query[: self._n].reshape(self._n, kv_heads, ratio, 1, dim)
        padded = round_up(ratio, QUERY_ROWS)
        if padded == ratio:
            return rows
        if self._padded is None:
            # One for all layers: what is not written here stays zero.
            self._padded = query.new_zeros(self._n, kv_heads, padded, 1, dim)
        self._padded[:, :, :ratio] = rows
        return self._padded

    def _buffer(self, query: Tensor) -> Tensor:
        """[N + 1, H, D] for all layers: each has used it before the next one writes."""
        if self._out is None:
            self._out = query.new_zeros(len(query) + 1, *query.shape[1:])
        return self._out
