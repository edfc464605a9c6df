"""Continuous batching changes nothing about a request: order, tokens, log-probs, ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from offbeat.data.tokens import TextCodec
from offbeat.errors import GenerationError, PromptTooLong
from offbeat.generate.engine.engine import Engine
from offbeat.generate.engine.spans import BusySpans
from offbeat.types import Completion, GenerateRequest, PolicyVersion, StopReason

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]


def same_bits(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


@pytest.mark.invariant("I03")
def test_later_short_requests_finish_first_and_every_bit_is_that_of_the_run_alone(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    long, engine = ask(20, 200, temperature=0.7), make_engine(slots=8)
    shorts = [ask(n, 3 + n) for n in (3, 8, 17, 30, 50)]
    engine.submit(long)
    for _ in range(7):
        assert engine.step() == []
    together = run(engine, *shorts)

    assert list(together)[-1] == long.request_id
    assert len(together[long.request_id].token_ids) == 200
    for request in (long, *shorts):
        alone = run(make_engine(slots=1), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


@pytest.mark.invariant("I03")
def test_requests_joining_each_step_and_reused_slots_change_no_bit(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=3)
    requests = [ask(5 + 13 * (i % 4), 2 + (7 * i) % 11, top_k=(0, 3)[i % 2]) for i in range(14)]
    ended: dict[str, Completion] = {}
    for request in requests:
        engine.submit(request)
        ended |= {r.request_id: c for r, c in engine.step()}
    ended |= run(engine)
    for request in requests:
        alone = run(make_engine(slots=20), request)
        assert same_bits(alone[request.request_id], ended[request.request_id])


def test_a_slot_on_another_row_of_a_larger_batch_changes_no_bit(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    watched = ask(9, 12)
    alone = run(make_engine(slots=1), watched)[watched.request_id]
    crowd = [ask(4 + i, 12) for i in range(36)]
    for place in (0, 15, 16, 35):
        order = [*crowd[:place], watched, *crowd[place:]]
        assert same_bits(run(make_engine(slots=40), *order)[watched.request_id], alone)


def test_a_token_depends_on_its_place_in_the_answer_not_in_the_context(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module
) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every distribution is uniform
    engine = make_engine(model=model)
    answers = list(run(engine, *(ask(n, 20, seed=3) for n in (1, 5, 40))).values())
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert len(set(answers[0].token_ids)) > 5


def test_after_a_crowd_the_lowest_slots_are_used_so_that_passes_stay_small(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module
) -> None:
    engine = make_engine(slots=40, model=model)
    run(engine, *(ask(4 + i, 2 + i % 7) for i in range(40)))
    rows: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    run(engine, ask(3, 5))
    assert rows == [16] * 5


def test_more_requests_than_slots_start_in_order(make_engine: MakeEngine, ask: Ask) -> None:
    engine = make_engine(slots=2)
    requests = [ask(4 + i, n) for i, n in enumerate((6, 2, 2, 2, 2))]
    for request in requests:
        engine.submit(request)
    assert (engine.running, engine.waiting) == (0, 5)
    ends: list[str] = []
    while engine.running or engine.waiting:
        ends += [r.request_id for r, _ in engine.step()]
        assert engine.running <= 2
    # The long one keeps its slot; the others pass through the second slot one by one.
    assert [e for e in ends if e != "r0"] == ["r1", "r2", "r3", "r4"]


# Siblings


def siblings(ask: Ask, n: int, prompt: int = 30, tokens: int = 10) -> list[GenerateRequest]:
    return [ask(prompt, tokens, sibling=i, seed=1000 + i) for i in range(n)]


def test_siblings_share_one_prefill_differ_and_are_reproducible(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine, group = make_engine(slots=8), siblings(ask, 6)
    together = run(engine, *group)
    assert engine.prefill_tokens == 30
    assert len({tuple(c.token_ids) for c in together.values()}) == 6
    for request in group:
        alone = run(make_engine(), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


def test_distinct_prompts_are_each_computed_once(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=16)
    groups = [siblings(ask, 4, prompt) for prompt in (7, 19, 30)]
    run(engine, *(r for group in groups for r in group))
    assert engine.prefill_tokens == 7 + 19 + 30


def test_siblings_of_a_later_step_share_the_prefill_also_after_the_source_ended(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=4)
    first, second, third = siblings(ask, 3)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    engine.step()
    together = run(engine)
    together |= run(engine, third)
    assert engine.prefill_tokens == 30
    for request in (second, third):
        alone = run(make_engine(), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_siblings_than_slots_share_one_prefill(
    make_engine: MakeEngine, ask: Ask, run: Run, slots: int
) -> None:
    """With one slot the source's own slot is the only free one."""
    engine = make_engine(slots=slots)
    group = [ask(30, 3 + 2 * i, sibling=i) for i in range(7)]
    together = run(engine, *group)
    assert engine.prefill_tokens == 30
    for request in group:
        alone = run(make_engine(), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


def test_a_prompt_is_shared_as_long_as_any_slot_holds_it(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=2)
    first, second = ask(30, 2, sibling=0), ask(30, 40, sibling=1)
    engine.submit(first)
    engine.submit(second)
    run_short = [ask(12, 2), ask(30, 2, sibling=2), ask(13, 2), ask(30, 2, sibling=3)]
    # The prompt's first slot goes to other prompts while its second still runs.
    together = run(engine, *run_short)
    assert engine.prefill_tokens == 30 + 12 + 13
    for request in (first, second, *run_short):
        alone = run(make_engine(), request)
        assert same_bits(alone[request.request_id], together[request.request_id])


def test_a_prompt_in_a_free_slot_stays_whole_while_others_decode(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=4)
    first, later = ask(30, 2, sibling=0), ask(30, 12, sibling=1)
    engine.submit(first)
    engine.submit(ask(12, 40))
    for _ in range(10):
        engine.step()
    assert engine.finished == 1
    together = run(engine, later)
    assert engine.prefill_tokens == 30 + 12
    alone = run(make_engine(), later)[later.request_id]
    assert same_bits(alone, together[later.request_id])


def test_siblings_that_alternate_with_another_prompts_share_too(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=4)
    pairs = [(ask(30, 3 + i, sibling=i), ask(12, 9 - i, sibling=i)) for i in range(6)]
    run(engine, *(r for pair in pairs for r in pair))
    assert engine.prefill_tokens == 30 + 12


def test_a_prompt_whose_slot_was_given_away_is_computed_again(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=1)
    first, second = siblings(ask, 2)
    run(engine, first)
    run(engine, ask(12, 10))
    together = run(engine, second)
    assert engine.prefill_tokens == 30 + 12 + 30
    assert same_bits(run(make_engine(), second)[second.request_id], together[second.request_id])


def test_a_prompt_that_another_one_starts_with_is_no_sibling(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine()
    ids = list(range(10, 30))
    run(engine, ask(ids, 3), ask(ids[:-1], 3))
    assert engine.prefill_tokens == 20 + 19


def test_nothing_of_the_old_weights_reaches_a_request_after_a_commit(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module
) -> None:
    engine = make_engine(model=model)
    before, after = siblings(ask, 2)
    run(engine, before)

    def halve() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    engine.swap_weights(halve, PolicyVersion(1))
    together = run(engine, after)[after.request_id]
    assert engine.prefill_tokens == 60
    assert set(together.versions) == {1}
    assert same_bits(run(make_engine(model=model), after)[after.request_id], together)


# How an answer ends


def find_token(run: Run, engine: Engine, request: GenerateRequest, place: int) -> int:
    """A token that first occurs at ``place`` of the answer to ``request``."""
    tokens = run(engine, request)[request.request_id].token_ids.tolist()
    assert tokens.index(tokens[place]) == place
    return int(tokens[place])


def test_a_stop_token_is_kept_and_left_out_of_the_text(
    make_engine: MakeEngine, ask: Ask, run: Run, codec: TextCodec
) -> None:
    stop = find_token(run, make_engine(), ask(9, 12, seed=3), 4)
    request = ask(9, 12, seed=3, stop_token_ids=(stop, 1, 1, 1, 1, 1))
    answer = run(make_engine(), request)[request.request_id]
    assert answer.stop_reason is StopReason.STOP
    assert len(answer.token_ids) == 5
    assert answer.token_ids[-1] == stop
    assert answer.text == codec.decode(answer.token_ids[:-1])


def test_stop_tokens_of_the_last_request_in_a_slot_are_forgotten(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    request, engine = ask(9, 12, seed=3), make_engine(slots=1)
    whole = run(engine, request)[request.request_id]
    stops = tuple(whole.token_ids.tolist())
    assert len(run(engine, ask(9, 12, seed=3, stop_token_ids=stops))["r1"].token_ids) == 1
    assert same_bits(run(engine, request)[request.request_id], whole)


def test_end_of_sequence_stops_unless_ignored(
    make_engine: MakeEngine, ask: Ask, run: Run, codec: TextCodec
) -> None:
    (eos,) = codec.eos_token_ids
    hot = {"temperature": 50.0, "n": 400}  # nearly uniform: every id comes by
    kept, ended = ask(9, seed=3, **hot), ask(9, seed=3, ignore_eos=False, **hot)
    answers = run(make_engine(), kept, ended)
    whole, cut = answers[kept.request_id], answers[ended.request_id]
    assert whole.stop_reason is StopReason.LENGTH
    assert len(whole.token_ids) == 400
    place = whole.token_ids.tolist().index(eos)
    assert cut.stop_reason is StopReason.STOP
    assert cut.token_ids.tolist() == whole.token_ids[: place + 1].tolist()


def test_an_answer_of_nothing_but_end_of_sequence_is_an_empty_text(
    make_engine: MakeEngine, ask: Ask, run: Run, codec: TextCodec, model: torch.nn.Module
) -> None:
    (eos,) = codec.eos_token_ids
    head = model.get_output_embeddings()
    with torch.no_grad():
        # A bias wins whatever the hidden state is; a weight would not.
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
        head.bias[eos] = 1e4
    engine, request = make_engine(model=model), ask(9, 12, ignore_eos=False)
    answer = run(engine, request)[request.request_id]
    assert answer.token_ids.tolist() == [eos]
    assert answer.stop_reason is StopReason.STOP
    assert answer.text == ""
    assert answer.logprobs.tolist() == [0.0]
    assert (engine.decode_tokens, engine.finished, engine.running) == (0, 1, 0)


def plain_answer(run: Run, engine: Engine, ask: Ask) -> tuple[int, Completion]:
    """A seed, and its answer of 12 tokens: one character each, the seventh for the first time."""
    requests = [ask(9, 12, seed=s) for s in range(50)]
    answers = run(engine, *requests)
    texts = {r.seed: answers[r.request_id] for r in requests}
    return next(
        (s, a) for s, a in texts.items() if len(a.text) == 12 and a.text.index(a.text[6]) == 6
    )


def test_a_stop_string_trims_the_text_and_keeps_the_tokens(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    seed, whole = plain_answer(run, make_engine(), ask)
    stop = whole.text[5:7]
    place = whole.text.index(stop)
    request = ask(9, 12, seed=seed, stop=("never", stop))
    answer = run(make_engine(), request)[request.request_id]
    assert answer.stop_reason is StopReason.STOP
    assert answer.text == whole.text[:place]
    assert answer.token_ids.tolist() == whole.token_ids[: place + 2].tolist()


def test_the_earliest_of_two_stop_strings_that_come_together_trims_the_text(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    seed, whole = plain_answer(run, make_engine(), ask)
    request = ask(9, 12, seed=seed, stop=(whole.text[6], whole.text[2:7]))
    answer = run(make_engine(), request)[request.request_id]
    assert len(answer.token_ids) == 7
    assert answer.text == whole.text[:2]


def test_a_stop_string_or_token_at_the_last_place_is_a_stop(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    seed, whole = plain_answer(run, make_engine(), ask)
    n = 1 + next(i for i in range(3, 12) if whole.text.index(whole.text[i]) == i)
    by_text = ask(9, n, seed=seed, stop=(whole.text[n - 1],))
    by_id = ask(9, n, seed=seed, stop_token_ids=(int(whole.token_ids[n - 1]),))
    by_length = ask(9, n, seed=seed)
    answers = run(make_engine(), by_text, by_id, by_length)
    assert answers[by_text.request_id].stop_reason is StopReason.STOP
    assert answers[by_id.request_id].stop_reason is StopReason.STOP
    assert answers[by_length.request_id].stop_reason is StopReason.LENGTH
    assert answers[by_text.request_id].text == whole.text[: n - 1]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_an_answer_has_exactly_max_new_tokens_unless_it_stops(
    make_engine: MakeEngine, ask: Ask, run: Run, n: int
) -> None:
    request = ask(9, n)
    answer = run(make_engine(), request)[request.request_id]
    assert (len(answer.token_ids), answer.stop_reason) == (n, StopReason.LENGTH)


def test_prompt_and_answer_may_fill_the_context_to_the_last_token(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    request = ask(20, 44)
    answer = run(make_engine(max_len=64), request)[request.request_id]
    assert len(answer.token_ids) == 44
    roomy = run(make_engine(), request)[request.request_id]
    assert same_bits(answer, roomy)


# Aborting, refusing, failing


def test_abort_ends_waiting_and_running_requests_with_what_they_wrote(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine = make_engine(slots=2)
    requests = [ask(4 + i, 20, seed=i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    ended = {r.request_id: c for r, c in engine.abort(["r0", "r3", "unknown"])}

    assert {c.stop_reason for c in ended.values()} == {StopReason.ABORTED}
    assert [len(ended[i].token_ids) for i in ("r0", "r3")] == [5, 0]
    assert ended["r3"].text == ""
    assert (engine.aborted, engine.running, engine.waiting) == (2, 1, 1)
    rest = run(engine)
    assert set(rest) == {"r1", "r2"}
    assert engine.finished == 2
    alone = run(make_engine(), requests[0], requests[2])
    assert ended["r0"].token_ids.tolist() == alone["r0"].token_ids[:5].tolist()
    assert same_bits(alone["r2"], rest["r2"])


@pytest.mark.parametrize(
    ("prompt", "n", "error", "match"),
    [
        (20, 45, PromptTooLong, "20 prompt tokens .* 45 exceed the context of 64"),
        (65, 1, PromptTooLong, "65 prompt tokens"),
        ([], 3, GenerationError, "0 prompt tokens"),
        (5, 0, GenerationError, "max_new_tokens 0"),
        ([3, -1], 3, GenerationError, r"outside 0\.\.49"),
        ([3, 50], 3, GenerationError, r"outside 0\.\.49"),
        ([[3, 4]], 3, GenerationError, r"array \[1, 2\] of int64, not one row"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_waits(
    make_engine: MakeEngine,
    ask: Ask,
    prompt: int | list[int],
    n: int,
    error: type[Exception],
    match: str,
) -> None:
    engine = make_engine(max_len=64)
    with pytest.raises(error, match=f"request odd: .*{match}"):
        engine.submit(ask(prompt, n, name="odd"))
    assert engine.waiting == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stop_token_ids": (3, 2**63)}, r"stop token id 9223372036854775808 is outside 0\.\.49"),
        ({"stop_token_ids": (50,)}, r"stop token id 50 is outside 0\.\.49"),
        ({"stop_token_ids": (-1,)}, r"stop token id -1 is outside 0\.\.49"),
        ({"temperature": 1e-40}, "temperature 1e-40 is neither 0"),
        ({"temperature": -1.0}, r"temperature -1\.0 is neither 0"),
        ({"temperature": 1e39}, r"temperature 1e\+39 is neither 0"),
        ({"temperature": float("nan")}, "temperature nan is neither 0"),
        ({"top_k": 10**30}, "top_k 10{30} is not between 0 and 1000000"),
        ({"top_k": -1}, "top_k -1 is not between"),
        ({"top_p": 0.0}, "top_p 0 is not > 0"),
        ({"min_p": float("nan")}, "min_p nan is not between 0 and 1"),
        ({"stop": ("x", "")}, "stop has an empty string"),
    ],
)
def test_an_option_that_cannot_be_served_fails_its_request_before_it_joins_the_others(
    make_engine: MakeEngine, ask: Ask, run: Run, options: dict[str, object], match: str
) -> None:
    engine, neighbors = make_engine(), [ask(9, 12, seed=1), ask(11, 12, seed=2, temperature=0.5)]
    for request in neighbors:
        engine.submit(request)
    engine.step()
    with pytest.raises(GenerationError, match=f"request odd: .*{match}"):
        engine.submit(ask(7, 4, name="odd", **options))
    assert (engine.running, engine.waiting) == (2, 0)
    together = run(engine)
    for request in neighbors:
        alone = run(make_engine(), request)[request.request_id]
        assert same_bits(alone, together[request.request_id])


def test_any_integer_is_a_seed(make_engine: MakeEngine, ask: Ask, run: Run) -> None:
    seeds = (0, 2**63, 2**64 - 1, -1, 2**64 + 5, 5)
    answers = list(run(make_engine(slots=8), *(ask(9, 12, seed=s) for s in seeds)).values())
    assert same_bits(answers[2], answers[3])
    assert same_bits(answers[4], answers[5])
    assert len({tuple(a.token_ids) for a in answers}) == 4


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_after_a_failed_pass_good_weights_give_the_usual_bits_again(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module, poison: float
) -> None:
    """NaN keys must not outlive the weights that made them, in any slot and in no spare row."""
    good = {k: v.clone() for k, v in model.state_dict().items()}
    engine = make_engine(slots=4, model=model)
    requests = [ask(9, 30, seed=1), ask(11, 30, seed=2, temperature=0.0), ask(4, 40, seed=3)]
    expected = run(make_engine(), *requests)
    for request in requests:
        engine.submit(request)
    engine.step()

    def damage() -> None:
        with torch.no_grad():
            next(model.model.layers[0].parameters()).fill_(poison)

    engine.swap_weights(damage, PolicyVersion(1))
    with pytest.raises(GenerationError, match=r"non-finite log-probs at version 1 for \['r0'"):
        engine.step()
    engine.reset()
    assert (engine.running, engine.waiting) == (0, 0)

    engine.swap_weights(lambda: model.load_state_dict(good), PolicyVersion(2))
    answers = run(engine, *requests)
    assert all(same_bits(answers[k], expected[k]) for k in expected)
    assert set(answers["r0"].versions) == {2}


def test_non_finite_logits_are_an_error_for_greedy_requests_too(
    make_engine: MakeEngine, ask: Ask, model: torch.nn.Module
) -> None:
    engine = make_engine(model=model)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    engine.submit(ask(9, 12, temperature=0.0))
    with pytest.raises(GenerationError, match="non-finite"):
        engine.step()


def poison(model: torch.nn.Module, token: int) -> None:
    """Make ``model`` give NaN once it has read ``token``."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan


def test_a_row_with_non_finite_logprobs_fails_alone_and_its_neighbors_keep_every_bit(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module
) -> None:
    neighbors = [ask(9, 20, seed=1), ask(30, 20, seed=2, temperature=0.5), ask(12, 20, seed=3)]
    expected = run(make_engine(), *neighbors)
    read = [*(r.prompt_ids for r in neighbors), *(c.token_ids for c in expected.values())]
    token = min(set(range(50)) - set(np.concatenate(read).tolist()))
    poison(model, token)
    engine = make_engine(model=model)
    for request in neighbors[:2]:
        engine.submit(request)
    engine.step()
    # Two siblings: the second copies the keys of the first. The long prompt fills a whole slot.
    for sibling in range(2):
        engine.submit(ask([7] * 100 + [token] * 100, 4, name=f"bad{sibling}"))
    engine.step()
    failed = engine.take_failed()
    assert [r.request_id for r, _ in failed] == ["bad0", "bad1"]
    assert all("request bad" in str(e) and "non-finite" in str(e) for _, e in failed)
    assert engine.take_failed() == []
    assert (engine.running, engine.waiting) == (2, 0)
    # Takes a slot that had NaN keys, which lie behind its mask.
    together = run(engine, neighbors[2])
    assert engine.take_failed() == []
    for request in neighbors:
        assert same_bits(expected[request.request_id], together[request.request_id])


def test_a_prompt_that_failed_is_not_shared_with_a_later_sibling(
    make_engine: MakeEngine, ask: Ask, run: Run, model: torch.nn.Module
) -> None:
    token = 3
    poison(model, token)
    engine = make_engine(model=model)
    engine.submit(ask(9, 20))
    prefilled = []
    for name in ("first", "second"):
        engine.submit(ask([7, token, 8], 4, name=name))
        engine.step()
        assert [r.request_id for r, _ in engine.take_failed()] == [name]
        prefilled.append(engine.prefill_tokens)
    assert prefilled == [9 + 3, 9 + 3 + 3]


def test_a_failing_load_leaves_version_and_requests_as_they_were(
    make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    engine, request = make_engine(), ask(9, 12)
    engine.submit(request)
    engine.step()

    def fail() -> None:
        raise GenerationError("no")

    with pytest.raises(GenerationError):
        engine.swap_weights(fail, PolicyVersion(5))
    assert engine.version == 0
    together = run(engine)[request.request_id]
    assert same_bits(run(make_engine(), request)[request.request_id], together)


# Counters


def test_counters_add_up(make_engine: MakeEngine, ask: Ask, run: Run) -> None:
    engine = make_engine(slots=3)
    answers = run(engine, *(ask(6 + i, 2 + i) for i in range(5)))
    written = sum(len(c.token_ids) for c in answers.values())
    # The first token of each answer comes from its prompt's pass.
    assert engine.decode_tokens == written - 5
    assert engine.prefill_tokens == 6 + 7 + 8 + 9 + 10
    assert (engine.finished, engine.aborted, engine.running, engine.waiting) == (5, 0, 0, 0)
    for spans in (engine.decode_spans.take(), engine.prefill_spans.take()):
        assert spans
        assert all(start < end for start, end in spans)
    assert engine.decode_spans.take() == ()


def test_spans_join_across_short_gaps_only() -> None:
    spans = BusySpans()
    for start, end in ((1.0, 2.0), (2.0005, 3.0), (3.5, 4.0)):
        spans.add(start, end)
    assert spans.take() == ((1.0, 3.0), (3.5, 4.0))
