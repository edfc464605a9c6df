"""Sampling against naive float64 and exact-integer oracles."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.generate.engine.sampler import SamplingRows, inverse_cdf, sample, uniforms

MASK = 2**64 - 1


def rows(
    n: int,
    *,
    temperature: list[float] | float = 1.0,
    top_p: list[float] | float = 1.0,
    top_k: list[int] | int = 0,
    min_p: list[float] | float = 0.0,
) -> SamplingRows:
    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=dtype)

    p, k, m = column(top_p, torch.float32), column(top_k, torch.long), column(min_p, torch.float32)
    hot = column(temperature, torch.float32)
    return SamplingRows(
        temperature=hot,
        top_p=p,
        top_k=k,
        min_p=m,
        truncated=bool(((p < 1) | (k > 0) | (m > 0)).any()),
        greedy=bool((hot <= 0).any()),
        scaled=True,
    )


def streams(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One random stream, positions 0..n-1."""
    return torch.full((n,), seed), torch.arange(n)


# Uniforms


def splitmix64(x: int) -> int:
    """The published generator's step and finalizer, in unbounded integers."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_uniforms_are_splitmix64_of_seed_and_position(seed: int, position: int) -> None:
    expected = (splitmix64(splitmix64(seed & MASK) ^ position) >> 11) / 2**53
    assert float(uniforms(torch.tensor([seed]), torch.tensor([position]))) == expected


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniforms_are_flat_and_uncorrelated(along: str) -> None:
    n = 1 << 16
    index, zero = torch.arange(n), torch.zeros(n, dtype=torch.long)
    u = uniforms(zero, index) if along == "positions" else uniforms(index, zero)
    assert u.dtype is torch.float64
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    bins = torch.histc(u, 64, 0, 1)
    chi2 = float(((bins - n / 64) ** 2).sum() / (n / 64))
    assert chi2 < 63 + 4 * (2 * 63) ** 0.5
    centered = u - 0.5
    for lag in (1, 2, 16):
        r = float((centered[lag:] * centered[:-lag]).mean() * 12)
        assert abs(r) < 4 / n**0.5


def test_a_uniform_does_not_depend_on_its_neighbors() -> None:
    seeds, positions = torch.arange(40) * 7919, torch.arange(40) % 5
    together = uniforms(seeds, positions)
    alone = torch.cat([uniforms(seeds[i : i + 1], positions[i : i + 1]) for i in range(40)])
    assert torch.equal(together, alone)


# The draw


def exact_scan(weights: list[int], u: float) -> int:
    """First index whose cumulative weight exceeds u · total, in rational numbers."""
    target, total = Fraction(u) * sum(weights), 0
    for i, w in enumerate(weights):
        total += w
        if total > target:
            return i
    raise AssertionError("u must be < 1")


vocabularies = st.lists(
    st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 2**20)), min_size=1, max_size=700
).filter(any)


@given(vocabularies, st.floats(0, 1, exclude_max=True))
@example([1] * 512, 0.5)  # at the edge of a block
@example([1] * 256 + [0] * 256 + [1] * 256, 0.5)
@example([1, 1, 0, 2], 0.5)
@settings(max_examples=150, deadline=None)
def test_inverse_cdf_is_the_exact_scan_when_sums_are_exact(weights: list[int], u: float) -> None:
    p = torch.tensor([weights], dtype=torch.float32)
    drawn = int(inverse_cdf(p, torch.tensor([u], dtype=torch.float64)))
    expected, total = exact_scan(weights, u), sum(weights)
    assert drawn == expected or Fraction(u) * total != Fraction(u * total)
    if drawn != expected:
        # Only u · total itself is rounded: the target must lie on the edge between the two.
        edge = sum(weights[: min(drawn, expected) + 1])
        assert abs(u * sum(weights) - edge) <= 2**-50 * edge
    assert weights[drawn] > 0


@given(
    st.lists(
        st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-12, 1e-7, 0.1, 0.5, 1.0]),
        min_size=1,
        max_size=600,
    ).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53), st.just(0.0)),
)
@settings(max_examples=150, deadline=None)
def test_inverse_cdf_with_tiny_masses_is_a_float64_scan_and_never_draws_zero(
    weights: list[float], u: float
) -> None:
    p = torch.tensor([weights], dtype=torch.float32)
    drawn = int(inverse_cdf(p, torch.tensor([u], dtype=torch.float64)))
    cdf = np.cumsum(p[0].numpy().astype(np.float64))
    assert float(p[0, drawn]) > 0
    slack = 1e-12 * cdf[-1]
    assert (cdf[drawn - 1] if drawn else 0.0) <= u * cdf[-1] + slack
    assert cdf[drawn] >= u * cdf[-1] - slack


@pytest.mark.parametrize("v", [1, 255, 256, 257, 300, 1000])
def test_inverse_cdf_of_rows_is_that_of_each_row(v: int) -> None:
    generator = torch.Generator().manual_seed(v)
    p = torch.rand(50, v, generator=generator) ** 8
    u = torch.rand(50, generator=generator, dtype=torch.float64)
    full = p.double().cumsum(-1)
    scan = (full <= u[:, None] * full[:, -1:]).sum(-1)
    assert torch.equal(inverse_cdf(p, u), scan)


def test_the_largest_uniform_never_falls_off_the_end_onto_padding() -> None:
    """Sums in another order differ in the last bit, and 200 is not a whole block."""
    generator = torch.Generator().manual_seed(0)
    p = torch.exp(4 * torch.randn(5000, 200, generator=generator))
    p[:, 190:] = 0
    drawn = inverse_cdf(p, torch.full((5000,), 1 - 2.0**-53, dtype=torch.float64))
    assert bool((drawn == 189).all())


def test_a_row_of_nan_gives_an_index_inside_the_vocabulary() -> None:
    p = torch.full((2, 300), torch.nan)
    drawn = inverse_cdf(p, torch.tensor([0.0, 0.99], dtype=torch.float64))
    assert int(drawn.max()) < 300
    assert int(drawn.min()) >= 0


# Sampling


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """In standard deviations above what chance gives; its tail is longer than a Gaussian one."""
    kept = probabilities > 0
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert float(counts[~kept].sum()) == 0
    expected = probabilities[kept] * len(tokens)
    free = int(kept.sum()) - 1
    return float((((counts[kept] - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_probabilities(temperature: float, seed: int) -> None:
    n, v = 20000, 12
    logits = torch.randn(v, generator=torch.Generator().manual_seed(seed))
    options = rows(n, temperature=temperature)
    tokens, logp = sample(logits.expand(n, v), options, *streams(n, seed))
    exact = torch.softmax(logits.double() / temperature, -1)
    assert chi_square(tokens, exact) < 6
    np.testing.assert_allclose(logp, exact.log()[tokens], atol=1e-6)


def naive_kept(p: np.ndarray, top_p: float, top_k: int, min_p: float) -> set[int]:
    """top_k, then the smallest set of mass top_p of what is left, then min_p; ties by index."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, mass, nucleus = sum(p[i] for i in order), 0.0, []
        for i in order:
            if nucleus and mass >= top_p * total:
                break
            nucleus.append(i)
            mass += p[i]
        order = nucleus
    return {i for i in order if p[i] >= min_p * p[order[0]]} | {order[0]}


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [
        (0.5, 0, 0.0),
        (0.9, 0, 0.0),
        (1e-6, 0, 0.0),
        (1.0, 1, 0.0),
        (1.0, 7, 0.0),
        (1.0, 999, 0.0),
        (1.0, 0, 0.1),
        (1.0, 0, 1.0),
        (0.8, 10, 0.05),
        (0.3, 2, 0.9),
    ],
)
def test_truncation_keeps_the_naive_set_and_renormalizes(
    top_p: float, top_k: int, min_p: float
) -> None:
    n, v = 20000, 40
    logits = 2 * torch.randn(v, generator=torch.Generator().manual_seed(5))
    options = rows(n, temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p)
    tokens, logp = sample(logits.expand(n, v), options, *streams(n))
    p = torch.softmax(logits.double() / 0.8, -1).numpy()
    kept = naive_kept(p, top_p, top_k, min_p)
    exact = torch.tensor([p[i] if i in kept else 0.0 for i in range(v)], dtype=torch.float64)
    exact /= exact.sum()
    if len(kept) > 1:
        assert chi_square(tokens, exact) < 6
    assert set(tokens.tolist()) <= kept
    np.testing.assert_allclose(logp, exact.log()[tokens], atol=1e-6)


def test_equals_are_cut_in_index_order() -> None:
    tokens, logp = sample(torch.zeros(500, 9), rows(500, top_k=4), *streams(500))
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(logp, np.log(0.25), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.5}, 4),  # the fourth reaches the mass exactly
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 8),
        ({"top_k": 6, "top_p": 0.5}, 3),
    ],
)
def test_edges_of_truncation_are_inclusive(options: dict[str, float], kept: int) -> None:
    tokens, logp = sample(torch.zeros(500, 8), rows(500, **options), *streams(500))
    assert set(tokens.tolist()) == set(range(kept))
    np.testing.assert_allclose(logp, -np.log(kept), atol=1e-6)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(500, 4)
    tokens, _ = sample(logits, rows(500, top_k=2, top_p=0.55), *streams(500))
    assert set(tokens.tolist()) == {0}  # 0.4 of 0.7 is more than 0.55


def test_each_row_has_its_own_options_and_untruncated_rows_keep_their_bits() -> None:
    n, v = 12, 300
    logits = 3 * torch.randn(n, v, generator=torch.Generator().manual_seed(7))
    seeds, positions = torch.arange(n), torch.zeros(n, dtype=torch.long)
    temperature = [(1.0, 0.7)[i % 2] for i in range(n)]
    plain = sample(logits, rows(n, temperature=temperature), seeds, positions)
    options = {
        "top_k": [(0, 0, 5, 0)[i % 4] for i in range(n)],
        "top_p": [(1.0, 1.0, 1.0, 0.6)[i % 4] for i in range(n)],
    }
    mixed = sample(logits, rows(n, temperature=temperature, **options), seeds, positions)
    untouched = torch.tensor([i % 4 < 2 for i in range(n)])
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a[untouched], b[untouched])
    for i in range(n):
        one = {k: [x[i]] for k, x in options.items()}
        alone = sample(
            logits[i : i + 1],
            rows(1, temperature=[temperature[i]], **one),
            seeds[i : i + 1],
            positions[i : i + 1],
        )
        assert torch.equal(alone[0][0], mixed[0][i])
        assert torch.equal(alone[1][0], mixed[1][i])


@pytest.mark.parametrize("threads", [1, 2])
def test_logprobs_have_the_bits_of_logsumexp_however_many_rows_there_are(threads: int) -> None:
    n, v = 17, 40000
    logits = 3 * torch.randn(n, v, generator=torch.Generator().manual_seed(7))
    seeds, positions = torch.arange(n), torch.zeros(n, dtype=torch.long)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens, logp = sample(logits, rows(n), seeds, positions)
        log_z = torch.logsumexp(logits, -1)
        alone = [
            sample(logits[i : i + 1], rows(1), seeds[i : i + 1], positions[i : i + 1])
            for i in (0, 7, 16)
        ]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logp, logits.gather(1, tokens[:, None]).squeeze(1) - log_z)
    for i, (token, score) in zip((0, 7, 16), alone, strict=True):
        assert torch.equal(token[0], tokens[i])
        assert torch.equal(score[0], logp[i])


def test_rows_at_temperature_one_keep_their_bits_beside_others() -> None:
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(7))
    seeds, positions = torch.arange(4), torch.zeros(4, dtype=torch.long)
    plain = sample(logits, replace(rows(4), scaled=False), seeds, positions)
    mixed = sample(logits, rows(4, temperature=[1.0, 0.5, 1.0, 1.0]), seeds, positions)
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])
    assert float(plain[1][1]) != float(mixed[1][1])


def test_greedy_rows_take_the_first_of_the_likeliest_with_logprob_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 2.0]])
    options = rows(3, temperature=[0.0, 1.0, 0.0])
    tokens, logp = sample(logits, options, *streams(3))
    assert tokens[[0, 2]].tolist() == [1, 3]
    assert logp[[0, 2]].tolist() == [0.0, 0.0]
    assert float(logp[1]) < 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_non_finite_logits_give_a_non_finite_logprob(
    bad: float, temperature: float, top_k: int
) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    options = rows(3, temperature=temperature, top_k=top_k)
    tokens, logp = sample(logits, options, *streams(3))
    assert torch.isfinite(logp).tolist() == [True, False, True]
    assert int(tokens.max()) < 10
