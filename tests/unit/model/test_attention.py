"""Packed attention against a naive float64 one, and what the attention function refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from offbeat.errors import ModelError
from offbeat.generate.engine.cache import DecodeContext, SlotCache
from offbeat.generate.engine.runs import Run
from offbeat.model.attention import (
    PackedContext,
    PackedLayout,
    attention_forward,
    key_bucket,
    round_up,
)

CPU = torch.device("cpu")


def layout_of(*lengths: int) -> PackedLayout:
    return PackedLayout.build(lengths, device=CPU)


def projections(n: int, heads: int, kv_heads: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + heads)
    return (
        torch.randn(n, heads, dim, generator=generator),
        torch.randn(n, kv_heads, dim, generator=generator),
        torch.randn(n, kv_heads, dim, generator=generator),
    )


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence ``[n, H, D]``, one query at a time, in float64."""
    ratio = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for t, h in itertools.product(range(len(q)), range(q.shape[1])):
        keys, values = (x[: t + 1, h // ratio].double() for x in (k, v))
        out[t, h] = torch.softmax(scale * keys @ q[t, h].double(), 0) @ values
    return out


@pytest.mark.parametrize(
    ("n", "bucket"), [(1, 16), (16, 16), (17, 32), (192, 192), (193, 384), (384, 384), (385, 576)]
)
def test_key_buckets_are_16_wide_up_to_192_and_192_wide_beyond(n: int, bucket: int) -> None:
    assert key_bucket(n) == bucket


@pytest.mark.parametrize(
    "lengths", [(1,), (16,), (5, 1, 40, 5, 17), (3, 200, 3, 16), (191, 192, 193)]
)
def test_a_layout_places_every_token_once_and_restarts_positions(lengths: tuple[int, ...]) -> None:
    layout = layout_of(*lengths)
    assert layout.tokens % 16 == 0
    assert layout.tokens - sum(lengths) in range(16)
    rows = [torch.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)]
    packed = layout.pack([r.numpy() for r in rows])
    for start, row in zip(layout.starts, rows, strict=True):
        assert torch.equal(packed[start : start + len(row)], row)
        assert torch.equal(layout.positions[start : start + len(row)], torch.arange(len(row)))
    # Every token is a query of one block, and its result goes to its own place.
    targets = torch.cat([b.targets for b in layout.blocks])
    queries = torch.cat([b.queries for b in layout.blocks])
    real = targets < layout.tokens
    assert torch.equal(targets[real], queries[real])
    assert sorted(targets[real].tolist()) == list(range(sum(lengths)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1), (7, 1)])
def test_packed_attention_is_the_naive_one_of_each_sequence(heads: int, kv_heads: int) -> None:
    layout = layout_of(5, 1, 40, 18)
    q, k, v = projections(layout.tokens, heads, kv_heads)
    out = PackedContext(layout).attend(0, q, k, v, 0.3)
    for start, n in zip(layout.starts, layout.lengths, strict=True):
        rows = slice(start, start + n)
        expected = naive(q[rows], k[rows], v[rows], 0.3)
        torch.testing.assert_close(out[rows].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.invariant("I09")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_a_sequence_has_the_same_bits_alone_and_in_any_company(heads: int, kv_heads: int) -> None:
    lengths = (5, 200, 1, 40, 191)
    layout = layout_of(*lengths)
    q, k, v = projections(layout.tokens, heads, kv_heads)
    together = PackedContext(layout).attend(0, q, k, v, 0.3)
    for start, n in zip(layout.starts, lengths, strict=True):
        alone = layout_of(n)
        index = torch.arange(alone.tokens).clamp(max=n - 1) + start
        out = PackedContext(alone).attend(0, q[index], k[index], v[index], 0.3)
        assert torch.equal(out[:n], together[start : start + n])


@pytest.mark.invariant("I07")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("n", [1, 15, 16, 190, 192, 193, 208, 384, 400])
def test_a_decode_step_has_the_bits_of_the_packed_pass(n: int, heads: int, kv_heads: int) -> None:
    """Slots of other lengths beside it, and NaN where a request has never been."""
    layout = layout_of(n)
    dim = 64  # small heads take a kernel whose bits do not depend on the number of keys
    q, k, v = projections(layout.tokens, heads, kv_heads, dim)
    packed = PackedContext(layout).attend(0, q, k, v, 0.3)[n - 1]
    cache = SlotCache(
        layers=1, slots=16, kv_heads=kv_heads, head_dim=dim, limit=450, dtype=q.dtype, device=CPU
    )
    cache.reserve(430)
    others = torch.randn(2, kv_heads, 430, dim)
    for stored, new, other in ((cache.keys, k, others[0]), (cache.values, v, others[1])):
        stored[0, 3, :, : n - 1] = new[: n - 1].transpose(0, 1)
        stored[0, 7, :, :430] = other
    for longest in sorted({n, 200, 430}):
        if longest < n:
            continue
        positions = torch.full((16,), cache.scratch)
        visible = torch.ones(16, dtype=torch.long)
        positions[3], visible[3], positions[7], visible[7] = n - 1, n, longest - 1, longest
        runs = [Run(begin=0, end=16, keys=key_bucket(longest))]
        ctx = DecodeContext(cache, positions, visible, longest, runs=runs)
        row = torch.zeros(16, dtype=torch.long)
        row[3] = n - 1
        out = ctx.attend(0, q[row], k[row], v[row], 0.3)
        assert ctx.longest == longest
        assert torch.equal(out[3], packed)


# Continuations: segments with a parent

TREE = {
    # Two siblings and a stranger; a prompt with one continuation; one longer than a block.
    "small": ((5, 3, 9, 12, 4, 1), (None, 0, 0, None, 3, 0)),
    "long": ((185, 12, 200, 30, 5, 7), (None, 0, 0, None, 3, 3)),
    "edges": ((192, 1, 193, 16), (None, 0, 0, 0)),
    "own-block": ((30, 400), (None, 0)),
}


def tree_of(name: str) -> tuple[PackedLayout, list[Tensor]]:
    """A layout, and for each segment the packed places of its whole sequence."""
    lengths, parents = TREE[name]
    layout = PackedLayout.build(lengths, device=CPU, parents=parents)
    own = [torch.arange(s, s + n) for s, n in zip(layout.starts, lengths, strict=True)]
    whole = [
        torch.cat([own[p], x]) if p is not None else x for p, x in zip(parents, own, strict=True)
    ]
    return layout, whole


def whole_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence ``[n, H, D]`` at once, for autograd."""
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = scale * torch.einsum("mhd,thd->hmt", q, keys)
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hmt,thd->mhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("tree", TREE)
def test_positions_of_a_continuation_go_on_where_its_parent_ends(tree: str) -> None:
    layout, whole = tree_of(tree)
    for sequence in whole:
        assert torch.equal(layout.positions[sequence], torch.arange(len(sequence)))
    assert layout.longest == max(len(x) for x in whole)
    targets = torch.cat([b.targets for b in layout.blocks])
    assert sorted(targets[targets < layout.tokens].tolist()) == list(range(sum(layout.lengths)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("tree", ["small", "edges"])
def test_a_continuation_attends_to_its_parent_and_itself(
    tree: str, heads: int, kv_heads: int
) -> None:
    layout, whole = tree_of(tree)
    q, k, v = projections(layout.tokens, heads, kv_heads, dim=4)
    out = PackedContext(layout).attend(0, q, k, v, 0.3)
    for sequence, n in zip(whole, layout.lengths, strict=True):
        expected = naive(q[sequence], k[sequence], v[sequence], 0.3)[-n:]
        torch.testing.assert_close(out[sequence[-n:]].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.invariant("I07")
@pytest.mark.invariant("I09")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1), (7, 1)])
@pytest.mark.parametrize("tree", TREE)
def test_a_continuation_has_the_bits_of_its_whole_sequence_alone(
    tree: str, heads: int, kv_heads: int
) -> None:
    layout, whole = tree_of(tree)
    q, k, v = projections(layout.tokens, heads, kv_heads, dim=64)
    out = PackedContext(layout).attend(0, q, k, v, 0.3)
    for sequence in whole:
        alone = layout_of(len(sequence))
        index = sequence[torch.arange(alone.tokens).clamp(max=len(sequence) - 1)]
        expected = PackedContext(alone).attend(0, q[index], k[index], v[index], 0.3)
        assert torch.equal(out[sequence], expected[: len(sequence)])


# Backward


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1)])
def test_the_backward_pass_is_the_derivative_of_the_forward_pass(heads: int, kv_heads: int) -> None:
    layout = PackedLayout.build((4, 2, 3, 5), device=CPU, parents=(None, 0, 0, None))
    inputs = [x.double().requires_grad_() for x in projections(layout.tokens, heads, kv_heads, 2)]
    context = PackedContext(layout)
    assert torch.autograd.gradcheck(lambda q, k, v: context.attend(0, q, k, v, 0.7), inputs)


@pytest.mark.invariant("I09")
@pytest.mark.parametrize("tree", TREE)
def test_gradients_are_those_of_every_sequence_attended_by_itself(tree: str) -> None:
    """In float64, so that the order of the sums over siblings does not matter."""
    layout, whole = tree_of(tree)
    q, k, v = (x.double().requires_grad_() for x in projections(layout.tokens, 6, 2))
    weight = torch.randn(layout.tokens, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    weight[sum(layout.lengths) :] = 0  # padding is nobody's
    PackedContext(layout).attend(0, q, k, v, 0.3).mul(weight).sum().backward()
    found = [x.grad for x in (q, k, v)]
    total = q.new_zeros(())
    for sequence, n in zip(whole, layout.lengths, strict=True):
        out = whole_attention(q[sequence], k[sequence], v[sequence], 0.3)
        total = total + (out * weight[sequence])[-n:].sum()
    expected = torch.autograd.grad(total, (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(64,), (1024,), (700, 324)])
def test_only_the_projections_are_kept_for_the_backward_pass(lengths: tuple[int, ...]) -> None:
    layout = layout_of(*lengths)
    inputs = [x.requires_grad_() for x in projections(layout.tokens, 6, 2)]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = PackedContext(layout).attend(0, *inputs, 0.3)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]
    # Nor beside autograd's own list.
    own = {k: x for k, x in vars(out.grad_fn).items() if isinstance(x, Tensor)}
    assert own == {}


def test_prefill_sees_the_keys_of_every_layer() -> None:
    layout, seen = layout_of(5), []
    q, k, v = projections(16, 4, 2)
    ctx = PackedContext(layout, lambda layer, key, value: seen.append((layer, key, value)))
    ctx.attend(3, q, k, v, 0.3)
    assert seen == [(3, k, v)]
    assert ctx.longest == 5


# The function that transformers calls


def call(**options: object) -> Tensor:
    layer = torch.nn.Identity()
    layer.layer_idx = options.pop("layer_idx", 2)
    if "causal" in options:
        layer.is_causal = options.pop("causal")
    q, k, v = (x.transpose(0, 1)[None] for x in projections(16, 4, 2))
    arguments = {"attention_mask": None, "ctx": PackedContext(layout_of(9, 7)), **options}
    return attention_forward(layer, q, k, v, **arguments)[0]


def test_scaling_defaults_to_one_over_the_root_of_the_head_size() -> None:
    out = call()
    assert out.shape == (1, 16, 4, 8)
    q, k, v = projections(16, 4, 2)
    torch.testing.assert_close(
        out[0, 9:].double(), naive(q[9:], k[9:], v[9:], 8**-0.5), rtol=0, atol=1e-5
    )
    assert torch.equal(call(scaling=8**-0.5), out)
    assert not torch.equal(call(scaling=0.1), out)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 9},
        {"sliding_window": None},
        {"position_ids": torch.zeros(1)},
        {"is_causal": True, "causal": True},
        {"softcap": None, "s_aux": None},
        {"output_router_logits": False},
    ],
)
def test_options_that_change_nothing_are_accepted(options: dict[str, object]) -> None:
    assert torch.equal(call(**options), call())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window": 8}, r"sliding_window=8 \(less than the 9 tokens in use\)"),
        ({"softcap": 50.0}, "softcap=50.0"),
        ({"s_aux": torch.zeros(4)}, "s_aux=a tensor"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask=a tensor"),
        ({"is_causal": False}, "is_causal=False"),
        ({"causal": False}, "is_causal=False"),
        ({"position_bias": 1, "dropout": 0.2}, "dropout=0.2, position_bias=1"),
    ],
)
def test_what_is_not_computed_is_refused_with_layer_and_option(
    options: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=rf"layer 2 \(Identity\) needs {named}: only standard"):
        call(**options)


@pytest.mark.parametrize("options", [{"ctx": None}, {"layer_idx": None}])
def test_a_call_past_hidden_states_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(
        ModelError, match="Identity was called without an offbeat attention context"
    ):
        call(**options)


def test_round_up_is_the_next_multiple() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
