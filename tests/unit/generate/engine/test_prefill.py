"""Prompts are computed in chunks beside decoding, and nothing about an answer shows it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from offbeat.generate.engine.engine import PREFILL_CHUNK, PREFILL_TOKENS, Engine
from offbeat.types import Completion, GenerateRequest, PolicyVersion, StopReason

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]

CHUNK = "offbeat.generate.engine.engine.PREFILL_CHUNK"
TOKENS = "offbeat.generate.engine.engine.PREFILL_TOKENS"


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


def watch_rows(model: torch.nn.Module) -> list[int]:
    """The number of rows of every pass from now on."""
    rows: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    return rows


def halve(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.invariant("I03")
@pytest.mark.parametrize("first", [1, 2, 3, 4, 7, 15, 16, 17, 31, 45, 59, 60])
def test_a_prompt_cut_anywhere_has_the_bits_of_one_pass(
    make_engine: MakeEngine, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    request = ask(61, 6, temperature=0.7)
    whole = run(make_engine(), request)[request.request_id]
    engine = make_engine()
    engine.submit(request)
    monkeypatch.setattr(TOKENS, first)
    engine.step()
    assert engine.prefill_tokens == first
    monkeypatch.setattr(TOKENS, 2048)
    assert same_bits(run(engine)[request.request_id], whole)
    assert engine.prefill_tokens == 61


@pytest.mark.invariant("I03")
@pytest.mark.parametrize("size", [1, 5, 16, 100, 191, 192, 193])
def test_long_prompts_in_chunks_of_any_size_beside_decoding_have_the_bits_of_one_pass(
    make_engine: MakeEngine, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    requests = [ask(n, 5, temperature=0.7) for n in ((40, 33) if size < 16 else (400, 191, 260))]
    alone = {r.request_id: run(make_engine(), r)[r.request_id] for r in requests}
    monkeypatch.setattr(CHUNK, size)
    engine = make_engine(slots=8)
    decoding = ask(3, 150)
    alone[decoding.request_id] = run(make_engine(), decoding)[decoding.request_id]
    engine.submit(decoding)
    engine.step()
    together = run(engine, *requests)
    assert all(same_bits(together[i], alone[i]) for i in alone)


def test_decoding_goes_on_while_long_prompts_are_computed(
    make_engine: MakeEngine, ask: Ask, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK, 32)
    engine, rows = make_engine(slots=16, model=model), watch_rows(model)
    for _ in range(4):
        engine.submit(ask(5, 60))
    engine.step()
    engine.submit(ask(400, 5))
    engine.submit(ask(300, 5))
    del rows[:]
    for step in range(1, 13):
        assert engine.step() == []
        assert engine.decode_tokens == 4 * step
        assert engine.prefill_tokens == 5 + 32 * step
    assert max(rows) <= 16 + 32


def test_the_bounds_of_a_pass_hold_with_the_numbers_in_use(
    make_engine: MakeEngine, ask: Ask, model: torch.nn.Module
) -> None:
    engine, rows = make_engine(slots=16, model=model), watch_rows(model)
    for i in range(6):
        engine.submit(ask(480 + i, 20))
    engine.step()
    assert rows == [PREFILL_TOKENS]
    while engine.prefill_tokens < sum(480 + i for i in range(6)):
        engine.step()
        assert rows[-1] <= 16 + PREFILL_CHUNK
    assert len(rows) > 3


def test_prompts_are_computed_in_the_order_of_arrival(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENS, 16)
    monkeypatch.setattr(CHUNK, 16)
    engine = make_engine(slots=4)
    for n in (100, 5, 40, 3):
        engine.submit(ask(n, 1))
    ends: list[str] = []
    while engine.running or engine.waiting:
        ends += [r.request_id for r, _ in engine.step()]
    assert ends == ["r0", "r1", "r2", "r3"]


def test_siblings_wait_for_the_one_that_computes_their_prompt(
    make_engine: MakeEngine, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [ask(100, 4 + i, sibling=i) for i in range(5)]
    alone = {r.request_id: run(make_engine(), r)[r.request_id] for r in group}
    monkeypatch.setattr(TOKENS, 24)
    engine = make_engine(slots=3)
    engine.submit(group[0])
    engine.step()
    together = run(engine, *group[1:])  # some join half way, some find no slot
    assert engine.prefill_tokens == 100
    assert all(same_bits(together[i], alone[i]) for i in alone)


@pytest.mark.invariant("I06")
def test_a_half_computed_prompt_starts_anew_under_new_weights(
    make_engine: MakeEngine,
    ask: Ask,
    run: Run,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TOKENS, 40)
    engine = make_engine(model=model)
    group = [ask(100, 8, sibling=i, seed=i) for i in range(2)]
    for request in group:
        engine.submit(request)
    engine.step()
    engine.step()
    assert engine.prefill_tokens == 80
    engine.swap_weights(lambda: halve(model), PolicyVersion(1))
    together = run(engine)
    assert engine.prefill_tokens == 80 + 100
    for request in group:
        answer = together[request.request_id]
        assert answer.versions.tolist() == [1] * 8
        assert same_bits(run(make_engine(model=model), request)[request.request_id], answer)


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_aborting_while_a_prompt_is_computed_leaves_the_others_whole(
    make_engine: MakeEngine,
    ask: Ask,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    gone: tuple[int, ...],
) -> None:
    """The slot that computes hands what it has to the next who waits."""
    group = [ask(100, 6, sibling=i, seed=i) for i in range(3)]
    other = ask(70, 6)
    alone = {r.request_id: run(make_engine(), r)[r.request_id] for r in (*group, other)}
    monkeypatch.setattr(TOKENS, 40)
    engine = make_engine(slots=4)
    for request in (*group, other):
        engine.submit(request)
    engine.step()
    ended = engine.abort([group[i].request_id for i in gone])
    assert [len(c.token_ids) for _, c in ended] == [0] * len(gone)
    assert {c.stop_reason for _, c in ended} == {StopReason.ABORTED}
    together = run(engine, *(group[i] for i in gone))
    assert all(same_bits(together[i], alone[i]) for i in alone)
    assert engine.prefill_tokens == 170 + (40 if len(gone) == 3 else 0)


def test_after_a_reset_half_computed_prompts_are_forgotten(
    make_engine: MakeEngine, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ask(100, 6)
    alone = run(make_engine(), request)[request.request_id]
    monkeypatch.setattr(TOKENS, 40)
    engine = make_engine()
    engine.submit(request)
    engine.step()
    engine.reset()
    assert (engine.running, engine.waiting, engine.step()) == (0, 0, [])
    assert same_bits(run(engine, request)[request.request_id], alone)


def test_a_pass_with_both_kinds_of_rows_counts_as_both(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.submit(ask(9, 20))
    engine.step()
    assert engine.decode_spans.take() == ()
    assert len(engine.prefill_spans.take()) == 1
    engine.submit(ask(30, 20))
    engine.step()
    assert engine.decode_spans.take() == engine.prefill_spans.take() != ()
