"""oneDNN's products: right values, one row's bits everywhere, weights that follow and swap."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.algo.logprobs import CHUNK, chunked_logprobs
from offbeat.errors import ModelError
from offbeat.model.linear import (
    PackedLinear,
    TrainedLinear,
    linear,
    linear_shapes,
    output_head,
    pack_for_inference,
    packing_works,
    prepare_for_training,
)
from offbeat.types import PolicyVersion
from offbeat.weights.memory import MemoryPublisher, MemorySubscriber

INPUTS, OUTPUTS, VOCAB = 48, 20, 37
SHAPES = {(INPUTS, OUTPUTS), (32, VOCAB)}
plain = torch.nn.functional.linear

available = pytest.mark.skipif(
    not packing_works(torch.float32, SHAPES), reason="torch has no such products here"
)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def layer(random: torch.Generator) -> nn.Linear:
    return seeded_layer(random)


def seeded_layer(random: torch.Generator, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return layer


def tiny_model(*, tied: bool, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.arange(16)[None], use_cache=False).logits[0]
    return out


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Whether it can be used


def test_builds_without_the_operations_do_not_pack() -> None:
    assert not packing_works(torch.float32, SHAPES, ops=SimpleNamespace())


def real_ops(**replaced: Callable[..., Tensor]) -> SimpleNamespace:
    ops = torch.ops.mkldnn
    kept = {
        "_reorder_linear_weight": ops._reorder_linear_weight,
        "_linear_pointwise": ops._linear_pointwise,
    }
    return SimpleNamespace(**{**kept, **replaced})


def refusing(*args: object) -> Tensor:
    raise RuntimeError("not on this CPU")


def of_another_signature(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor, w: Tensor, b: Tensor | None, *rest: object) -> Tensor:
    return 2 * torch.ops.mkldnn._linear_pointwise(x, w, b, *rest)


def aware_of_its_neighbors(x: Tensor, w: Tensor, b: Tensor | None, *rest: object) -> Tensor:
    y = torch.ops.mkldnn._linear_pointwise(x, w, b, *rest)
    return y * (1 + 1e-6 * (len(x) > 100))


def blind_to_strides(x: Tensor, w: Tensor, b: Tensor | None, *rest: object) -> Tensor:
    if not w.is_mkldnn and not w.is_contiguous():
        w = w.t().reshape(w.shape)
    return torch.ops.mkldnn._linear_pointwise(x, w, b, *rest)


def other_bits_unpacked(x: Tensor, w: Tensor, b: Tensor | None, *rest: object) -> Tensor:
    y = torch.ops.mkldnn._linear_pointwise(x, w, b, *rest)
    return y if w.is_mkldnn else y * (1 + 1e-6)


@available
@pytest.mark.parametrize(
    "product",
    [
        refusing,
        of_another_signature,
        doubled,
        aware_of_its_neighbors,
        blind_to_strides,
        other_bits_unpacked,
    ],
)
def test_products_that_cannot_be_relied_on_are_not_used(product: Callable[..., Tensor]) -> None:
    assert packing_works(torch.float32, SHAPES, ops=real_ops())
    assert not packing_works(torch.float32, SHAPES, ops=real_ops(_linear_pointwise=product))


def test_dtypes_without_a_promise_do_not_pack() -> None:
    assert not packing_works(torch.float64, SHAPES)


@available
def test_layers_that_would_be_replaced_are_those_that_are_checked() -> None:
    model = tiny_model(tied=True)
    assert linear_shapes(model) == {(32, 32), (32, 16), (32, 48), (48, 32), (32, VOCAB)}


# Values and bits


@available
@pytest.mark.invariant("I07")
@pytest.mark.parametrize("inputs", [INPUTS, 600])
def test_a_row_has_the_same_bits_in_every_pass_packed_or_trained(
    inputs: int, random: torch.Generator
) -> None:
    source = nn.Linear(inputs, OUTPUTS)
    trained, packed = TrainedLinear(source), PackedLinear(source)
    x = torch.randn(CHUNK + 64, inputs, generator=random)
    with torch.no_grad():
        together = packed(x)
    torch.testing.assert_close(together, source(x), rtol=1e-4, atol=1e-5)
    for n in (16, 48, 64, CHUNK):
        for start in (0, 16, len(x) - n):
            rows = slice(start, start + n)
            with torch.no_grad():
                assert torch.equal(packed(x[rows]), together[rows])
            assert torch.equal(trained(x[rows]), together[rows])


@available
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_are_those_of_the_ordinary_layer(
    with_bias: bool, random: torch.Generator
) -> None:
    found = []
    w, b = torch.randn(OUTPUTS, INPUTS, generator=random), torch.randn(OUTPUTS, generator=random)
    x, g = (torch.randn(2, 16, n, generator=random) for n in (INPUTS, OUTPUTS))
    for product, dtype in ((linear, torch.float32), (plain, torch.float64)):
        given = (x, w, *([b] if with_bias else []))
        leaves = [t.detach().to(dtype).clone().requires_grad_() for t in given]
        y = product(*leaves)
        # Not contiguous, as gradients that come out of a transposition are.
        y.backward(g.to(dtype).transpose(0, 1).contiguous().transpose(0, 1))
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype is torch.float32
        assert float((ours.double() - exact).norm()) <= 1e-6 * float(exact.norm())


@available
def test_only_the_gradients_asked_for_are_computed(layer: nn.Linear) -> None:
    trained = TrainedLinear(layer)
    layer.weight.requires_grad_(False)
    x = torch.ones(16, INPUTS)
    trained(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad.tolist() == [16.0] * OUTPUTS


@available
def test_trained_layer_follows_every_change_of_its_weight(layer: nn.Linear) -> None:
    trained = TrainedLinear(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    x = torch.ones(16, INPUTS)
    for _ in range(3):
        before = trained(x)
        before.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = trained(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, layer(x), rtol=1e-4, atol=1e-5)


@available
def test_weight_that_changes_before_its_backward_pass_is_an_error(layer: nn.Linear) -> None:
    trained = TrainedLinear(layer)
    y = trained(torch.ones(16, INPUTS, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@available
def test_recomputed_activations_give_the_same_gradients(layer: nn.Linear) -> None:
    trained = TrainedLinear(layer)
    x = torch.linspace(-1, 1, 16 * INPUTS).view(16, INPUTS)
    found = []
    for again in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(trained, leaf, use_reentrant=False) if again else trained(leaf)
        y.sin().sum().backward()
        found.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@available
def test_autocast_and_other_dtypes_take_the_ordinary_product(random: torch.Generator) -> None:
    layer = seeded_layer(random)
    x = torch.randn(16, INPUTS, generator=random)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = TrainedLinear(layer)(x)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, layer(x))
    wide = layer.double()
    assert torch.equal(TrainedLinear(wide)(x.double()), wide(x.double()))


# Whole models


@available
@pytest.mark.invariant("I07")
@pytest.mark.parametrize("tied", [True, False])
def test_packed_and_trained_models_have_the_same_logits(tied: bool) -> None:
    exact, trained, packed = (tiny_model(tied=tied) for _ in range(3))
    prepare_for_training(trained)
    pack_for_inference(packed)
    assert torch.equal(logits(trained), logits(packed))
    torch.testing.assert_close(logits(packed), logits(exact), rtol=1e-4, atol=1e-5)


@available
@pytest.mark.parametrize("tied", [True, False])
def test_preparing_for_training_keeps_every_parameter(tied: bool) -> None:
    model = tiny_model(tied=tied)
    before = dict(model.named_parameters(remove_duplicate=False))
    prepare_for_training(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert not any(type(m) is nn.Linear for m in model.modules())


@available
@pytest.mark.parametrize("tied", [True, False])
def test_trained_model_gets_the_gradients_of_the_ordinary_one(tied: bool) -> None:
    ordinary, trained = tiny_model(tied=tied), tiny_model(tied=tied)
    prepare_for_training(trained)
    for model in (ordinary, trained):
        out = model(torch.arange(16)[None], use_cache=False).logits
        torch.log_softmax(out, -1)[..., 3].sum().backward()
    for (name, a), b in zip(trained.named_parameters(), ordinary.parameters(), strict=True):
        assert float((a.grad - b.grad).norm()) <= 1e-4 * float(b.grad.norm()) + 1e-6, name


@available
@pytest.mark.parametrize("tied", [True, False])
def test_packed_model_holds_no_ordinary_linear_weight(tied: bool) -> None:
    model = tiny_model(tied=tied)
    before = values(model)
    weights = pack_for_inference(model)
    assert {n for n, _ in model.named_parameters()} == {
        n for n in before if "embed" in n or "norm" in n or n.endswith("bias")
    }
    assert {n: (t.shape, t.dtype) for n, t in weights.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in before.items()
    }


@available
@pytest.mark.parametrize(
    "use",
    [
        lambda w: plain(torch.ones(16, INPUTS), w),
        lambda w: torch.ones(16, INPUTS) @ w.T,
        lambda w: torch.ones(OUTPUTS, INPUTS).copy_(w),
        lambda w: w.sum(),
        lambda w: w.data.to("cpu"),
    ],
)
def test_packed_layer_shows_shape_and_dtype_of_its_weight_and_refuses_its_use(
    layer: nn.Linear, use: Callable[[Tensor], object]
) -> None:
    weight = PackedLinear(layer).weight
    assert (weight.shape, weight.dtype, weight.is_meta) == ((OUTPUTS, INPUTS), torch.float32, True)
    assert weight.numel() == OUTPUTS * INPUTS
    with pytest.raises(ModelError, match="without calling the layer"):
        use(weight)


@available
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_read_back_with_their_bits(tied: bool, dtype: torch.dtype) -> None:
    if not packing_works(dtype, SHAPES):
        pytest.skip(f"no products in {dtype} here")
    model = tiny_model(tied=tied).to(dtype)
    before = values(model)
    read = pack_for_inference(model).read()
    assert read.keys() == before.keys()
    assert all(torch.equal(read[name], t) for name, t in before.items())


@available
@pytest.mark.parametrize("tied", [True, False])
def test_staged_weights_are_live_after_the_action_and_not_before(tied: bool) -> None:
    model, other = tiny_model(tied=tied), tiny_model(tied=tied, seed=1)
    new = values(other)
    weights = pack_for_inference(model)
    old_logits = logits(model)
    swap = weights.stage(new)
    for tensor in new.values():
        tensor.fill_(torch.nan)  # staged weights are copies
    assert torch.equal(logits(model), old_logits)
    swap()
    pack_for_inference(other)
    assert torch.equal(logits(model), logits(other))
    assert not torch.equal(logits(model), old_logits)


@available
def test_tied_head_follows_the_embedding() -> None:
    model, other = tiny_model(tied=True), tiny_model(tied=True, seed=1)
    weights = pack_for_inference(model)
    assert "lm_head.weight" not in weights.tensors
    embedding = other.model.embed_tokens.weight.detach()
    weights.stage(values(other))()
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert torch.equal(model.lm_head.packed.to_dense(), embedding)


@available
def test_float32_weights_are_converted_when_a_bfloat16_model_takes_them_over() -> None:
    if not packing_works(torch.bfloat16, SHAPES):
        pytest.skip("no bfloat16 products here")
    model, other = tiny_model(tied=True).bfloat16(), tiny_model(tied=True, seed=1)
    weights = pack_for_inference(model)
    weights.stage(values(other))()
    assert {t.dtype for t in weights.read().values()} == {torch.bfloat16}
    pack_for_inference(other.bfloat16())
    assert torch.equal(logits(model), logits(other))


@available
def test_one_layer_in_two_places_stays_one_layer(layer: nn.Linear) -> None:
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    weights = pack_for_inference(model)
    assert model["a"] is model["b"][0]
    assert set(weights.tensors) == {"a.weight", "a.bias"}
    weights.stage({"a.weight": torch.ones(OUTPUTS, INPUTS), "a.bias": torch.ones(OUTPUTS)})()
    with torch.no_grad():
        assert model["b"](torch.ones(16, INPUTS)).tolist() == [[INPUTS + 1.0] * OUTPUTS] * 16


@available
@pytest.mark.parametrize("replace", [prepare_for_training, pack_for_inference])
def test_layers_elsewhere_than_on_the_cpu_are_refused_by_name(
    replace: Callable[[nn.Module], object],
) -> None:
    model = nn.ModuleDict({"far": nn.Linear(4, 4, device="meta")})
    with pytest.raises(ModelError, match="layer far is on meta"):
        replace(model)


class ScaledLinear(nn.Linear):
    """Computes something else than a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@available
def test_subclasses_of_linear_are_left_alone() -> None:
    model = nn.ModuleDict({"own": ScaledLinear(4, 4)})
    weights = pack_for_inference(model)
    assert type(model["own"]) is ScaledLinear
    assert weights.tensors["own.weight"] is model["own"].weight


@available
@pytest.mark.invariant("I14")
@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_arrive_packed_with_the_announced_digest(tied: bool) -> None:
    trained, packed = tiny_model(tied=tied, seed=1), tiny_model(tied=tied)
    prepare_for_training(trained)
    subscriber = MemorySubscriber(pack_for_inference(packed))
    with MemoryPublisher(trained.named_parameters()) as publisher:
        update = publisher.publish(PolicyVersion(1))
        subscriber.stage(update)
    assert subscriber.digest_of_live() != update.digest
    subscriber.commit(PolicyVersion(1))
    assert subscriber.digest_of_live() == update.digest
    assert torch.equal(logits(packed), logits(trained))


# The output head


@available
@pytest.mark.invariant("I07")
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_through_a_packed_head_are_those_of_a_trained_one(
    tied: bool, random: torch.Generator
) -> None:
    trained, packed = tiny_model(tied=tied), tiny_model(tied=tied)
    prepare_for_training(trained)
    pack_for_inference(packed)
    hidden = torch.randn(CHUNK + 32, 32, generator=random)
    tokens = torch.randint(0, VOCAB, (len(hidden),), generator=random)
    found = []
    for model in (trained, packed):
        head = output_head(model)
        with torch.no_grad():
            found.append(
                chunked_logprobs(hidden, head.weight, head.bias, tokens, 0.7, linear=head.linear)[0]
            )
            assert torch.equal(head.logits(hidden[:16]), model.lm_head(hidden[:16]))
    assert torch.equal(*found)
    assert output_head(packed).weight.shape == (VOCAB, 32)


def test_untouched_model_has_the_ordinary_head() -> None:
    model = tiny_model(tied=True)
    head = output_head(model)
    hidden = torch.linspace(-1, 1, 512).view(16, 32)
    assert head.weight is model.lm_head.weight
    assert torch.equal(head.logits(hidden), plain(hidden, head.weight, head.bias))
