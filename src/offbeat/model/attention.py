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

Shapes: N packed tokens (padded), S sequences, L padded length, H query heads, K key heads,
G = H / K, M query rows, T keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        query: [B, M, D], M a multiple of ``QUERY_ROWS``.
        key, value: [B, T, D], T a ``key_bucket``.
        bias: broadcastable to [B, M, T], 0 where visible and -inf where not; every row sees at
            least one key.
        scale: factor on the scores.
    """
    scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """Sequences of one key bucket, as a view into the packed row.

    ``gather`` [S · L] maps the padded view to packed tokens (a padded place repeats the sequence's
    last token: its result is never read back).
    """

    gather: Tensor
    sequences: int
    length: int
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where each sequence of a packed row lies, and how it is viewed for attention.

    ``tokens`` N counts the padding rows; ``positions`` [N] restarts at 0 in each sequence;
    ``starts`` and ``lengths`` are per sequence, in the order given; ``scatter`` [N] maps packed
    tokens to the concatenated padded views.
    """

    tokens: int
    positions: Tensor
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[SequenceGroup, ...]
    scatter: Tensor

    @classmethod
    def build(
        cls, lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype
    ) -> PackedLayout:
        """Lay out sequences of ``lengths`` one behind the other."""
        starts: list[int] = []
        total = 0
        for n in lengths:
            starts.append(total)
            total += n
        tokens = round_up(total, TOKEN_ROWS)
        positions = torch.zeros(tokens, dtype=torch.long)
        scatter = torch.zeros(tokens, dtype=torch.long)
        groups: list[SequenceGroup] = []
        offset = 0
        for bucket in sorted({key_bucket(n) for n in lengths}):
            members = [i for i, n in enumerate(lengths) if key_bucket(n) == bucket]
            place = torch.arange(bucket)
            sizes = torch.tensor([lengths[i] for i in members])
            begin = torch.tensor([starts[i] for i in members])
            gather = begin[:, None] + torch.minimum(place[None, :], sizes[:, None] - 1)
            real = place[None, :] < sizes[:, None]
            packed = gather[real]
            positions[packed] = place[None, :].expand(len(members), -1)[real]
            scatter[packed] = offset + torch.arange(len(members) * bucket).view(-1, bucket)[real]
            offset += len(members) * bucket
            hidden = torch.ones(bucket, bucket, dtype=torch.bool).triu(1)
            bias = torch.zeros(bucket, bucket, dtype=dtype).masked_fill_(hidden, -torch.inf)
            groups.append(
                SequenceGroup(
                    gather=gather.reshape(-1).to(device),
                    sequences=len(members),
                    length=bucket,
                    bias=bias.to(device),
                )
            )
        return cls(
            tokens=tokens,
            positions=positions.to(device),
            starts=tuple(starts),
            lengths=tuple(lengths),
            groups=tuple(groups),
            scatter=scatter.to(device),
        )

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """The token ids of all sequences as one padded row ``[N]`` int64 (padding is id 0)."""
        flat = torch.zeros(self.tokens, dtype=torch.long, device=self.positions.device)
        for start, row in zip(self.starts, rows, strict=True):
            flat[start : start + len(row)] = row
        return flat


class PackedContext:
    """Causal attention within each sequence of a packed row.

    ``store(layer, key, value)`` sees the keys and values ``[N, K, D]`` of every layer; prefill
    keeps them. ``longest``: see ``AttentionContext``; by default that of ``layout``.
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
        self.longest = max(layout.lengths) if longest is None else longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._store is not None:
            self._store(layer, key, value)
        out = [self._attend_group(g, query, key, value, scale) for g in self._layout.groups]
        flat = out[0] if len(out) == 1 else torch.cat(out)
        return flat.index_select(0, self._layout.scatter)

    @staticmethod
    def _attend_group(
        g: SequenceGroup, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
        ratio = heads // kv_heads
        # Query heads that share a key head become extra query rows: nothing is repeated.
        q = query.index_select(0, g.gather).view(g.sequences, g.length, kv_heads, ratio, dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(g.sequences * kv_heads, ratio * g.length, dim)
        k, v = (
            x.index_select(0, g.gather)
            .view(g.sequences, g.length, kv_heads, dim)
            .transpose(1, 2)
            .reshape(g.sequences * kv_heads, g.length, dim)
            for x in (key, value)
        )
        bias = g.bias.repeat(ratio, 1) if ratio > 1 else g.bias
        o = attend_core(q, k, v, bias, scale).view(g.sequences, kv_heads, ratio, g.length, dim)
        return o.permute(0, 3, 1, 2, 4).reshape(g.sequences * g.length, heads, dim)


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
