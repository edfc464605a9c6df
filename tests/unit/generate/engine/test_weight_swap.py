"""A weight swap under running requests: what they keep, what is computed anew, what they write.

With ``recompute_kv`` every token is what a fresh engine with the weights of its version draws when
it is fed the prompt and all tokens before this one: so nothing of older weights is left in any
cache. With the same weights under a new version, nothing changes in either mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from offbeat.generate.engine import runs
from offbeat.generate.engine.engine import Engine
from offbeat.model.linear import linear_shapes, pack_for_inference, packing_works
from offbeat.types import Completion, GenerateRequest, PolicyVersion, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]
Weights = Mapping[str, torch.Tensor]

CHUNK = "offbeat.generate.engine.engine.PREFILL_CHUNK"
TOKENS = "offbeat.generate.engine.engine.PREFILL_TOKENS"
BOTH = pytest.mark.parametrize("recompute_kv", [False, True], ids=["keep", "recompute"])
MASK = 2**64 - 1


def seed_at(seed: int, place: int) -> int:
    """The seed whose token 0 is drawn with the uniform of token ``place`` of ``seed``.

    That uniform is a hash of splitmix64(seed) xor place, and splitmix64 can be inverted.
    """

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    z = mix(seed) ^ place
    z ^= (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    z ^= (z >> 30) ^ (z >> 60)
    return (z - 0x9E3779B97F4A7C15) & MASK


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


def single(ask: Ask, request: GenerateRequest, answer: Completion, i: int) -> GenerateRequest:
    """A new request whose first token is token ``i`` of ``answer``, which comes before it."""
    context = np.concatenate([request.prompt_ids, answer.token_ids[:i]])
    temperature = request.params.temperature
    return ask(context, 1, seed=seed_at(request.seed, i), temperature=temperature)


@dataclass(slots=True, kw_only=True)
class Swapped:
    """An engine whose keys are computed anew, over a model that takes the weights of a version."""

    engine: Engine
    model: PreTrainedModel
    weights: Sequence[Weights]
    make_engine: MakeEngine
    run: Run
    patch: pytest.MonkeyPatch

    def swap(self) -> None:
        version = PolicyVersion(self.engine.version + 1)
        self.engine.swap_weights(lambda: self._load(version), version)

    def steps(self, n: int) -> dict[str, Completion]:
        ended: dict[str, Completion] = {}
        for _ in range(n):
            ended |= {r.request_id: c for r, c in self.engine.step()}
        return ended

    def check(
        self, ask: Ask, requests: Sequence[GenerateRequest], answers: Mapping[str, Completion]
    ) -> None:
        """Every token of ``answers`` is the one a fresh engine draws in its place."""
        pairs = [(r, answers[r.request_id]) for r in requests]
        for version in sorted({v for _, a in pairs for v in a.versions.tolist()}):
            self._load(version)
            places = [(r, a, i) for r, a in pairs for i in np.flatnonzero(a.versions == version)]
            singles = [single(ask, r, a, int(i)) for r, a, i in places]
            with self.patch.context() as patch:
                patch.setattr(TOKENS, 2048)
                fresh = self.run(self.make_engine(slots=64, model=self.model), *singles)
            for one, (request, answer, i) in zip(singles, places, strict=True):
                expected = fresh[one.request_id]
                place = f"token {i} of {request.request_id}, version {version}"
                assert answer.token_ids[i] == expected.token_ids[0], place
                assert answer.logprobs[i] == expected.logprobs[0], place

    def _load(self, version: int) -> None:
        self.model.load_state_dict(self.weights[version])


@pytest.fixture
def swapped(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Swapped:
    """Four slots, and small chunks, so that prompts and answers are computed over many steps."""
    base = {k: v.clone() for k, v in model.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    weights = [base]
    for _ in range(4):
        weights.append(
            {k: v + 0.05 * torch.randn(v.shape, generator=noise) for k, v in base.items()}
        )
    monkeypatch.setattr(TOKENS, 40)
    monkeypatch.setattr(CHUNK, 24)
    return Swapped(
        engine=make_engine(slots=4, model=model, recompute_kv=True),
        model=model,
        weights=weights,
        make_engine=make_engine,
        run=run,
        patch=monkeypatch,
    )


def in_all_stages(swapped: Swapped, ask: Ask) -> list[GenerateRequest]:
    """Two siblings and another request that decode, one whose prompt is computed in part, one that
    waits for a slot with the siblings' prompt, one that waits with a prompt of its own.
    """
    siblings = [ask(70, 14 + 3 * i, sibling=i, temperature=0.7) for i in range(3)]
    other, prefilling, waiting = ask(30, 20), ask(150, 5), ask(45, 6, temperature=0.7)
    for request in (*siblings[:2], other):
        swapped.engine.submit(request)
    swapped.steps(9)
    for request in (prefilling, siblings[2], waiting):
        swapped.engine.submit(request)
    swapped.steps(2)
    engine = swapped.engine
    assert (engine.running, engine.waiting) == (4, 2)
    assert engine.prefill_tokens == 70 + 30 + 48  # 48 of the 150 of the one that prefills
    return [*siblings, other, prefilling, waiting]


def test_a_seed_can_be_found_that_draws_first_what_another_draws_later(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    request = ask(9, 12, temperature=0.7)
    answer = run(make_engine(), request)[request.request_id]
    for i in range(12):
        one = single(ask, request, answer, i)
        assert run(make_engine(), one)[one.request_id].token_ids[0] == answer.token_ids[i]


# Keys computed anew


@pytest.mark.invariant("I06")
@pytest.mark.invariant("I07")
def test_after_a_swap_every_token_is_that_of_a_fresh_engine_fed_prompt_and_prefix(
    swapped: Swapped, ask: Ask
) -> None:
    requests = in_all_stages(swapped, ask)
    swapped.swap()
    answers = swapped.run(swapped.engine)
    spans = {r.request_id: set(answers[r.request_id].versions.tolist()) for r in requests}
    assert list(spans.values()) == [{0, 1}, {0, 1}, {1}, {0, 1}, {1}, {1}]
    assert [len(answers[r.request_id].token_ids) for r in requests] == [14, 17, 20, 20, 5, 6]
    swapped.check(ask, requests, answers)


@pytest.mark.invariant("I06")
@pytest.mark.invariant("I07")
@pytest.mark.parametrize("between", [0, 1, 2, 3, 4, 6])
def test_swaps_that_come_while_keys_are_computed_anew_leave_nothing_of_the_ones_before(
    swapped: Swapped, ask: Ask, between: int
) -> None:
    requests = in_all_stages(swapped, ask)
    answers: dict[str, Completion] = {}
    for _ in range(3):
        swapped.swap()
        answers |= swapped.steps(between)
    answers |= swapped.run(swapped.engine)
    swapped.check(ask, requests, answers)
    for request in requests:
        answer = answers[request.request_id]
        assert len(answer.token_ids) == request.params.max_new_tokens
        assert (np.diff(answer.versions) >= 0).all()
        assert answer.versions[-1] == 3


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1), (3,), (0, 4), (0, 1, 2, 3)])
def test_aborting_while_keys_are_computed_anew_leaves_the_others_whole(
    swapped: Swapped, ask: Ask, gone: tuple[int, ...], steps: int
) -> None:
    requests = in_all_stages(swapped, ask)
    swapped.swap()
    answers = swapped.steps(steps)
    names = [requests[i].request_id for i in gone]
    ended = {r.request_id: c for r, c in swapped.engine.abort(names)}
    assert set(ended) == set(names) - set(answers)
    assert {c.stop_reason for c in ended.values()} == {StopReason.ABORTED}
    assert len(ended[names[0]].token_ids) >= 9
    # Their slots and what is held of their prompts go on to others.
    answers |= swapped.run(swapped.engine, *(requests[i] for i in gone))
    swapped.check(ask, requests, answers)
    for name, cut in ended.items():
        fresh = [r for r in requests if r.request_id == name]
        swapped.check(ask, fresh, {name: cut})


@pytest.mark.invariant("I07")
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_steps_swaps_and_aborts_writes_what_fresh_engines_write(
    swapped: Swapped, ask: Ask, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Slots are renumbered whenever it saves a little."""
    monkeypatch.setattr(runs, "RUN_COST", 8)
    monkeypatch.setattr(runs, "WASTE", 1.0)
    rng = np.random.default_rng(seed)
    requests: list[GenerateRequest] = []
    answers: dict[str, Completion] = {}
    for _ in range(60):
        action = rng.choice(["submit", "step", "step", "step", "swap", "abort"])
        if action == "submit":
            size, n = int(rng.choice([3, 20, 20, 90])), int(rng.integers(1, 12))
            requests.append(ask(size, n, seed=int(rng.integers(3)), temperature=0.7))
            swapped.engine.submit(requests[-1])
        elif action == "swap" and swapped.engine.version < 4:
            swapped.swap()
        elif action == "abort" and requests and rng.random() < 0.5:
            name = requests[int(rng.integers(len(requests)))].request_id
            answers |= {r.request_id: c for r, c in swapped.engine.abort([name])}
        else:
            answers |= swapped.steps(1)
    answers |= swapped.run(swapped.engine)
    assert set(answers) == {r.request_id for r in requests}
    assert max(int(a.versions.max(initial=0)) for a in answers.values()) == 4
    swapped.check(ask, requests, answers)


def test_a_prompt_is_computed_anew_once_for_all_siblings_and_what_they_wrote_for_each(
    swapped: Swapped, ask: Ask
) -> None:
    engine = swapped.engine
    siblings = [ask(30, 12, sibling=i) for i in range(4)]
    for request in siblings[:3]:
        engine.submit(request)
    swapped.steps(5)
    assert engine.prefill_tokens == 30
    swapped.swap()
    engine.submit(siblings[3])
    answers = swapped.run(engine)
    assert engine.prefill_tokens == 30 + 30 + 3 * 5
    # A first token, and the one after a swap, come from the pass over what precedes them.
    assert engine.decode_tokens == 4 * 12 - 4 - 3
    swapped.check(ask, siblings, answers)


def test_requests_that_wrote_the_same_are_computed_anew_together_also_when_one_is_aborted(
    swapped: Swapped, ask: Ask
) -> None:
    engine = swapped.engine
    twins = [ask(30, 60, seed=3) for _ in range(3)]
    for request in twins:
        engine.submit(request)
    swapped.steps(50)
    assert engine.prefill_tokens == 30
    swapped.swap()
    swapped.steps(2)  # the prompt, then a part of what they wrote
    assert engine.prefill_tokens == 30 + 30 + 40
    engine.abort([twins[0].request_id])
    answers = swapped.run(engine)
    assert engine.prefill_tokens == 30 + 30 + 50
    assert same_bits(*answers.values())
    swapped.check(ask, twins[1:], answers)


@pytest.mark.parametrize("first", ["running", "prompt"])
def test_a_prompt_that_is_what_another_request_wrote_so_far_gets_the_right_keys(
    swapped: Swapped, ask: Ask, first: str
) -> None:
    engine, long = swapped.engine, ask(50, 20, seed=1)
    written = swapped.run(swapped.make_engine(model=swapped.model), long)[long.request_id]
    same = ask(np.concatenate([long.prompt_ids, written.token_ids[:6]]), 8, seed=2)
    engine.submit(long)
    swapped.steps(7)  # two for the prompt
    if first == "prompt":
        engine.submit(same)
        swapped.swap()
        engine.submit(ask(50, 3, seed=5))
    else:
        swapped.swap()
        swapped.steps(1)
        engine.submit(same)
    answers = swapped.run(engine)
    assert answers[long.request_id].versions.tolist() == [0] * 6 + [1] * 14
    swapped.check(ask, [long, same], answers)


def test_a_swap_runs_no_pass_and_what_follows_is_bounded_beside_decoding(
    swapped: Swapped, ask: Ask
) -> None:
    engine = swapped.engine
    for i in range(4):
        engine.submit(ask(20 + 40 * i, 30, seed=i))
    swapped.steps(14)
    rows: list[int] = []
    swapped.model.base_model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    swapped.swap()
    assert rows == []
    before = engine.decode_tokens
    while engine.running == 4:
        engine.step()
    # While nothing decodes a pass takes 40 tokens of prompts, else 24 beside one block of slots.
    assert max(rows) <= 48
    assert engine.decode_tokens > before


@pytest.mark.invariant("I06")
def test_packed_weights_of_before_are_not_met_again(
    model: PreTrainedModel, make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    if not packing_works(torch.float32, linear_shapes(model)):
        pytest.skip("this build of torch has no usable oneDNN product")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.8)
    new = {k: v.detach().clone() for k, v in other.named_parameters()}
    live, _ = pack_for_inference(model), pack_for_inference(other)
    engine, request = make_engine(model=model, recompute_kv=True), ask(20, 16, temperature=0.7)
    engine.submit(request)
    for _ in range(8):
        engine.step()
    engine.swap_weights(live.stage(new), PolicyVersion(1))
    answer = run(engine)[request.request_id]
    singles = [single(ask, request, answer, i) for i in range(8, 16)]
    fresh = run(make_engine(slots=8, model=other), *singles)
    for i, one in enumerate(singles, start=8):
        assert answer.token_ids[i] == fresh[one.request_id].token_ids[0]
        assert answer.logprobs[i] == fresh[one.request_id].logprobs[0]


# The same weights under a new version


def interrupted(
    engine: Engine, requests: Sequence[GenerateRequest], swaps: Iterator[bool]
) -> dict[str, Completion]:
    """Run ``requests``; before each step, swap to the same weights if ``swaps`` says so."""
    for request in requests:
        engine.submit(request)
    ended: dict[str, Completion] = {}
    while engine.running or engine.waiting:
        if next(swaps):
            engine.swap_weights(lambda: None, PolicyVersion(engine.version + 1))
        ended |= {r.request_id: c for r, c in engine.step()}
    return ended


def every(n: int) -> Iterator[bool]:
    step = 0
    while True:
        step += 1
        yield step % n == 0


def same_end(a: Completion, b: Completion) -> bool:
    return same_bits(a, b) and (a.stop_reason, a.text) == (b.stop_reason, b.text)


@BOTH
@pytest.mark.invariant("I03")
@pytest.mark.parametrize("n", [2, 3, 7])
def test_swaps_of_the_same_weights_change_no_bit_of_an_answer(
    make_engine: MakeEngine, ask: Ask, run: Run, n: int, recompute_kv: bool
) -> None:
    options = ({"temperature": 0.7}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.9})
    requests = [
        ask(size, 5 + 7 * i, sibling=i, **options[i % 4])
        for i, size in enumerate((30, 30, 9, 70, 190, 30, 200))
    ]
    alone = {r.request_id: run(make_engine(), r)[r.request_id] for r in requests}
    engine = make_engine(slots=4, recompute_kv=recompute_kv)
    answers = interrupted(engine, requests, every(n))
    assert all(same_end(answers[k], alone[k]) for k in alone)
    assert max(int(a.versions[-1]) for a in answers.values()) > 5
    for answer in answers.values():
        sizes = [len(list(tokens)) for _, tokens in groupby(answer.versions.tolist())]
        assert max(sizes) <= n


@BOTH
def test_lengths_stop_tokens_and_stop_strings_across_a_swap_end_an_answer_as_without(
    make_engine: MakeEngine, ask: Ask, run: Run, recompute_kv: bool
) -> None:
    plain = [ask(9, 12, seed=s) for s in range(50)]
    texts = run(make_engine(), *plain)
    seed = next(
        r.seed
        for r in plain
        if len(t := texts[r.request_id].text) == 12 and t.find(t[4:7]) == 4 and t[:6].find(t[6]) < 0
    )
    whole = texts[plain[seed].request_id]
    by_text = ask(9, 12, seed=seed, stop=(whole.text[4:7],))
    by_id = ask(9, 12, seed=seed, stop_token_ids=(int(whole.token_ids[6]),))
    by_length = ask(9, 7, seed=seed)
    requests = (by_text, by_id, by_length)
    expected = run(make_engine(), *requests)
    assert [len(a.token_ids) for a in expected.values()] == [7, 7, 7]
    for place in range(1, 7):
        engine = make_engine(recompute_kv=recompute_kv)
        swaps = iter([False] * place + [True] + [False] * 40)
        answers = interrupted(engine, requests, swaps)
        assert all(same_end(answers[k], expected[k]) for k in expected)
        ends = [answers[r.request_id].stop_reason for r in requests]
        assert ends == [StopReason.STOP, StopReason.STOP, StopReason.LENGTH]
        for answer in answers.values():
            assert answer.versions.tolist() == [0] * place + [1] * (7 - place)


@pytest.mark.invariant("I06")
def test_with_kept_keys_only_prompts_that_are_not_complete_are_computed_anew(
    make_engine: MakeEngine, ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK, 24)
    engine = make_engine()
    engine.submit(ask(30, 20))
    engine.step()
    engine.submit(ask(100, 5))
    engine.step()
    assert engine.prefill_tokens == 30 + 24
    engine.swap_weights(lambda: None, PolicyVersion(1))
    engine.step()
    assert engine.decode_tokens == 2
    run(engine)
    assert engine.prefill_tokens == 30 + 24 + 100
