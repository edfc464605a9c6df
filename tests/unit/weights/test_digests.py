"""The digest of each published tensor."""

from __future__ import annotations

import os

import pytest
import torch
import xxhash

from offbeat.errors import WeightSyncError
from offbeat.types import PolicyVersion
from offbeat.weights.digests import tensor_digests
from offbeat.weights.memory import MemoryPublisher

V1, V2 = PolicyVersion(1), PolicyVersion(2)


def model() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {
        "norm": torch.randn(5, generator=gen).to(torch.bfloat16),
        "large": torch.randn(400_000, generator=gen),  # more than one read
        "embed": torch.randn(7, 5, generator=gen),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.invariant("I05")
def test_each_tensor_has_the_digest_of_its_own_bytes_in_the_order_of_the_file() -> None:
    tensors = model()
    with MemoryPublisher(tensors.items()) as publisher:
        found = tensor_digests(publisher.publish(V1))
    assert list(found) == ["embed", "empty", "large", "norm"]
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert found[name] == xxhash.xxh3_64_hexdigest(content), name


@pytest.mark.invariant("I05")
def test_one_flipped_bit_changes_the_digest_of_its_tensor_and_of_no_other() -> None:
    tensors = model()
    with MemoryPublisher(tensors.items()) as publisher:
        before = tensor_digests(publisher.publish(V1))
        tensors["large"].view(torch.int32)[-1] ^= 1
        after = tensor_digests(publisher.publish(V2))
    assert {name for name in before if before[name] != after[name]} == {"large"}


def test_weights_that_are_gone_are_named() -> None:
    with MemoryPublisher(model().items()) as publisher:
        update = publisher.publish(V1)
    with pytest.raises(WeightSyncError, match=f"read version 1 from /proc/{os.getpid()}/fd/"):
        tensor_digests(update)
