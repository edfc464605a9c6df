"""Log-probabilities and entropy of chosen tokens, over the full vocabulary.

Owns the one formula that engine and trainer share, ``x_y - logsumexp(x)`` with ``x = logits / T``,
and its chunked, memory-lean training form. Both sides must use it: ``log_softmax`` differs in the
last bits.

Shapes: N tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x Wᵀ + b of (x, W, b)."""

CHUNK = 512
"""Rows of logits held at once in training; a multiple of 16 keeps the bits of the engine's pass."""


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Float32 ``logits / temperature``; ``temperature`` is [N, 1] or [1, 1], > 0."""
    return logits.float() / temperature


def gather_logprobs(scaled: Tensor, log_z: Tensor, tokens: Tensor) -> Tensor:
    """``scaled[i, tokens[i]] - log_z[i]``, [N] float32, nats."""
    return scaled.gather(1, tokens[:, None]).squeeze(1) - log_z


def _as(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The head in the dtype of the hidden states (bfloat16 compute over float32 master weights)."""
    return weight.to(dtype), bias.to(dtype) if bias is not None else None


class _ChunkedLogprobs(torch.autograd.Function):
    """log p(token) and entropy from hidden states.

    Saves hidden, weight and log Z; the backward pass computes the logits again, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        linear: Linear,
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_z = [], [], []
        head, head_bias = _as(hidden.dtype, weight, bias)
        t = hidden.new_full((1, 1), temperature, dtype=torch.float32)
        for h, y in zip(torch.split(hidden, CHUNK), torch.split(tokens, CHUNK), strict=True):
            x = scale_logits(linear(h, head, head_bias), t)
            z = torch.logsumexp(x, dim=-1)
            logp.append(gather_logprobs(x, z, y))
            # -E[log p], not log Z - E[x]: large logits would cancel.
            log_p = x - z[:, None]
            entropy.append(-(torch.exp(log_p) * log_p).sum(-1))
            log_z.append(z)
        out_logp, out_entropy = torch.cat(logp), torch.cat(entropy)
        ctx.save_for_backward(hidden, weight, bias, tokens, torch.cat(log_z), out_entropy)
        ctx.temperature, ctx.linear = temperature, linear
        return out_logp, out_entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        hidden, weight, bias, tokens, log_z, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight)
        d_bias = torch.zeros_like(bias) if bias is not None else None
        t = hidden.new_full((1, 1), ctx.temperature, dtype=torch.float32)
        head, head_bias = _as(hidden.dtype, weight, bias)
        linear: Linear = ctx.linear
        plain = linear is torch.nn.functional.linear and hidden.dtype == weight.dtype
        with_entropy = bool(grad_entropy.any())
        for i in range(0, hidden.shape[0], CHUNK):
            rows = slice(i, i + CHUNK)
            h, y, g = hidden[rows], tokens[rows], grad_logp[rows]
            x = scale_logits(linear(h, head, head_bias), t)
            p = torch.exp(x - log_z[rows, None])
            # d logp / dx = onehot - p;  dH / dx = -p (log p + H)
            d_x = p * -g[:, None]
            if with_entropy:
                log_p = x - log_z[rows, None]
                d_x -= grad_entropy[rows, None] * p * (log_p + entropy[rows, None])
            d_x.scatter_add_(1, y[:, None], g[:, None])
            d_x = (d_x / t).to(hidden.dtype)
            d_hidden[rows] = linear(d_x, head.t(), None)
            if plain:
                d_weight.addmm_(d_x.t(), h)  # in place, without a second [V, E]
            else:
                d_weight += linear(d_x.t(), h.t(), None)
            if d_bias is not None:
                d_bias += d_x.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    *,
    linear: Linear = torch.nn.functional.linear,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``tokens`` and entropies, without a ``[N, V]`` buffer.

    Args:
        hidden: [N, E], the state that predicts each token; N a multiple of 16 keeps the engine's
            bits. Its dtype is the one products are computed in.
        weight: [V, E] output head; bias: [V] or None.
        tokens: [N] int64.
        temperature: > 0, the rollout's.
        linear: how products are computed, forward and backward; the engine must use the same for
            its logits. Without a backward pass ``weight`` may be whatever it understands.

    Returns: (logp [N], entropy [N]), float32 nats, differentiable in hidden, weight and bias.
    """
    logp, entropy = _ChunkedLogprobs.apply(hidden, weight, bias, tokens, temperature, linear)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return logp, entropy
