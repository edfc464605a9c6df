"""Which slots are attended together never changes a bit, and costs what the model says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.generate.engine import runs as module
from offbeat.generate.engine.cache import DecodeContext, SlotCache
from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.runs import RUN_COST, Run, key_class, new_order, plan_runs
from offbeat.model.attention import key_bucket
from offbeat.types import Completion, GenerateRequest

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
RunAll = Callable[..., dict[str, Completion]]

lengths_of_slots = (
    st.lists(st.one_of(st.just(0), st.integers(1, 64), st.integers(1, 1000)), min_size=1)
    .filter(any)
    .map(lambda x: np.array(x + [0] * (-len(x) % 16)))
)


def test_classes_end_at_64_128_192_and_then_double() -> None:
    edges = [64, 128, 192, 384, 768, 1536]
    for number, edge in enumerate(edges, start=1):
        assert key_class(np.array([edge, edge + 1])).tolist() == [number, number + 1]
    assert key_class(np.array([0, 1])).tolist() == [0, 1]


@given(lengths_of_slots)
@settings(max_examples=200, deadline=None)
def test_runs_cover_every_slot_once_with_keys_enough(lengths: np.ndarray) -> None:
    runs = plan_runs(lengths).runs
    assert [r.begin for r in runs] == [0, *(r.end for r in runs[:-1])]
    assert runs[-1].end == len(lengths)
    for run in runs:
        assert run.keys >= lengths[run.begin : run.end].max()
        assert run.keys == key_bucket(run.keys)


@given(lengths_of_slots)
@settings(max_examples=200, deadline=None)
def test_a_new_order_is_a_permutation_by_class_that_satisfies(lengths: np.ndarray) -> None:
    order = new_order(lengths)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sorted_lengths = lengths[order]
    classes = key_class(sorted_lengths)
    assert (np.diff(classes) <= 0).all()
    # Nothing moves that lies among its class already, and nothing is asked for twice.
    stays = key_class(lengths) == classes
    assert (order[stays] == np.flatnonzero(stays)).all()
    used = max(16, -(-int(np.count_nonzero(lengths)) // 16) * 16)
    assert not plan_runs(sorted_lengths[:used]).renumber


@pytest.mark.parametrize("seed", range(5))
def test_the_split_is_the_cheapest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.repeat(rng.choice([20, 100, 190, 380, 700], 6), rng.integers(1, 20, 6))
    lengths = np.concatenate([lengths, np.zeros(-len(lengths) % 16, dtype=np.int64)])
    edges = [i for i in range(1, len(lengths)) if lengths[i] != lengths[i - 1] and lengths[i]]

    def cost(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(lengths)]
        return sum(
            RUN_COST + (b - a) * key_bucket(int(lengths[a:b].max()))
            for a, b in itertools.pairwise(bounds)
        )

    cheapest = min(
        cost(cuts) for n in range(len(edges) + 1) for cuts in itertools.combinations(edges, n)
    )
    assert sum(r.cost for r in plan_runs(lengths).runs) == cheapest


def test_equal_lengths_are_one_run() -> None:
    assert plan_runs(np.full(64, 100)).runs == (Run(begin=0, end=64, keys=112),)


def test_one_long_answer_among_short_ones_is_attended_alone_where_it_is() -> None:
    lengths = np.full(64, 40)
    lengths[40] = 400
    plan = plan_runs(lengths)
    assert [(r.begin, r.end, r.keys) for r in plan.runs] == [
        (0, 40, 48),
        (40, 41, 576),
        (41, 64, 48),
    ]
    assert not plan.renumber


def test_mixed_lengths_are_put_in_order_long_ones_first() -> None:
    lengths = np.array([40, 400] * 32)
    assert plan_runs(lengths).renumber
    plan = plan_runs(lengths[new_order(lengths)])
    assert plan.runs == (Run(begin=0, end=32, keys=576), Run(begin=32, end=64, keys=48))


def test_free_slots_in_between_are_closed_up_when_that_saves_a_block_of_rows() -> None:
    lengths = np.zeros(64, dtype=np.int64)
    lengths[[3, 20, 60]] = 30
    assert plan_runs(lengths).renumber
    assert np.flatnonzero(lengths[new_order(lengths)]).tolist() == [0, 1, 2]


@pytest.mark.invariant("I03")
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_every_split_into_runs_has_the_same_bits(ratio: int) -> None:
    torch.manual_seed(0)
    visible = torch.tensor([5, 16, 17, 60, 64, 65, 100, 128, 129, 190, 192, 193, 300, 380, 20, 3])
    cache = SlotCache(
        layers=1,
        slots=16,
        kv_heads=2,
        head_dim=64,
        limit=450,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.reserve(430)
    cache.keys.normal_()
    cache.values.normal_()
    q, k, v = torch.randn(16, 2 * ratio, 64), torch.randn(16, 2, 64), torch.randn(16, 2, 64)
    one = [Run(begin=0, end=16, keys=key_bucket(380))]
    whole = DecodeContext(cache, visible - 1, visible, 380, runs=one).attend(0, q, k, v, 0.3)
    for cuts in ((5,), (3, 6, 9, 12), tuple(range(1, 16))):
        runs = [
            Run(begin=a, end=b, keys=key_bucket(int(visible[a:b].max())))
            for a, b in itertools.pairwise((0, *cuts, 16))
        ]
        ctx = DecodeContext(cache, visible - 1, visible, 380, runs=runs)
        assert torch.equal(ctx.attend(0, q, k, v, 0.3), whole)


@pytest.mark.invariant("I03")
def test_mixed_lengths_that_renumber_slots_often_have_the_bits_of_the_run_alone(
    make_engine: MakeEngine, ask: Ask, run: RunAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(lengths: np.ndarray) -> np.ndarray:
        calls.append(1)
        return new_order(lengths)

    monkeypatch.setattr("offbeat.generate.engine.engine.new_order", counted)
    monkeypatch.setattr(module, "RUN_COST", 8)
    monkeypatch.setattr(module, "WASTE", 1.0)
    engine = make_engine(slots=10)
    lengths = [3, 70, 8, 150, 30, 90, 5, 64, 130, 12, 90, 7]
    requests = [
        ask(4 + (i * 37) % 190, n, temperature=0.7, group=i // 2) for i, n in enumerate(lengths)
    ]
    siblings = [ask(50, 5 + 40 * (i % 2), sibling=i) for i in range(8)]
    together = run(engine, *requests, *siblings)
    assert len(calls) > 5
    # Prompts in renumbered slots, running or free, are still shared.
    assert engine.prefill_tokens == sum(len(r.prompt_ids) for r in requests) + 50
    for request in (*requests, *siblings):
        alone = run(make_engine(slots=1), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


def test_when_a_crowd_has_gone_a_late_answer_is_decoded_in_few_rows(
    make_engine: MakeEngine, ask: Ask, run: RunAll, model: torch.nn.Module
) -> None:
    engine = make_engine(slots=40, model=model)
    for i in range(40):
        engine.submit(ask(4 + i, 30 if i == 39 else 2))
    for _ in range(3):
        engine.step()
    rows: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    run(engine)
    assert set(rows) == {16}


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
