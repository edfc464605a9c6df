"""Draw one token per row from its own random stream.

Owns the counter-based uniforms and the inverse-CDF draw; knows no requests and no model. The
uniform of a token is a hash of (request seed, answer position), so it needs no state and never
depends on which rows run beside it.

Shapes: N rows, V vocabulary, W candidates padded to whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.algo.logprobs import gather_logprobs, scale_logits

_BLOCK = 256
_AT_ONCE = 2**18
"""Elements of a temporary that still fits the cache of a core."""

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling options of N rows, each ``[N]``.

    ``truncated``: some row may use top_p, top_k or min_p; ``greedy``: some row may have
    temperature 0; ``scaled``: some row may have a temperature other than 1. Known to the caller
    without a device sync.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    truncated: bool
    greedy: bool
    scaled: bool


def _splitmix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014) on int64 lanes; a mask makes each shift logical."""
    x = x + _GAMMA
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) per row: a hash of ``seeds`` [N] int64 and ``positions`` [N] int64."""
    bits = _splitmix(_splitmix(seeds) ^ positions)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds ``u`` times the total, [N] int64.

    ``p`` [N, V] float32, not necessarily normalized; an index of probability 0 is never drawn. Two
    levels (blocks of 256, then inside one block) with float64 sums: the result of a full float64
    scan at a fraction of its cost. A row with NaN gives some index below V.
    """
    n, v = p.shape
    if v % _BLOCK:
        p = torch.nn.functional.pad(p, (0, -v % _BLOCK))
    blocks = p.view(n, -1, _BLOCK)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (u * edges[:, -1])[:, None]
    block = torch.searchsorted(edges, target, right=True).clamp_(max=edges.shape[1] - 1)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(n, 1, _BLOCK)).squeeze(1)
    inside_edges = inside.double().cumsum(-1)
    # Rounding may put the remainder at or past the block's end: stay on an index with mass.
    limit = inside_edges[:, -1:] * (1 - 2.0**-52)
    offset = torch.searchsorted(inside_edges, torch.minimum(target - before, limit), right=True)
    return (block * _BLOCK + offset.clamp_(max=_BLOCK - 1)).squeeze(1).clamp_(max=v - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """Of N rows x: ``top`` [N] their largest entries (0 where infinite), ``total`` [N] the sums of
    exp(x - top), ``log_z`` [N], and ``tokens`` [N], drawn from exp(x - top).
    """

    top: Tensor
    total: Tensor
    log_z: Tensor
    tokens: Tensor


def _draw(x: Tensor, u: Tensor) -> _Draw:
    """A few rows at a time, so that the exponentials stay in the processor's cache.

    ``log_z`` has the bits of ``torch.logsumexp``, which takes the same steps.
    """
    top = x.amax(-1)
    top = torch.where(top.isinf(), 0.0, top)
    totals, tokens = [], []
    size = max(1, _AT_ONCE // x.shape[1])
    for begin in range(0, len(x), size):
        rows = slice(begin, begin + size)
        e = (x[rows] - top[rows, None]).exp_()
        # Several threads sum a single row in another order than they sum two.
        totals.append((e if len(e) > 1 else e.expand(2, -1)).sum(-1)[: len(e)])
        tokens.append(inverse_cdf(e, u[rows]))
    total = torch.cat(totals)
    return _Draw(top=top, total=total, log_z=total.log() + top, tokens=torch.cat(tokens))


def _truncate(p: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """``p`` with what is outside top_k, then top_p, then min_p set to 0; ties go by index."""
    v = p.shape[1]
    top, order = p.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(v, device=p.device)[None, :]
    k = torch.where(top_k > 0, top_k, v)[:, None]
    kept = rank < k
    mass = torch.where(kept, top, 0.0).double()
    before = mass.cumsum(-1) - mass
    kept &= before < top_p[:, None] * mass.sum(-1, keepdim=True)
    kept &= top >= min_p[:, None] * top[:, :1]
    kept[:, 0] = True
    return p * torch.zeros_like(kept).scatter_(1, order, kept)


def sample(
    logits: Tensor, rows: SamplingRows, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token for every row.

    Args:
        logits: [N, V].
        rows: sampling options; temperature 0 takes the most likely token (the first of equals).
        seeds: [N] int64 bit patterns; positions: [N] int64, index of the token within its answer.

    Returns: (tokens [N] int64, logprobs [N] float32 nats of the distribution sampled from: after
        temperature and truncation, renormalized; exactly 0 for greedy rows). The log-prob of a row
        with non-finite logits is not finite, greedy or not.
    """
    x = logits.float()
    if rows.scaled:
        x = scale_logits(x, torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None])
    u = uniforms(seeds, positions)
    draw = _draw(x, u)
    tokens, logp = draw.tokens, gather_logprobs(x, draw.log_z, draw.tokens)
    if rows.truncated:
        # Only rows that truncate: the others keep their bits, whoever runs beside them.
        cut = ((rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)).nonzero().squeeze(1)
        e = (x[cut] - draw.top[cut, None]).exp_()
        p = _truncate(e, rows.top_p[cut], rows.top_k[cut], rows.min_p[cut])
        tokens[cut] = inverse_cdf(p, u[cut])
        share = p.sum(-1, dtype=torch.float64) / draw.total[cut].double()
        logp[cut] = gather_logprobs(x[cut], draw.log_z[cut], tokens[cut]) - share.log().float()
    if rows.greedy:
        greedy = rows.temperature <= 0
        tokens = torch.where(greedy, x.argmax(-1), tokens)
        logp = torch.where(greedy & torch.isfinite(draw.log_z), 0.0, logp)
    return tokens, logp
