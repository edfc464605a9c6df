"""Recorded log-probs against other ways to compute them: eager transformers, the packed pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from offbeat.generate.engine.engine import Engine
from offbeat.model.load import load_model
from offbeat.types import Completion, GenerateRequest, PolicyVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[..., Engine]
Ask = Callable[..., GenerateRequest]
Run = Callable[..., dict[str, Completion]]
Weights = Mapping[str, torch.Tensor]

TOLERANCE = 1e-4
PROBE = Path(__file__).with_name("bitwise_probe.py")


def open_eager(folder: Path) -> PreTrainedModel:
    """Transformers' own model and attention, nothing of ours."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def eager_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray, temperature: float
) -> np.ndarray:
    """One unpadded pass over prompt and answer, float64 from the logits on."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]))
    logits = model(ids[None]).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logp.gather(1, ids[len(prompt) :, None])[:, 0].numpy()


@torch.no_grad()
def replayed_logprobs(
    model: PreTrainedModel,
    weights: Sequence[Weights],
    prompt: np.ndarray,
    completion: Completion,
    temperature: float,
) -> np.ndarray:
    """Token by token over transformers' cache, each token predicted by the weights of its version.

    Keys of earlier tokens stay what the weights of their time made them.
    """
    from transformers import DynamicCache

    cache, feed, out = DynamicCache(config=model.config), torch.from_numpy(prompt), []
    pairs = zip(completion.token_ids.tolist(), completion.versions.tolist(), strict=True)
    for token, version in pairs:
        model.load_state_dict(weights[version])
        logits = model(feed[None], cache=cache, use_cache=True).logits[0, -1].double()
        out.append(float(torch.log_softmax(logits / temperature, -1)[token]))
        feed = torch.tensor([token])
    return np.array(out)


@pytest.mark.invariant("I07")
def test_recorded_logprobs_are_those_of_the_eager_model(
    folder: Path, make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    requests = [ask(n, 40, temperature=0.7) for n in (1, 2, 5, 16, 33, 120, 190, 191, 250, 400)]
    answers = run(make_engine(slots=6), *requests)
    eager = open_eager(folder)
    for request in requests:
        answer = answers[request.request_id]
        expected = eager_logprobs(eager, request.prompt_ids, answer.token_ids, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
        at_one = eager_logprobs(eager, request.prompt_ids, answer.token_ids, 1.0)
        assert np.abs(answer.logprobs - at_one).max() > 100 * TOLERANCE


@pytest.mark.invariant("I07")
def test_truncated_sampling_records_the_renormalized_distribution(
    folder: Path, make_engine: MakeEngine, ask: Ask, run: Run
) -> None:
    request = ask(9, 60, temperature=0.7, top_k=5)
    answer = run(make_engine(), request)[request.request_id]
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, answer.token_ids]))
    with torch.no_grad():
        logits = open_eager(folder)(ids[None]).logits[0, 8:-1].double() / 0.7
    fifth = logits.topk(5).values[:, -1:]
    logp = torch.log_softmax(logits.masked_fill(logits < fifth, -torch.inf), -1)
    expected = logp.gather(1, ids[9:, None])[:, 0].numpy()
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.invariant("I06")
@pytest.mark.invariant("I07")
def test_a_request_held_over_two_commits_is_stamped_and_scored_segment_by_segment(
    folder: Path, make_engine: MakeEngine, ask: Ask, run: Run, model: PreTrainedModel
) -> None:
    base = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    noise = [
        {k: 0.05 * torch.randn(v.shape, generator=generator) for k, v in base.items()}
        for _ in range(2)
    ]
    weights = [base, *({k: v + n[k] for k, v in base.items()} for n in noise)]
    engine = make_engine(slots=4, model=model)
    requests = [ask(11, 30, temperature=0.7), ask(40, 30, temperature=0.7)]
    for request in requests:
        engine.submit(request)
    for version, steps in ((1, 7), (2, 9)):
        for _ in range(steps):
            engine.step()
        engine.swap_weights(
            lambda v=version: model.load_state_dict(weights[v]), PolicyVersion(version)
        )
    answers = run(engine)

    eager = open_eager(folder)
    for request in requests:
        answer = answers[request.request_id]
        assert answer.versions.tolist() == [0] * 7 + [1] * 9 + [2] * 14
        expected = replayed_logprobs(eager, weights, request.prompt_ids, answer, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
        # The test would see a version that is off by one, and a cache computed anew.
        shifted = Completion(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=np.roll(answer.versions, 1),
            stop_reason=answer.stop_reason,
            text="",
        )
        wrong = replayed_logprobs(eager, weights, request.prompt_ids, shifted, 0.7)
        assert np.abs(answer.logprobs - wrong)[7] > 100 * TOLERANCE
        eager.load_state_dict(weights[2])
        anew = eager_logprobs(eager, request.prompt_ids, answer.token_ids, 0.7)
        assert np.abs(answer.logprobs - anew)[16:].max() > 100 * TOLERANCE


@pytest.mark.invariant("I07")
def test_cached_decode_gives_the_bits_of_the_packed_pass_with_one_and_two_threads() -> None:
    """Across key buckets and ratios of query to key heads, in a process of its own."""
    # Passive: a thread that spins for a descheduled partner takes seconds a step on a busy machine.
    env = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(PROBE)], env=env, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        f"{threads} threads, ratio {ratio}: 0 of 140 differ"
        for threads in (2, 1)
        for ratio in (1, 3, 4, 7)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.invariant("I07")
def test_smollm2_agrees_with_its_eager_self_and_bitwise_with_the_packed_pass(
    smollm2: Path, ask: Ask, run: Run
) -> None:
    from offbeat.generate.engine.selfcheck import packed_logprobs

    model = load_model(str(smollm2), dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(model, slots=8, max_len=512, eos_token_ids=(), decode=str)
    requests = [ask(n, 12, temperature=0.7) for n in (3, 17, 60, 185, 190, 250, 384)]
    answers = run(engine, *requests)
    pairs = [(r, answers[r.request_id]) for r in requests]
    recorded = np.concatenate([a.logprobs for _, a in pairs])
    assert np.array_equal(recorded, packed_logprobs(model, pairs, 0.7))
    del model, engine
    eager = open_eager(smollm2)
    for request, answer in pairs:
        expected = eager_logprobs(eager, request.prompt_ids, answer.token_ids, 0.7)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
