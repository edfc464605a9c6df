"""The slot KV cache: one preallocated tensor for keys, one for values, a row per running request.

Owns the memory and the two ways attention touches it (a decode step; storing a prefill). Knows no
requests. A slot's keys stay valid after its request ended, until the slot is given away: that is
what siblings copy.

Shapes: L layers, C slots, K key heads, T positions, D head size; N rows of a decode step = slots
0..N-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.model.attention import QUERY_ROWS, attend_core, key_bucket, round_up


class SlotCache:
    """Keys and values ``[L, C, K, T, D]``; T grows by doubling up to ``limit``.

    The last position is never a token's: rows of a decode step that carry no request write there,
    so they never touch what a sibling may still copy. Everything starts as zero because a masked
    key still meets a probability of 0, and 0 · NaN is NaN.
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
        shape = (layers, slots, kv_heads, min(128, self._limit), head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that tokens may use at the present size."""
        return self.keys.shape[3] - 1

    @property
    def scratch(self) -> int:
        """The position where rows without a request write."""
        return self.keys.shape[3] - 1

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` tokens per slot. The caller has checked the limit."""
        if positions <= self.capacity:
            return
        size = self.keys.shape[3]
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

    def store(self, layer: int, slot: int, key: Tensor, value: Tensor) -> None:
        """Write a prompt's keys and values ``[n, K, D]`` at positions 0..n-1 of ``slot``."""
        n = key.shape[0]
        self.keys[layer, slot, :, :n] = key.transpose(0, 1)
        self.values[layer, slot, :, :n] = value.transpose(0, 1)

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Give ``targets`` the first ``length`` positions of ``source``."""
        for cache in (self.keys, self.values):
            prefix = cache[:, source, :, :length]
            for target in targets:
                cache[:, target, :, :length].copy_(prefix)


class DecodeContext:
    """Attention of one decode step: row i is slot i, reads and extends that slot's keys.

    ``positions`` [N]: where row i writes (``scratch`` for rows without a request); ``visible`` [N]:
    how many keys row i sees, itself included, at least 1; ``longest``: the largest of ``visible``,
    known to the caller without a device sync.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, visible: Tensor, longest: int) -> None:
        self._cache = cache
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self.longest = longest
        self._keys = key_bucket(longest)
        hidden = torch.arange(self._keys, device=positions.device)[None, :] >= visible[:, None]
        bias = torch.zeros(hidden.shape, dtype=cache.keys.dtype, device=positions.device)
        self._bias = bias.masked_fill_(hidden, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        n, heads, dim = query.shape
        kv_heads = key.shape[1]
        ratio = heads // kv_heads
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        q = query.new_zeros(n, kv_heads, round_up(ratio, QUERY_ROWS), 1, dim)
        q[:, :, :ratio, 0] = query.reshape(n, kv_heads, ratio, dim)
        k, v = (c[:n, :, : self._keys] for c in (keys, values))
        o = attend_core(q, k, v, self._bias, scale)
        return o[:, :, :ratio, 0].reshape(n, heads, dim)
