"""Chunked log-probs and entropies against a full float64 log-softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat.algo.logprobs import CHUNK, chunked_logprobs, gather_logprobs, scale_logits


def problem(n: int, e: int = 12, v: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, e, generator=generator)
    weight = torch.randn(v, e, generator=generator)
    bias = torch.randn(v, generator=generator)
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=generator)


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same by autograd in float64."""
    full = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return full.gather(1, tokens[:, None])[:, 0], -(full.exp() * full).sum(-1)


def leaves(*tensors: Tensor | None, dtype: torch.dtype) -> list[Tensor | None]:
    return [None if t is None else t.detach().to(dtype).clone().requires_grad_() for t in tensors]


def gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    weights: tuple[Tensor | None, Tensor | None],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a weighted sum of log-probs and entropies: ours and the float64 reference's."""
    found = []
    for function, dtype in ((chunked_logprobs, torch.float32), (reference, torch.float64)):
        inputs = leaves(hidden, weight, bias, dtype=dtype)
        outputs = function(*inputs, tokens, temperature)
        pairs = zip(weights, outputs, strict=True)
        torch.stack([(w.to(dtype) * o).sum() for w, o in pairs if w is not None]).sum().backward()
        found.append([x.grad for x in inputs if x is not None])
    return found[0], found[1]


def assert_close(ours: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert float((a.double() - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n", [1, 16, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 48])
def test_values_are_those_of_a_full_log_softmax(
    n: int, with_bias: bool, temperature: float
) -> None:
    hidden, weight, bias, tokens = problem(n)
    given = bias if with_bias else None
    logp, entropy = chunked_logprobs(hidden, weight, given, tokens, temperature)
    wide = [None if t is None else t.double() for t in (hidden, weight, given)]
    exact_logp, exact_entropy = reference(*wide, tokens, temperature)
    assert logp.dtype is entropy.dtype is torch.float32
    torch.testing.assert_close(logp.double(), exact_logp, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("n", [3, CHUNK, CHUNK + 5])
@pytest.mark.parametrize("of", ["logp", "entropy", "both"])
def test_gradients_are_those_of_autograd(
    of: str, n: int, with_bias: bool, temperature: float
) -> None:
    hidden, weight, bias, tokens = problem(n)
    generator = torch.Generator().manual_seed(9)
    w = torch.randn(2, n, generator=generator)
    weights = (None if of == "entropy" else w[0], None if of == "logp" else w[1])
    args = (hidden, weight, bias if with_bias else None, tokens, temperature)
    assert_close(*gradients(*args, weights))


def test_a_token_without_weight_gets_no_gradient() -> None:
    hidden, weight, bias, tokens = problem(40)
    mask = torch.ones(40)
    mask[7] = 0.0
    ours, _ = gradients(hidden, weight, bias, tokens, 1.0, (mask, mask))
    assert not bool(ours[0][7].any())
    assert bool(ours[0][8].any())


def test_a_repeated_token_is_counted_each_time() -> None:
    hidden, weight, bias, _ = problem(20)
    tokens = torch.full((20,), 4)
    ones = torch.ones(20)
    assert_close(*gradients(hidden, weight, bias, tokens, 0.7, (ones, None)))


@pytest.mark.parametrize("with_bias", [True, False])
def test_products_computed_another_way_give_the_same_gradients(with_bias: bool) -> None:
    hidden, weight, bias, tokens = problem(CHUNK + 5)
    calls: list[tuple[int, ...]] = []

    def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        calls.append(tuple(w.shape))
        y = (w.double() @ x.double().t()).t().float()
        return y if b is None else y + b

    found = []
    for options in ({"linear": linear}, {}):
        inputs = leaves(hidden, weight, bias if with_bias else None, dtype=torch.float32)
        logp, entropy = chunked_logprobs(*inputs, tokens, 0.7, **options)
        (logp.sum() + entropy.sum()).backward()
        found.append([logp.detach(), entropy.detach(), *(x.grad for x in inputs if x is not None)])
    assert_close(found[0], [t.double() for t in found[1]])
    # Of two chunks: logits, then again with the gradients of states and head.
    head, states, last = (37, 12), (12, CHUNK), (12, 5)
    turned = (12, 37)
    assert calls == [head, head, head, turned, states, head, turned, last]


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_large_logits_neither_overflow_nor_vanish(shift: float) -> None:
    hidden, weight, bias, tokens = problem(16)
    plain, entropy = chunked_logprobs(hidden, weight, bias, tokens, 1.0)
    moved, moved_entropy = chunked_logprobs(hidden, weight, bias + shift, tokens, 1.0)
    torch.testing.assert_close(moved, plain, rtol=0, atol=2e-4)
    torch.testing.assert_close(moved_entropy, entropy, rtol=0, atol=2e-3)


@pytest.mark.invariant("I07")
def test_rows_have_the_bits_of_the_engines_formula() -> None:
    hidden, weight, bias, tokens = problem(CHUNK + 64)
    logp, _ = chunked_logprobs(hidden, weight, bias, tokens, 0.7)
    for rows in (slice(0, 16), slice(CHUNK, CHUNK + 64)):
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        x = scale_logits(logits, torch.full((len(logits), 1), 0.7))
        alone = gather_logprobs(x, torch.logsumexp(x, -1), tokens[rows])
        assert torch.equal(alone, logp[rows])


def test_bfloat16_states_over_float32_weights_give_float32_log_probs_and_gradients() -> None:
    hidden, weight, bias, tokens = problem(48)
    low = hidden.bfloat16().requires_grad_()
    head, head_bias = leaves(weight, bias, dtype=torch.float32)
    logp, entropy = chunked_logprobs(low, head, head_bias, tokens, 1.0)
    (logp.sum() + entropy.sum()).backward()
    exact, _ = reference(hidden.double(), weight.double(), bias.double(), tokens, 1.0)
    assert logp.dtype is torch.float32
    assert float((logp.detach().double() - exact).abs().max()) < 0.3
    assert (low.grad.dtype, head.grad.dtype) == (torch.bfloat16, torch.float32)
    ones = torch.ones(48)
    _, wide = gradients(hidden, weight, bias, tokens, 1.0, (ones, ones))
    for got, want in zip((low.grad, head.grad, head_bias.grad), wide, strict=True):
        assert float((got.double() - want).norm()) < 0.05 * float(want.norm())
