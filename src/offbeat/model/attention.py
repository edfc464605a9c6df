"""Attention over packed rows, the same bits in training, prefill and cached decode.

Owns: the function registered in transformers' attention interface, the layout of packed rows, and
the padding rules that make a row's result independent of what is computed beside it. Knows no cache
and no sampling: a cached decode step brings its own context (``generate/engine/cache.py``).

A model is always called on one flat row ``[1, N]`` of tokens with explicit positions and an extra
keyword ``ctx``; transformers hands unknown keywords down to the attention function, which delegates
to ``ctx.attend``. Without a context there is nothing to attend to, so the function refuses.

Why the padding (measured on CPU float32, one and two threads): a GEMM with fewer than 4 rows, or
with few rows on two threads, uses other kernels with other bits; the probability-times-value
product blocks its keys at 192. So token rows are padded to multiples of 16, query rows to multiples
of 4, keys to multiples of 16 up to 192 and of 192 beyond, and every sequence is attended from
offset 0.

Shapes: N packed tokens (padded), S sequences, H query heads, K key heads, G = H / K, M query rows,
T keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ModelError
from offbeat.types import IntArray

ATTENTION = "offbeat"
"""Name under which the attention function is registered in transformers."""

TOKEN_ROWS = 16
QUERY_ROWS = 4
KEY_BLOCK = 192
BLOCK_SCORES = 2**21
"""Scores per query head that one block of the training pass holds at once: 8 MiB in float32."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def key_bucket(n: int) -> int:
    """Keys to compute for ``n`` visible ones: multiples of 16 up to 192, of 192 beyond."""
    return round_up(n, TOKEN_ROWS) if n <= KEY_BLOCK else round_up(n, KEY_BLOCK)


class AttentionContext(Protocol):
    """What one forward pass attends to."""

    @property
    def longest(self) -> int:
        """Most keys that any query of the pass sees."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Output ``[N, H, D]`` for ``query [N, H, D]``, ``key`` and ``value [N, K, D]``."""


def attend_core(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + bias) v, the one formula every path goes through.

    Args:
        query: [S, K, G, M, D], G · M a multiple of ``QUERY_ROWS``.
        key, value: [S, K, T, D], T a ``key_bucket``.
        bias: [S or 1, M, T], 0 where visible and -inf where not; every row sees at least one key.
        scale: factor on the scores.

    Returns: [S, K, G, M, D].
    """
    s, k, g, m, d = query.shape
    probabilities = _probabilities(query, key, bias, scale)
    return torch.bmm(probabilities, value.reshape(s * k, -1, d)).view(s, k, g, m, d)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + bias), [S · K, G · M, T]."""
    s, k, g, m, d = query.shape
    q, keys = query.reshape(s * k, g * m, d), key.reshape(s * k, -1, d).transpose(1, 2)
    scores = torch.baddbmm(query.new_empty(1, 1, 1), q, keys, beta=0, alpha=scale)
    scores.view(s, k * g, m, -1).add_(bias[:, None])
    return torch.softmax(scores, dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Query rows of several sequences that are computed together: S blocks of M rows and T keys.

    ``queries`` [S · M] and ``keys`` [S · T] are packed tokens (a place beyond the end repeats the
    last token: as a key it is hidden, as a query its result goes nowhere); ``targets`` [S · M] says
    where results go, with N for nowhere. ``bias``: see ``attend_core``.
    """

    sequences: int
    queries: Tensor
    targets: Tensor
    keys: Tensor
    bias: Tensor

    def query_places(self, heads: int, kv_heads: int) -> Tensor:
        """[S · K · G · M] rows of a flat [N · H, D]: heads that share a key head are more rows."""
        return self._by_head(self.queries, heads, kv_heads)

    def target_places(self, heads: int, kv_heads: int) -> Tensor:
        """As ``query_places``, where results go in a flat [(N + 1) · H, D]."""
        return self._by_head(self.targets, heads, kv_heads)

    def key_places(self, kv_heads: int) -> Tensor:
        """[S · K · T] rows of a flat [N · K, D]."""
        return self._by_head(self.keys, kv_heads, kv_heads)

    def _by_head(self, tokens: Tensor, heads: int, kv_heads: int) -> Tensor:
        head = torch.arange(heads, device=tokens.device).view(1, kv_heads, -1, 1)
        return (tokens.view(self.sequences, 1, 1, -1) * heads + head).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where each segment of a packed row lies, and the blocks its attention is computed in.

    A segment is a sequence, or the continuation of an earlier segment, its parent, that others may
    continue too: a prompt that siblings share is computed once. ``tokens`` N counts the padding
    rows; ``positions`` [N] are places in the whole sequence, the parent included; ``starts`` and
    ``lengths`` are per segment, in the order given; ``longest`` is the longest whole sequence.
    """

    tokens: int
    longest: int
    positions: Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    blocks: tuple[AttentionBlock, ...]

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device,
        parents: Sequence[int | None] | None = None,
    ) -> PackedLayout:
        """Lay out segments of ``lengths`` (each at least 1) one behind the other.

        ``parents`` gives for each segment the index of the one it continues, itself without a
        parent; by default no segment has one.
        """
        size = np.asarray(lengths, dtype=np.int64)
        start = np.cumsum(size) - size
        total = int(size.sum())
        tokens = round_up(total, TOKEN_ROWS)
        parent = np.array([-1 if p is None else p for p in parents or [None] * len(size)])
        before = np.where(parent >= 0, size[parent], 0)
        pieces = _Pieces.cut(
            start, size, prefix=np.where(parent >= 0, start[parent], 0), before=before
        )
        place = np.arange(total) - np.repeat(start, size) + np.repeat(before, size)
        return cls(
            tokens=tokens,
            longest=int((before + size).max()),
            positions=torch.from_numpy(np.pad(place, (0, tokens - total))).to(device),
            starts=tuple(start.tolist()),
            lengths=tuple(lengths),
            blocks=tuple(pieces.blocks(nowhere=tokens, device=device)),
        )

    def pack(self, segments: Sequence[IntArray]) -> Tensor:
        """The token ids of all segments as one padded row ``[N]`` int64 (padding is id 0)."""
        flat = np.zeros(self.tokens, dtype=np.int64)
        flat[: sum(self.lengths)] = np.concatenate(segments)
        return torch.from_numpy(flat).to(self.positions.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """At most ``KEY_BLOCK`` consecutive tokens of one segment each; arrays are [pieces] int64.

    Tokens ``first .. end`` of the segment at ``start``, which continues the ``before`` packed
    tokens at ``prefix``.
    """

    start: IntArray
    first: IntArray
    end: IntArray
    prefix: IntArray
    before: IntArray

    @classmethod
    def cut(cls, start: IntArray, size: IntArray, *, prefix: IntArray, before: IntArray) -> _Pieces:
        """All segments, a long one as several pieces."""
        count = -(-size // KEY_BLOCK)
        segment = np.repeat(np.arange(len(size)), count)
        first = (np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)) * KEY_BLOCK
        return cls(
            start=start[segment],
            first=first,
            end=np.minimum(first + KEY_BLOCK, size[segment]),
            prefix=prefix[segment],
            before=before[segment],
        )

    def blocks(self, *, nowhere: int, device: torch.device) -> Iterator[AttentionBlock]:
        """Pieces of one padded shape together, as many as ``BLOCK_SCORES`` allows."""
        rows = -(-(self.end - self.first) // TOKEN_ROWS) * TOKEN_ROWS
        keys = np.array([key_bucket(n) for n in (self.before + self.end).tolist()])
        for m, t in sorted(set(zip(rows.tolist(), keys.tolist(), strict=True))):
            pieces = np.flatnonzero((rows == m) & (keys == t))
            at_once = max(1, BLOCK_SCORES // (m * t))
            for i in range(0, len(pieces), at_once):
                yield self._block(pieces[i : i + at_once], m, t, nowhere, device)

    def _block(
        self, pieces: IntArray, rows: int, keys: int, nowhere: int, device: torch.device
    ) -> AttentionBlock:
        start, first, end, prefix, before = (
            x[pieces, None] for x in (self.start, self.first, self.end, self.prefix, self.before)
        )
        row, place = np.arange(rows), np.arange(keys)
        query = start + np.minimum(first + row, end - 1)
        own = start + np.minimum(place - before, end - 1)
        seen = before + first
        if (seen == seen[0]).all():
            seen = seen[:1]
        # A padded query sees what a longer piece would show it: at least the first key.
        hidden = place > seen[:, :, None] + row[:, None]
        target = np.where(first + row < end, query, nowhere)
        key = np.where(place < before, prefix + place, own)
        bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
        queries, targets, key_tokens = (
            torch.from_numpy(x.reshape(-1)).to(device) for x in (query, target, key)
        )
        return AttentionBlock(
            sequences=len(pieces),
            queries=queries,
            targets=targets,
            keys=key_tokens,
            bias=torch.from_numpy(bias).to(device),
        )


class _PackedAttention(torch.autograd.Function):
    """Block by block; the backward pass computes the probabilities again instead of keeping them.

    What autograd would save per layer grows with the square of the lengths; here it is the
    projections alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Sequence[AttentionBlock],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.blocks, ctx.scale = blocks, scale
        n, heads, dim = query.shape
        # One token more, for results that go nowhere.
        out = query.new_zeros((n + 1) * heads, dim)
        for block in blocks:
            q, k, v = _gather(block, query, key, value)
            o = attend_core(q, k, v, block.bias, scale)
            out.index_copy_(0, block.target_places(heads, key.shape[1]), o.view(-1, dim))
        return out.view(n + 1, heads, dim)[:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        n, heads, dim = query.shape
        d_query = query.new_zeros((n + 1) * heads, dim)
        # A shared prompt sums over all that continue it: not in bfloat16.
        wide = torch.promote_types(key.dtype, torch.float32)
        d_key, d_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        flat_grad = torch.cat([grad, grad.new_zeros(1, heads, dim)]).view(-1, dim)
        for block in ctx.blocks:
            places = block.target_places(heads, key.shape[1])
            d_out = flat_grad.index_select(0, places)
            dq, dk, dv = _block_gradient(block, query, key, value, d_out, ctx.scale)
            d_query.index_copy_(0, places, dq)
            d_key.index_add_(0, block.keys, dk.to(wide))
            d_value.index_add_(0, block.keys, dv.to(wide))
        d_query = d_query.view(n + 1, heads, dim)[:-1]
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _gather(
    block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, K, G, M, D], keys and values [S, K, T, D] of one block."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    places = block.key_places(kv_heads)
    q = query.reshape(-1, dim).index_select(0, block.query_places(heads, kv_heads))
    k, v = (
        x.reshape(-1, dim).index_select(0, places).view(block.sequences, kv_heads, -1, dim)
        for x in (key, value)
    )
    return q.view(block.sequences, kv_heads, heads // kv_heads, -1, dim), k, v


def _block_gradient(
    block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given that of its results [S · K · G · M, D].

    Returns: [S · K · G · M, D] of queries, [S · T, K, D] of keys and values.
    """
    q, k, v = _gather(block, query, key, value)
    s, kv_heads, g, m, dim = q.shape
    flat_q, flat_k, flat_v = q.view(s * kv_heads, g * m, dim), k.flatten(0, 1), v.flatten(0, 1)
    d_out = d_out.view(flat_q.shape)
    p = _probabilities(q, k, block.bias, scale)
    d_p = torch.bmm(d_out, flat_v.transpose(1, 2))
    # d softmax: p ∘ (dp − Σ p dp), and the scale of the scores
    d_scores = d_p.sub_((p * d_p).sum(-1, keepdim=True)).mul_(p).mul_(scale)

    def to_tokens(x: Tensor) -> Tensor:
        return x.view(s, kv_heads, -1, dim).transpose(1, 2).reshape(-1, kv_heads, dim)

    d_k = torch.bmm(d_scores.transpose(1, 2), flat_q)
    d_v = torch.bmm(p.transpose(1, 2), d_out)
    return torch.bmm(d_scores, flat_k).view(-1, dim), to_tokens(d_k), to_tokens(d_v)


class PackedContext:
    """Causal attention within each sequence of a packed row.

    ``store(layer, key, value)`` sees the keys and values ``[N, K, D]`` of every layer. ``longest``:
    see ``AttentionContext``; by default that of ``layout``.
    """

    def __init__(
        self,
        layout: PackedLayout,
        store: Callable[[int, Tensor, Tensor], None] | None = None,
        *,
        longest: int | None = None,
    ) -> None:
        self._layout = layout
        self._store = store
        self.longest = layout.longest if longest is None else longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._store is not None:
            self._store(layer, key, value)
        # Under autocast the rotary embedding returns float32, the value projection bfloat16.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out: Tensor = _PackedAttention.apply(query, key, value, self._layout.blocks, scale)  # type: ignore[no-untyped-call]  # torch's apply is untyped
        return out


_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def _refused(
    module: torch.nn.Module, longest: int, dropout: float, options: dict[str, Any]
) -> list[str]:
    """What a layer asks for that ``attend_core`` does not compute, as ``name=value``."""
    asked = {k: v for k, v in options.items() if k not in _HARMLESS and v is not None}
    window = asked.pop("sliding_window", None)
    if window is not None and window < longest:
        # A window as long as the sequence hides nothing.
        asked["sliding_window"] = f"{window} (less than the {longest} tokens in use)"
    if asked.pop("is_causal", getattr(module, "is_causal", True)) is False:
        asked["is_causal"] = False
    if dropout:
        asked["dropout"] = dropout
    return [f"{k}={'a tensor' if isinstance(v, Tensor) else v}" for k, v in sorted(asked.items())]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    ctx: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer.

    Args:
        query: [1, H, N, D]; key, value: [1, K, N, D], after rotary embedding, heads not repeated.
        ctx: what to attend to, as passed to the model's forward.

    Returns: ([1, N, H, D], None).
    Raises: ModelError for a missing context or a variant of attention that is not computed here.
    """
    layer = getattr(module, "layer_idx", None)
    if ctx is None or layer is None:
        raise ModelError(
            f"{type(module).__name__} was called without an offbeat attention context: either not "
            "through offbeat.model.load.hidden_states, or its model does not hand keywords down"
        )
    options = {**kwargs, "attention_mask": attention_mask}
    if refused := _refused(module, ctx.longest, dropout, options):
        raise ModelError(
            f"layer {layer} ({type(module).__name__}) needs {', '.join(refused)}: "
            "only standard causal softmax attention is supported"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ctx.attend(layer, q, k, v, scale).unsqueeze(0), None
