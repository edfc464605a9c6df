"""Weights arrive bit for bit, or the reader says what is wrong; nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.errors import WeightSyncError
from offbeat.types import PolicyVersion, WeightUpdate
from offbeat.weights.memory import DTYPES, MemoryPublisher, MemorySubscriber, digest_of_params

V1, V2 = PolicyVersion(1), PolicyVersion(2)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=gen),
        "norm": torch.randn(5, generator=gen).to(torch.bfloat16),
        "scale": torch.randn((), generator=gen),
        "empty": torch.empty(0, 3),
        "mask": torch.rand(3, generator=gen) > 0.5,
        "ids": torch.randint(0, 9, (4,), generator=gen),
    }


def zeros_like(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) for name, p in params.items()}


@pytest.fixture
def publisher() -> Iterator[MemoryPublisher]:
    with MemoryPublisher(tensors(0).items()) as publisher:
        yield publisher


@pytest.mark.invariant("I14")
def test_committed_parameters_have_the_announced_digest_and_the_same_bits() -> None:
    source = tensors(0)
    live = zeros_like(dict(reversed(source.items())))
    with MemoryPublisher(source.items()) as publisher:
        update = publisher.publish(V1)
        subscriber = MemorySubscriber(live)
        subscriber.stage(update)
        assert subscriber.digest_of_live() != update.digest
        subscriber.commit(V1)
    assert subscriber.digest_of_live() == update.digest == digest_of_params(source)
    for name, p in source.items():
        assert torch.equal(live[name], p)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_of_torch_and_safetensors_makes_the_round_trip(dtype: torch.dtype) -> None:
    bits = torch.arange(16, dtype=torch.uint8) if dtype != torch.bool else torch.ones(16)
    source = bits.view(dtype) if dtype != torch.bool else bits.bool()
    live = {"x": torch.zeros_like(source)}
    with MemoryPublisher([("x", source)]) as publisher:
        update = publisher.publish(V1)
        subscriber = MemorySubscriber(live)
        subscriber.stage(update)
        subscriber.commit(V1)
        with safe_open(update.uri, framework="pt") as file:
            assert file.get_tensor("x").dtype == dtype
    assert torch.equal(live["x"].view(torch.uint8), source.view(torch.uint8))


def test_publish_follows_in_place_updates_of_the_live_parameters() -> None:
    source = {"w": torch.nn.Parameter(torch.zeros(4))}
    live = {"w": torch.nn.Parameter(torch.full((4,), -1.0))}
    with MemoryPublisher(source.items()) as publisher:
        subscriber = MemorySubscriber(live)
        first = publisher.publish(V1)
        with torch.no_grad():
            source["w"].add_(1)
        second = publisher.publish(V2)
        subscriber.stage(second)
        subscriber.commit(V2)
    assert first.digest != second.digest
    assert live["w"].tolist() == [1.0] * 4
    assert live["w"].requires_grad


def test_float32_file_is_converted_to_bfloat16_parameters() -> None:
    source = torch.tensor([1.0, 1.00390625, 3.14159])
    live = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with MemoryPublisher([("w", source)]) as publisher:
        subscriber = MemorySubscriber(live)
        subscriber.stage(publisher.publish(V1))
        subscriber.commit(V1)
    assert torch.equal(live["w"], source.to(torch.bfloat16))


def test_integers_are_never_converted_to_floats() -> None:
    with MemoryPublisher([("w", torch.arange(3))]) as publisher:
        subscriber = MemorySubscriber({"w": torch.zeros(3)})
        update = publisher.publish(V1)
        with pytest.raises(WeightSyncError, match=r"'w' is published as torch\.int64"):
            subscriber.stage(update)


@pytest.mark.invariant("I14")
def test_wrong_digest_is_refused_and_both_digests_are_named(publisher: MemoryPublisher) -> None:
    update = publisher.publish(V1)
    live = zeros_like(tensors(0))
    subscriber = MemorySubscriber(live)
    with pytest.raises(WeightSyncError, match=rf"digest {update.digest}, announced was 00ff"):
        subscriber.stage(dataclasses.replace(update, digest="00ff"))
    assert not live["embed"].any()


@pytest.mark.invariant("I14")
def test_reader_that_stages_after_the_buffer_was_overwritten_is_refused() -> None:
    source = tensors(0)
    with MemoryPublisher(source.items()) as publisher:
        late = publisher.publish(V1)
        source["embed"].mul_(2)
        publisher.publish(V2)
        with pytest.raises(WeightSyncError, match="have digest"):
            MemorySubscriber(source).stage(late)


def test_another_size_is_refused(publisher: MemoryPublisher) -> None:
    update = publisher.publish(V1)
    with pytest.raises(WeightSyncError, match=f"have {update.nbytes} bytes"):
        MemorySubscriber(tensors(0)).stage(dataclasses.replace(update, nbytes=update.nbytes + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": None, "embedding": torch.zeros(7, 5)}, "'embed' is published but unknown"),
        ({"extra": torch.zeros(1)}, "'extra' is not published"),
        ({"embed": torch.zeros(5, 7)}, r"'embed' is published as torch\.float32 \(7, 5\)"),
    ],
)
def test_tensor_that_does_not_match_is_named(
    publisher: MemoryPublisher, change: dict[str, torch.Tensor | None], message: str
) -> None:
    live = {name: p for name, p in {**tensors(0), **change}.items() if p is not None}
    update = publisher.publish(V1)
    with pytest.raises(WeightSyncError, match=message):
        MemorySubscriber(live).stage(update)


def test_commit_of_what_is_not_staged_is_refused(publisher: MemoryPublisher) -> None:
    subscriber = MemorySubscriber(zeros_like(tensors(0)))
    with pytest.raises(WeightSyncError, match="commit of version 1: nothing is staged"):
        subscriber.commit(V1)
    subscriber.stage(publisher.publish(V2))
    with pytest.raises(WeightSyncError, match="commit of version 1: version 2 is staged"):
        subscriber.commit(V1)
    subscriber.commit(V2)
    with pytest.raises(WeightSyncError, match="nothing is staged"):
        subscriber.commit(V2)


def test_failed_stage_leaves_nothing_staged(publisher: MemoryPublisher) -> None:
    subscriber = MemorySubscriber(zeros_like(tensors(0)))
    update = publisher.publish(V1)
    subscriber.stage(update)
    with pytest.raises(WeightSyncError):
        subscriber.stage(dataclasses.replace(update, digest="00ff", version=V2))
    with pytest.raises(WeightSyncError, match="nothing is staged"):
        subscriber.commit(V1)


def test_parameter_that_changed_its_shape_is_refused_by_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    with MemoryPublisher([("w", parameter)]) as publisher:
        parameter.data = torch.zeros(5)
        with pytest.raises(WeightSyncError, match=r"'w' is torch\.float32 \(5,\)"):
            publisher.publish(V1)


def test_closed_publisher_refuses_and_its_memory_is_gone(publisher: MemoryPublisher) -> None:
    update = publisher.publish(V1)
    publisher.close()
    publisher.close()
    with pytest.raises(WeightSyncError, match="closed"):
        publisher.publish(V2)
    with pytest.raises(WeightSyncError, match="FileNotFoundError"):
        MemorySubscriber(tensors(0)).stage(update)


def test_staged_weights_survive_their_publisher() -> None:
    source, live = tensors(0), zeros_like(tensors(0))
    subscriber = MemorySubscriber(live)
    with MemoryPublisher(source.items()) as publisher:
        subscriber.stage(publisher.publish(V1))
    subscriber.commit(V1)
    assert torch.equal(live["embed"], source["embed"])


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("offbeat-weights")


def test_commit_and_close_release_every_mapping() -> None:
    before = mappings()
    with MemoryPublisher(tensors(0).items()) as publisher:
        subscriber = MemorySubscriber(zeros_like(tensors(0)))
        update = publisher.publish(V1)
        for _ in range(3):
            subscriber.stage(update)
        assert mappings() == before + 2
        subscriber.commit(V1)
        assert mappings() == before + 1
    assert mappings() == before


class Doubled:
    """Live weights in a form of their own: twice the values, made by ``stage``."""

    reads_late = False

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: torch.empty_like(p, device="meta") for name, p in params.items()}
        self.held = {name: 2 * p for name, p in params.items()}
        self.fails = False

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        new = {}
        for name, view in tensors.items():
            if self.fails:
                raise RuntimeError(f"no room for {name}")
            new[name] = 2 * view
        return lambda: self.held.update(new)

    def read(self) -> Mapping[str, torch.Tensor]:
        return {name: p / 2 for name, p in self.held.items()}


def test_live_weights_of_another_form_are_prepared_by_stage_and_swapped_by_commit() -> None:
    source = {"w": torch.arange(4.0), "b": torch.ones(2)}
    live = Doubled(zeros_like(source))
    with MemoryPublisher(source.items()) as publisher:
        update = publisher.publish(V1)
        subscriber = MemorySubscriber(live)
        before = mappings()
        subscriber.stage(update)
        assert mappings() == before
        assert not live.held["w"].any()
        source["w"].fill_(-1)
        publisher.publish(V2)
    subscriber.commit(V1)
    assert live.held["w"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert subscriber.digest_of_live() == update.digest


def test_live_weights_of_another_form_refuse_what_does_not_match() -> None:
    live = Doubled({"w": torch.zeros(3)})
    with MemoryPublisher([("w", torch.zeros(4))]) as publisher:
        update = publisher.publish(V1)
        with pytest.raises(WeightSyncError, match=r"published as torch\.float32 \(4,\)"):
            MemorySubscriber(live).stage(update)


def test_failure_to_prepare_is_a_failed_stage_that_holds_nothing() -> None:
    live = Doubled({"w": torch.zeros(3)})
    before = mappings()
    with MemoryPublisher([("w", torch.ones(3))]) as publisher:
        subscriber = MemorySubscriber(live)
        update = publisher.publish(V1)
        live.fails = True
        with pytest.raises(WeightSyncError, match="no room for w"):
            subscriber.stage(update)
        with pytest.raises(WeightSyncError, match="nothing is staged"):
            subscriber.commit(V1)
        assert not live.held["w"].any()
        live.fails = False
        subscriber.stage(update)
        subscriber.commit(V1)
    assert live.held["w"].tolist() == [2.0] * 3
    assert mappings() == before


PUBLISH_AND_WAIT = """
import sys, torch
from offbeat.weights.memory import MemoryPublisher
publisher = MemoryPublisher([("w", torch.arange(1000.0))])
update = publisher.publish(3)
print(update.uri, update.nbytes, update.digest, flush=True)
sys.stdin.read()
"""


@pytest.mark.invariant("I13")
def test_memory_of_another_process_is_readable_and_vanishes_when_it_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    child = subprocess.Popen(
        [sys.executable, "-c", PUBLISH_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout:
        uri, nbytes, digest = child.stdout.readline().split()
        version = PolicyVersion(3)
        update = WeightUpdate(version=version, uri=uri, nbytes=int(nbytes), digest=digest)
        live = {"w": torch.zeros(1000)}
        subscriber = MemorySubscriber(live)
        subscriber.stage(update)
        child.send_signal(signal.SIGKILL)
        child.wait()
        subscriber.commit(version)
    assert torch.equal(live["w"], torch.arange(1000.0))
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(WeightSyncError, match="FileNotFoundError"):
        subscriber.stage(update)


def test_copy_of_the_file_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with MemoryPublisher(model.named_parameters()) as publisher:
        shutil.copyfile(publisher.publish(V1).uri, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert digest_of_params(dict(loaded.named_parameters())) == digest_of_params(
        dict(model.named_parameters())
    )
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
