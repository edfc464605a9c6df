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

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.errors import ModelError

ATTENTION = "offbeat"
"""Name under which the attention function is registered in transformers."""

TOKEN_ROWS = 16
QUERY_ROWS = 4
KEY_BLOCK = 192


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

    def query(self, rows: Tensor, kv_heads: int) -> Tensor:
        """``rows`` [N, H, D] as [S, K, G, M, D]: heads that share a key head become extra rows."""
        return self.by_query(rows.index_select(0, self.queries), kv_heads)

    def by_query(self, rows: Tensor, kv_heads: int) -> Tensor:
        """[S · M, H, D] as [S, K, G, M, D]."""
        heads, dim = rows.shape[1:]
        split = rows.view(self.sequences, -1, kv_heads, heads // kv_heads, dim)
        return split.permute(0, 2, 3, 1, 4)

    def by_key(self, rows: Tensor) -> Tensor:
        """``rows`` [N, K, D] as [S, K, T, D]."""
        kv_heads, dim = rows.shape[1:]
        found = rows.index_select(0, self.keys).view(self.sequences, -1, kv_heads, dim)
        return found.transpose(1, 2)

    def to_rows(self, out: Tensor) -> Tensor:
        """[S, K, G, M, D] as [S · M, H, D]."""
        s, k, g, m, d = out.shape
        return out.permute(0, 3, 1, 2, 4).reshape(s * m, k * g, d)


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
        parents = parents if parents is not None else [None] * len(lengths)
        starts = tuple(accumulate(lengths, initial=0))[:-1]
        prefixes = [
            None if p is None else _Span(start=starts[p], length=lengths[p]) for p in parents
        ]
        total = sum(lengths)
        tokens = round_up(total, TOKEN_ROWS)
        positions = torch.zeros(tokens, dtype=torch.long)
        pieces: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for start, n, prefix in zip(starts, lengths, prefixes, strict=True):
            before = prefix.length if prefix else 0
            positions[start : start + n] = torch.arange(before, before + n)
            for first in range(0, n, KEY_BLOCK):
                end = min(n, first + KEY_BLOCK)
                piece = _Piece(start=start, first=first, end=end, prefix=prefix)
                shape = (round_up(end - first, TOKEN_ROWS), key_bucket(before + end))
                pieces[shape].append(piece)
        return cls(
            tokens=tokens,
            longest=max(
                len_ + (p.length if p else 0) for len_, p in zip(lengths, prefixes, strict=True)
            ),
            positions=positions.to(device),
            starts=starts,
            lengths=tuple(lengths),
            blocks=tuple(
                _block(pieces[shape], *shape, nowhere=tokens, device=device)
                for shape in sorted(pieces)
            ),
        )

    def pack(self, segments: Sequence[Tensor]) -> Tensor:
        """The token ids of all segments as one padded row ``[N]`` int64 (padding is id 0)."""
        flat = torch.zeros(self.tokens, dtype=torch.long, device=self.positions.device)
        for start, segment in zip(self.starts, segments, strict=True):
            flat[start : start + len(segment)] = segment
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Packed tokens ``start .. start + length``."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens ``first .. end`` of the segment at ``start``, which continues ``prefix``."""

    start: int
    first: int
    end: int
    prefix: _Span | None

    def queries(self) -> Tensor:
        return torch.arange(self.start + self.first, self.start + self.end)

    def keys(self) -> Tensor:
        own = torch.arange(self.start, self.start + self.end)
        if self.prefix is None:
            return own
        begin = self.prefix.start
        return torch.cat([torch.arange(begin, begin + self.prefix.length), own])

    @property
    def before(self) -> int:
        """Keys that the first query sees besides itself."""
        return self.first + (self.prefix.length if self.prefix else 0)


def _block(
    pieces: Sequence[_Piece], rows: int, keys: int, *, nowhere: int, device: torch.device
) -> AttentionBlock:
    """``pieces`` padded to ``rows`` queries and ``keys`` keys each."""
    queries = [p.queries() for p in pieces]
    visible = torch.tensor([p.before for p in pieces])
    if bool((visible == visible[0]).all()):
        visible = visible[:1]
    place, row = torch.arange(keys), torch.arange(rows)
    # A padded query sees what a longer piece would show it: at least the first key.
    hidden = place[None, None, :] > visible[:, None, None] + row[None, :, None]
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return AttentionBlock(
        sequences=len(pieces),
        queries=torch.cat([_repeat_last(q, rows) for q in queries]).to(device),
        targets=torch.cat([_pad(q, rows, nowhere) for q in queries]).to(device),
        keys=torch.cat([_repeat_last(p.keys(), keys) for p in pieces]).to(device),
        bias=bias.to(device),
    )


def _pad(index: Tensor, size: int, value: int) -> Tensor:
    return torch.nn.functional.pad(index, (0, size - len(index)), value=value)


def _repeat_last(index: Tensor, size: int) -> Tensor:
    return _pad(index, size, int(index[-1]))


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
        kv_heads = key.shape[1]
        # One row more, for results that go nowhere.
        out = query.new_zeros(query.shape[0] + 1, *query.shape[1:])
        for block in blocks:
            q, k, v = block.query(query, kv_heads), block.by_key(key), block.by_key(value)
            out.index_copy_(
                0, block.targets, block.to_rows(attend_core(q, k, v, block.bias, scale))
            )
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
        grad = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        for block in ctx.blocks:
            dq, dk, dv = _block_gradient(block, query, key, value, grad, ctx.scale)
            d_query.index_add_(0, block.queries, dq)
            d_key.index_add_(0, block.keys, dk)
            d_value.index_add_(0, block.keys, dv)
        return d_query, d_key, d_value, None, None


def _block_gradient(
    block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block: [S · M, H, D] of its queries, [S · T, K, D] of keys and values."""
    kv_heads, dim = key.shape[1:]
    q, k, v = block.query(query, kv_heads), block.by_key(key), block.by_key(value)
    s, _, g, m, _ = q.shape
    p = _probabilities(q, k, block.bias, scale)
    flat_k, flat_v = (x.reshape(s * kv_heads, -1, dim) for x in (k, v))
    flat_q = q.reshape(s * kv_heads, g * m, dim)
    d_out = block.by_query(grad.index_select(0, block.targets), kv_heads).reshape(flat_q.shape)
    d_p = torch.bmm(d_out, flat_v.transpose(1, 2))
    # d softmax: p ∘ (dp − Σ p dp)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdim=True))

    def to_keys(x: Tensor) -> Tensor:
        return x.view(s, kv_heads, -1, dim).transpose(1, 2).reshape(-1, kv_heads, dim)

    d_q = torch.bmm(d_scores, flat_k).mul_(scale).view(q.shape)
    d_k = torch.bmm(d_scores.transpose(1, 2), flat_q).mul_(scale)
    return block.to_rows(d_q), to_keys(d_k), to_keys(torch.bmm(p.transpose(1, 2), d_out))


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
