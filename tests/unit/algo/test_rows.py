"""Row sums on packed tokens, and the arithmetic that keeps a bad log-prob visible."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.algo.rows import clamped_exp, log_ratio, require_same_length, row_mean, row_sum

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
MASK = torch.tensor([True, False, True, True, False])
SEQ_ID = torch.tensor([0, 0, 0, 2, 3])


def test_row_sums_and_means_count_only_the_mask_and_empty_rows_are_zero() -> None:
    assert row_sum(VALUES, MASK, SEQ_ID, 4).tolist() == [5.0, 0.0, 8.0, 0.0]
    assert row_mean(VALUES, MASK, SEQ_ID, 4).tolist() == [2.5, 0.0, 8.0, 0.0]


def test_row_sum_does_not_depend_on_the_rows_packed_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(500, generator=generator)
    other = torch.randn(300, generator=generator) * 1e6
    alone = row_sum(row, torch.ones(500, dtype=torch.bool), torch.zeros(500, dtype=torch.long), 1)
    seq_id = torch.cat([torch.zeros(300), torch.ones(500)]).long()
    packed = row_sum(torch.cat([other, row]), torch.ones(800, dtype=torch.bool), seq_id, 2)
    assert torch.equal(packed[1], alone[0])


def test_bfloat16_values_are_summed_in_float32() -> None:
    # In bfloat16 256 + 1 is 256: a running sum would stop there.
    ones = torch.ones(1000, dtype=torch.bfloat16)
    sums = row_sum(ones, ones.bool(), torch.zeros(1000, dtype=torch.long), 1)
    assert sums.dtype == torch.float32
    assert sums.item() == 1000.0


def test_infinite_logp_outside_the_mask_touches_neither_value_nor_gradient() -> None:
    logp = torch.tensor([-1.0, -math.inf], requires_grad=True)
    x = log_ratio(logp, torch.tensor([-2.0, 0.0]), torch.tensor([True, False]))
    clamped_exp(x).sum().backward()
    assert x.tolist() == [1.0, 0.0]
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx(math.e), 0.0]


def test_large_log_ratio_is_clamped_and_an_infinite_one_is_nan() -> None:
    ratio = clamped_exp(torch.tensor([500.0, -500.0, math.inf, -math.inf, math.nan]))
    assert ratio[:2].tolist() == [pytest.approx(math.exp(20)), pytest.approx(math.exp(-20))]
    assert ratio[2:].isnan().all()


def test_a_tensor_that_would_broadcast_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'advantage': \(1,\)"):
        require_same_length(logp=torch.zeros(3), advantage=torch.zeros(1))
    with pytest.raises(ValueError, match="1-D"):
        require_same_length(logp=torch.zeros(3, 1), mask=torch.zeros(3, 1))
