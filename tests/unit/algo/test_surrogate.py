"""The policy loss against a naive float64 loop, its gradient, limits, invariances and inputs."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.algo.behavior import BehaviorMode
from offbeat.algo.surrogate import (
    Aggregation,
    Denominators,
    LossTerms,
    RatioLevel,
    aggregate,
    clipped_surrogate,
    importance_ratio,
    policy_loss,
)

LENGTHS = (12, 9, 1, 14)
ROWS, TOKENS = len(LENGTHS), sum(LENGTHS)
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "constant")
LEVELS: tuple[RatioLevel, ...] = ("token", "sequence")


def batch(seed: int = 0, spread: float = 0.4) -> dict[str, Any]:
    """Arguments of `policy_loss`: four rows, some prompt tokens, ratios around the bounds."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(TOKENS, generator=generator, dtype=torch.float64)

    behave = -1.0 - noise(0.5).abs()
    prox = behave + noise(spread)
    seq_id = torch.repeat_interleave(torch.arange(ROWS), torch.tensor(LENGTHS))
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[[0, 12, 22, 23]] = False
    return {
        "logp": prox + noise(spread),
        "prox_logp": prox,
        "behave_logp": behave,
        "advantage": noise(1.0),
        "mask": mask,
        "seq_id": seq_id,
        "level": "token",
        "eps_clip": 0.2,
        "eps_clip_higher": 0.3,
        "c_clip": 1.4,
        "behavior_mode": "token_mask",
        "behavior_cap": 1.5,
        "behavior_floor": 0.6,
        "aggregation": "token_mean",
        "denominators": denominators(mask, seq_id),
    }


def denominators(mask: Tensor, seq_id: Tensor) -> Denominators:
    counts = torch.zeros(ROWS, dtype=torch.long).index_add(0, seq_id, mask.long())
    return Denominators(
        tokens=float(mask.sum()), rows=ROWS, constant_tokens=ROWS * 20, row_tokens=counts
    )


def gradient(arguments: dict[str, Any]) -> Tensor:
    logp = arguments["logp"].clone().requires_grad_()
    return torch.autograd.grad(policy_loss(**{**arguments, "logp": logp}).loss, logp)[0]


def naive_loss(a: dict[str, Any]) -> float:
    """MATH: Σ m'·w·surr / denominator, token by token in Python floats."""
    o, p, x, adv = (a[k].tolist() for k in ("behave_logp", "prox_logp", "logp", "advantage"))
    rows = a["seq_id"].tolist()
    policy = [i for i in range(TOKENS) if a["mask"][i]]

    def mean(row: int, value: Callable[[int], float]) -> float:
        of = [i for i in policy if rows[i] == row]
        return sum(value(i) for i in of) / len(of)

    lo = 1 - a["eps_clip"]
    hi = 1 + (a["eps_clip"] if a["eps_clip_higher"] is None else a["eps_clip_higher"])
    total = 0.0
    for i in policy:
        u, advantage = math.exp(x[i] - p[i]), adv[i]
        if a["level"] == "sequence":
            u = math.exp(mean(rows[i], lambda j: x[j] - p[j]))
            advantage = mean(rows[i], lambda j: adv[j])
        surr = max(-advantage * u, -advantage * min(max(u, lo), hi))
        if a["c_clip"] is not None and advantage < 0:
            surr = min(surr, -a["c_clip"] * advantage)
        w = math.exp(p[i] - o[i])
        if a["behavior_mode"] == "disabled":
            w = 1.0
        elif w > a["behavior_cap"] or w < (a["behavior_floor"] or 0.0):
            w = 0.0
        of_row = sum(rows[j] == rows[i] for j in policy)
        total += {
            "token_mean": w * surr / len(policy),
            "sequence_mean": w * surr / of_row / ROWS,
            "constant": w * surr / (ROWS * 20),
        }[a["aggregation"]]
    return total


@pytest.mark.parametrize(
    ("level", "aggregation", "c_clip", "higher"),
    [*itertools.product(LEVELS, AGGREGATIONS, (None, 1.4), (None, 0.3))],
)
def test_policy_loss_equals_a_naive_loop(
    level: RatioLevel, aggregation: Aggregation, c_clip: float | None, higher: float | None
) -> None:
    for seed in range(5):
        arguments = batch(seed) | {
            "level": level,
            "aggregation": aggregation,
            "c_clip": c_clip,
            "eps_clip_higher": higher,
        }
        assert policy_loss(**arguments).loss.item() == pytest.approx(
            naive_loss(arguments), rel=1e-12
        )


@pytest.mark.parametrize(("level", "aggregation"), [*itertools.product(LEVELS, AGGREGATIONS)])
def test_policy_loss_passes_gradcheck(level: RatioLevel, aggregation: Aggregation) -> None:
    arguments = batch() | {"level": level, "aggregation": aggregation}

    def loss(logp: Tensor) -> Tensor:
        return policy_loss(**{**arguments, "logp": logp}).loss

    assert torch.autograd.gradcheck(loss, (arguments["logp"].clone().requires_grad_(),))
    assert gradient(arguments).abs().sum() > 0


def test_float32_loss_is_close_to_the_float64_one() -> None:
    arguments = batch()
    names = ("logp", "prox_logp", "behave_logp", "advantage")
    single = arguments | {name: arguments[name].float() for name in names}
    assert policy_loss(**single).loss.item() == pytest.approx(naive_loss(arguments), rel=1e-5)


# --- the parts -----------------------------------------------------------------------------------


def test_clip_binds_only_where_it_is_pessimistic() -> None:
    ratio = torch.tensor([0.5, 1.0, 2.0, 0.5, 1.0, 2.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    terms = clipped_surrogate(ratio, advantage, 0.2, 0.28)
    assert terms.loss_T.tolist() == pytest.approx([-0.5, -1.0, -1.28, 0.8, 1.0, 2.0])
    assert terms.clipped_T.tolist() == [False, False, True, True, False, False]
    assert not terms.dual_clipped_T.any()


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    ratio = torch.tensor([100.0, 100.0, 3.0])
    terms = clipped_surrogate(ratio, torch.tensor([1.0, -1.0, -1.0]), 0.2, c_clip=4.0)
    assert terms.loss_T.tolist() == pytest.approx([-1.2, 4.0, 3.0])
    assert terms.dual_clipped_T.tolist() == [False, True, False]
    with pytest.raises(ValueError, match="c_clip must be > 1"):
        clipped_surrogate(ratio, ratio, 0.2, c_clip=1.0)


def test_infinite_clip_range_is_the_plain_surrogate() -> None:
    ratio = torch.tensor([0.01, 50.0])
    terms = clipped_surrogate(ratio, torch.tensor([-2.0, 3.0]), math.inf)
    assert terms.loss_T.tolist() == pytest.approx([0.02, -150.0])
    assert not terms.clipped_T.any()


def test_sequence_ratio_is_the_geometric_mean_of_the_token_ratios() -> None:
    a = batch()
    common = (a["logp"], a["prox_logp"], a["mask"], a["seq_id"], ROWS)
    token, sequence = importance_ratio(*common, "token"), importance_ratio(*common, "sequence")
    for row in range(ROWS):
        of = (a["seq_id"] == row) & a["mask"]
        expected = token[of].log().mean().exp()
        assert torch.allclose(sequence[of], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("token_mean", (1 + 2 + 6) / 10), ("sequence_mean", (3 / 4 + 6 / 2) / 5), ("constant", 0.09)],
)
def test_aggregation_divides_by_counts_taken_before_the_filter(
    method: Aggregation, expected: float
) -> None:
    # Row 0 had four policy tokens of which two are kept, row 1 two of which one; row 2 is empty.
    counts = Denominators(
        tokens=10, rows=5, constant_tokens=100, row_tokens=torch.tensor([4, 2, 0])
    )
    found = aggregate(
        torch.tensor([1.0, 2.0, math.nan, 6.0]),
        torch.tensor([True, True, False, True]),
        torch.tensor([0, 0, 0, 1]),
        3,
        method,
        counts,
    )
    assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["tokens", "rows", "constant_tokens"])
def test_a_minibatch_without_trainable_tokens_is_refused(name: str) -> None:
    counts = {"tokens": 1, "rows": 1, "constant_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match="without trainable tokens"):
        Denominators(**counts, row_tokens=torch.tensor([1]))


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'advantage': \(1,\)"):
        policy_loss(**batch() | {"advantage": torch.ones(1, dtype=torch.float64)})


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.invariant("I08")
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_decoupled_is_ppo_with_ratio_one_and_nothing_clipped(level: RatioLevel) -> None:
    logp = batch()["logp"]
    decoupled = batch() | {"prox_logp": logp, "behave_logp": logp, "level": level}
    ppo = decoupled | {
        "behavior_mode": "disabled",
        "behavior_cap": None,
        "behavior_floor": None,
    }
    terms = policy_loss(**decoupled)
    assert terms.ratio_T.eq(1.0).all()
    assert terms.weight_T[decoupled["mask"]].eq(1.0).all()
    assert not (terms.clipped_T | terms.dual_clipped_T | terms.nonfinite_T).any()
    assert torch.equal(terms.kept_T, decoupled["mask"])
    assert torch.equal(terms.loss, policy_loss(**ppo).loss)
    assert torch.equal(gradient(decoupled), gradient(ppo))


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logp = batch()["logp"]
    arguments = batch() | {"prox_logp": logp, "behave_logp": logp}
    expected = torch.where(arguments["mask"], -arguments["advantage"], 0.0)
    expected = expected / arguments["denominators"].tokens
    assert torch.allclose(gradient(arguments), expected, rtol=1e-12)


def test_metric_tensors_are_detached_and_the_loss_is_not() -> None:
    arguments = batch()
    arguments["logp"].requires_grad_()
    terms = policy_loss(**arguments)
    assert terms.loss.requires_grad
    per_token = (terms.ratio_T, terms.weight_T, terms.clipped_T, terms.kept_T)
    assert not any(tensor.requires_grad for tensor in per_token)


# --- broken inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["disabled", "token_mask", "sequence_mask"])
def test_nonfinite_behavior_logp_drops_the_token_even_when_it_is_the_proximal_one(
    level: RatioLevel, mode: BehaviorMode
) -> None:
    arguments = batch() | {"level": level, "behavior_mode": mode}
    if mode == "disabled":
        arguments |= {"behavior_cap": None, "behavior_floor": None}
    broken = arguments["behave_logp"].clone()
    broken[2] = math.nan
    arguments |= {"behave_logp": broken, "prox_logp": broken}
    terms = policy_loss(**arguments)
    assert terms.nonfinite_T.nonzero().flatten().tolist() == [2]
    assert terms.loss.isfinite()
    found = gradient(arguments)
    assert found.isfinite().all()
    assert found[2] == 0.0
    # The same batch in which token 2 was never the policy's, over the same denominators.
    finite = broken.nan_to_num()
    without = arguments["mask"].clone()
    without[2] = False
    clean = arguments | {"behave_logp": finite, "prox_logp": finite, "mask": without}
    assert torch.equal(found, gradient(clean))


@pytest.mark.parametrize("name", ["logp", "prox_logp"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_broken_logp_of_a_kept_token_shows_in_the_loss(name: str, bad: float) -> None:
    arguments = batch()
    token = int(policy_loss(**arguments).kept_T.nonzero()[0])
    broken = arguments[name].clone()
    broken[token] = bad
    assert policy_loss(**arguments | {name: broken}).loss.isnan()


def test_what_stands_on_prompt_tokens_does_not_matter() -> None:
    arguments = batch()
    prompt = ~arguments["mask"]
    spoiled = arguments | {
        name: torch.where(prompt, bad, arguments[name])
        for name, bad in (("logp", -math.inf), ("prox_logp", math.nan), ("behave_logp", math.nan))
    }
    assert torch.equal(gradient(spoiled), gradient(arguments))
    assert not policy_loss(**spoiled).nonfinite_T.any()


def test_an_exploding_ratio_gives_finite_loss_and_gradient() -> None:
    arguments = batch() | {"c_clip": None}
    arguments["logp"] = arguments["prox_logp"] + 200.0
    arguments["advantage"] = -torch.ones_like(arguments["advantage"])
    assert policy_loss(**arguments).loss.isfinite()
    assert gradient(arguments).isfinite().all()


# --- invariances ---------------------------------------------------------------------------------


def select(arguments: dict[str, Any], rows: list[int]) -> tuple[dict[str, Any], Tensor]:
    """The micro-batch of these rows in this order, and the positions of its tokens."""
    where = [(arguments["seq_id"] == row).nonzero().flatten() for row in rows]
    index = torch.cat(where)
    whole: Denominators = arguments["denominators"]
    names = ("logp", "prox_logp", "behave_logp", "advantage", "mask")
    part = arguments | {name: arguments[name][index] for name in names}
    part["seq_id"] = torch.cat([torch.full_like(w, i) for i, w in enumerate(where)])
    part["denominators"] = Denominators(
        tokens=whole.tokens,
        rows=whole.rows,
        constant_tokens=whole.constant_tokens,
        row_tokens=whole.row_tokens[rows],
    )
    return part, index


@pytest.mark.invariant("I09")
@settings(max_examples=30, deadline=None)
@given(
    st.permutations(list(range(ROWS))),
    st.sets(st.integers(1, ROWS - 1)),
    st.sampled_from(LEVELS),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["token_mask", "sequence_mask"]),
)
def test_micro_batches_in_any_order_add_up_to_the_minibatch(
    order: list[int],
    cuts: set[int],
    level: RatioLevel,
    aggregation: Aggregation,
    mode: BehaviorMode,
) -> None:
    arguments = batch() | {"level": level, "aggregation": aggregation, "behavior_mode": mode}
    whole, whole_gradient = policy_loss(**arguments).loss, gradient(arguments)
    edges = [0, *sorted(cuts), ROWS]
    parts = [select(arguments, order[a:b]) for a, b in itertools.pairwise(edges)]
    total = sum(policy_loss(**part).loss for part, _ in parts)
    assert torch.allclose(torch.as_tensor(total), whole, rtol=1e-12)
    summed = torch.zeros_like(whole_gradient)
    for part, index in parts:
        summed[index] += gradient(part)
    assert torch.allclose(summed, whole_gradient, rtol=1e-12, atol=1e-15)


# --- every input matters -------------------------------------------------------------------------


def shifted(name: str, token: int, by: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        value = arguments[name].clone()
        value[token] += by
        return {name: value}

    return change


def recounted(**counts: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        old: Denominators = arguments["denominators"]
        values = {n: getattr(old, n) for n in ("tokens", "rows", "constant_tokens", "row_tokens")}
        return {"denominators": Denominators(**values | counts)}

    return change


def constant(**values: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda _: values


# What to change in `batch()`, under which other options, per argument of `policy_loss`; that the
# batch has tokens beyond every bound is asserted below.
INPUTS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("level", {}, constant(level="sequence")),
    ("eps_clip", {}, constant(eps_clip=0.9)),
    ("eps_clip_higher", {}, constant(eps_clip_higher=0.9)),
    ("c_clip", {}, constant(c_clip=None)),
    ("behavior_mode", {}, constant(behavior_mode="sequence_mask")),
    ("behavior_cap", {}, constant(behavior_cap=4.0)),
    ("behavior_floor", {}, constant(behavior_floor=None)),
    ("aggregation", {}, constant(aggregation="constant")),
    ("denominators", {}, recounted(tokens=100.0)),
    ("denominators", {"aggregation": "sequence_mean"}, recounted(rows=9)),
    ("denominators", {"aggregation": "constant"}, recounted(constant_tokens=9.0)),
    (
        "denominators",
        {"aggregation": "sequence_mean"},
        recounted(row_tokens=torch.tensor([9, 9, 9, 9])),
    ),
    (
        "seq_id",
        {"aggregation": "sequence_mean"},
        constant(seq_id=torch.tensor([0] * 6 + [1] * 15 + [2] + [3] * 14)),
    ),
]


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(("name", "setting", "change"), INPUTS)
def test_changing_an_option_changes_the_gradient(
    name: str, setting: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    arguments = batch() | setting
    changed = change(arguments)
    assert set(changed) == {name}
    assert not torch.allclose(gradient(arguments | changed), gradient(arguments), rtol=1e-3)


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("name", ["logp", "prox_logp", "behave_logp", "advantage"])
def test_changing_a_tensor_changes_the_gradient(name: str) -> None:
    arguments = batch(spread=0.01)
    token = 2
    by = 1.0 if name == "prox_logp" else 0.1
    # prox_logp cancels in w·u while nothing is clipped or capped, so it has to move past a bound.
    changed = gradient(arguments | shifted(name, token, by)(arguments))
    assert not math.isclose(changed[token], gradient(arguments)[token], rel_tol=1e-3)


@pytest.mark.invariant("I10")
def test_changing_the_mask_changes_the_gradient() -> None:
    arguments = batch()
    mask = arguments["mask"].clone()
    mask[0] = True
    assert not torch.equal(gradient(arguments | {"mask": mask}), gradient(arguments))


def test_every_argument_of_the_loss_has_a_test_that_it_matters() -> None:
    tested = {name for name, _, _ in INPUTS}
    tested |= {"logp", "prox_logp", "behave_logp", "advantage", "mask"}
    assert tested == set(inspect.signature(policy_loss).parameters)


def test_the_test_batch_reaches_every_bound() -> None:
    terms: LossTerms = policy_loss(**batch())
    arguments = batch()
    weight = (arguments["prox_logp"] - arguments["behave_logp"]).exp()[arguments["mask"]]
    assert terms.clipped_T.any()
    assert terms.dual_clipped_T.any()
    assert (weight > 1.5).any()
    assert (weight < 0.6).any()
    assert terms.kept_T.sum() > 3
