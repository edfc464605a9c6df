"""The slot cache grows without losing anything, and unused places stay finite."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.generate.engine.cache import SlotCache
from offbeat.model.attention import key_bucket


def cache(limit: int, dtype: torch.dtype = torch.float32) -> SlotCache:
    return SlotCache(
        layers=2,
        slots=3,
        kv_heads=2,
        head_dim=4,
        limit=limit,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def store(slots: SlotCache, layer: int, slot: int, key: Tensor, value: Tensor) -> None:
    """Write keys and values ``[n, K, D]`` at positions 0..n-1 of ``slot``."""
    for cache, new in ((slots.keys, key), (slots.values, value)):
        cache[layer, slot, :, : len(new)] = new.transpose(0, 1)


def test_growth_keeps_tokens_clears_the_old_scratch_place_and_fits_a_bucket() -> None:
    slots = cache(500)
    key = torch.randn(100, 2, 4)
    store(slots, 1, 2, key, -key)
    slots.keys[:, :, :, slots.scratch] = torch.nan
    slots.values[:, :, :, slots.scratch] = torch.nan
    for positions in (100, 127, 128, 200, 384, 500):
        slots.reserve(positions)
        size = slots.keys.shape[3]
        assert slots.capacity >= positions
        # Every number of keys that a decode step may ask for is there.
        assert key_bucket(slots.capacity) <= size
        assert slots.scratch == size - 1
    assert torch.equal(slots.keys[1, 2, :, :100], key.transpose(0, 1))
    assert torch.equal(slots.values[1, 2, :, :100], -key.transpose(0, 1))
    assert bool(torch.isfinite(slots.keys).all())
    assert bool(torch.isfinite(slots.values).all())


def test_any_limit_can_be_reserved() -> None:
    for limit in (1, 15, 16, 126, 127, 128, 191, 192, 300, 383, 384, 1000):
        slots = cache(limit)
        slots.reserve(limit)
        assert slots.capacity >= limit
        assert key_bucket(limit) <= slots.keys.shape[3]


def test_in_bfloat16_the_keys_of_the_longest_answer_are_contiguous() -> None:
    """A CPU product of bfloat16 copies what is not."""
    slots = cache(1000, torch.bfloat16)
    for n in (1, 15, 17, 100, 150, 191, 193, 380, 385, 900):
        slots.reserve(n)
        assert slots.keys[0, :, :, : key_bucket(n)].is_contiguous()


def test_renumbering_moves_prefixes_and_loses_none() -> None:
    slots = cache(100)
    for slot in range(3):
        key = torch.full((9, 2, 4), 1.0 + slot)
        store(slots, 0, slot, key, -key)
    slots.renumber(np.array([2, 1, 0]), 9)
    assert slots.keys[0, :, 0, 8, 0].tolist() == [3.0, 2.0, 1.0]
    assert slots.values[0, :, 1, 0, 3].tolist() == [-3.0, -2.0, -1.0]
    assert not bool(slots.keys[0, :, :, 9:].any())


def test_a_copy_takes_the_prefix_of_both_and_nothing_more() -> None:
    slots = cache(100)
    for layer in range(2):
        key = torch.full((9, 2, 4), 1.0 + layer)
        store(slots, layer, 0, key, torch.full_like(key, 3.0))
    slots.copy_prefix(0, [2], 5)
    for layer in range(2):
        assert bool((slots.keys[layer, 2, :, :5] == 1.0 + layer).all())
        assert bool((slots.values[layer, 2, :, :5] == 3.0).all())
    assert bool((slots.keys[:, 2, :, 5:] == 0).all())
    assert bool((slots.keys[:, 1] == 0).all())


def test_clear_forgets_everything() -> None:
    slots = cache(100)
    slots.keys.fill_(torch.nan)
    slots.values.fill_(torch.nan)
    slots.clear()
    assert not bool(slots.keys.any())
    assert not bool(slots.values.any())
