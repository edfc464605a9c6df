"""Seconds per forward and backward pass over the same rollouts: ours, and transformers padded.

Owns the workload and the comparison; ``trainers.py`` has the contenders and the loss. Both must
find the same log-probs and the same norm of the gradient before anything is timed.

``--logprob-memory`` measures something else and prints its own line: the memory that log-probs over
a large vocabulary take above what goes in, forward and backward.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from measure import Json, Spread, Worker, alternate, arguments, emit, facts, note, ratios

OURS, PEER = "offbeat", "transformers"

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference of a log-prob, nats."""

NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest relative difference of the gradient's norm."""


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    options = _parser().parse_args()
    if options.logprob_memory:
        results = [_memory(dtype, options) for dtype in options.dtype]
        emit(facts("logprob_memory", options) | {"results": results}, options.out)
        return
    results = [_measure(dtype, options) for dtype in options.dtype]
    emit(facts("train_step", options) | {"results": results}, options.out)


def rollouts(vocab: int, options: argparse.Namespace) -> Json:
    """Rows as ``trainers.Rows``: random tokens, rewards normalized within each group."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    prompts, answers, advantages = [], [], []
    for _ in range(options.groups):
        prompt = text(options.prompt)
        rewards = [rng.gauss(0, 1) for _ in range(options.siblings)]
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        for reward in rewards:
            prompts.append(prompt)
            answers.append(text(rng.randint(options.answer_min, options.answer_max)))
            advantages.append((reward - mean) / (std + 1e-6))
    return {
        "prompts": prompts,
        "answers": answers,
        "advantages": advantages,
        "siblings": options.siblings,
    }


def _measure(dtype: str, options: argparse.Namespace) -> Json:
    """Load both, compare their log-probs, time them in alternation."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, options)) for name in (OURS, PEER)}
        loaded = {}
        for name, worker in workers.items():
            note(f"loading {name}, {dtype}")
            loaded[name] = worker.call(
                "load",
                model=str(options.model.resolve()),
                dtype=dtype,
                rows_per_pass=options.transformers_rows if name == PEER else 0,
            )
        rows = rollouts(loaded[OURS]["vocab"], options)
        agreement = _agreement(dtype, {n: w.call("check", rows=rows) for n, w in workers.items()})
        peaks: dict[str, float] = {}

        def timed(name: str) -> Callable[[int], float]:
            def run(_: int) -> float:
                answer = workers[name].call("run", rows=rows)
                peaks[name] = answer["peak_rss_mb"]
                return float(answer["seconds"])

            return run

        for name in workers:
            timed(name)(-1)
        seconds = alternate({name: timed(name) for name in workers}, options.runs)
    return _result(dtype, rows, seconds, agreement) | {
        "peak_rss_mb": {n: round(v) for n, v in peaks.items()},
    }


def _agreement(dtype: str, found: dict[str, Json]) -> Json:
    """Ends the program when the two do not compute the same thing."""
    ours, theirs = found[OURS], found[PEER]
    error = max(abs(a - b) for a, b in zip(ours["logp"], theirs["logp"], strict=True))
    norm = abs(ours["grad_norm"] / theirs["grad_norm"] - 1)
    if error > TOLERANCE[dtype] or norm > NORM_TOLERANCE[dtype]:
        raise SystemExit(
            f"{dtype}: log-probs differ by {error:.2e} nats, norms of the gradient by {norm:.2e}: "
            "the two do not compute the same thing, so their times cannot be compared"
        )
    return {"logp_max_error": float(f"{error:.3g}"), "grad_norm_error": float(f"{norm:.3g}")}


def _result(dtype: str, rows: Json, seconds: dict[str, list[float]], agreement: Json) -> Json:
    answer_tokens = sum(map(len, rows["answers"]))
    tokens = answer_tokens + sum(map(len, rows["prompts"]))
    return {
        "dtype": dtype,
        "rows": len(rows["answers"]),
        "tokens": tokens,
        "answer_tokens": answer_tokens,
        "agreement": agreement,
        "contenders": {
            name: {
                "seconds": Spread.of(values).as_json(),
                "tokens_per_s": Spread.of([tokens / v for v in values]).as_json(),
                "answer_tokens_per_s": Spread.of([answer_tokens / v for v in values]).as_json(),
            }
            for name, values in seconds.items()
        },
        "speedup": ratios(seconds[PEER], seconds[OURS]).as_json(),
    }


def _memory(dtype: str, options: argparse.Namespace) -> Json:
    """Each run in a new process: memory once taken is not given back."""
    runs = []
    for number in range(options.runs):
        with _worker("memory", options) as worker:
            runs.append(
                worker.call(
                    "measure",
                    tokens=options.logprob_tokens,
                    vocab=options.logprob_vocab,
                    hidden=options.logprob_hidden,
                    dtype=dtype,
                )
            )
        note(f"run {number + 1}/{options.runs}  {runs[-1]}")
    spreads = {key: Spread.of([r[key] for r in runs]).as_json() for key in runs[0]}
    full = options.logprob_tokens * options.logprob_vocab * 4 / 1e6
    return {"dtype": dtype, "all_logits_mb": round(full), **spreads}


def _worker(name: str, options: argparse.Namespace) -> Worker:
    script = Path(__file__).with_name("trainers.py")
    argv = [sys.executable, str(script), name, "--threads", str(options.threads)]
    return Worker(name, argv, threads=options.threads, env={"HF_HUB_OFFLINE": "1"})


def _parser() -> argparse.ArgumentParser:
    parser = arguments("Seconds per forward and backward pass of the same rollouts.")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="HF folder")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="of products; master weights are float32",
    )
    parser.add_argument("--groups", type=int, default=8, help="prompts")
    parser.add_argument("--siblings", type=int, default=8, help="answers of each")
    parser.add_argument("--prompt", type=int, default=50, help="tokens of a prompt")
    parser.add_argument("--answer-min", type=int, default=5, help="tokens of the shortest answer")
    parser.add_argument("--answer-max", type=int, default=21, help="tokens of the longest answer")
    parser.add_argument(
        "--transformers-rows", type=int, default=0, help="rows of one of its passes; 0 is all"
    )
    parser.add_argument(
        "--logprob-memory", action="store_true", help="measure memory of log-probs instead"
    )
    parser.add_argument("--logprob-tokens", type=int, default=8192, help="rows of hidden states")
    parser.add_argument("--logprob-vocab", type=int, default=49152, help="size of the vocabulary")
    parser.add_argument("--logprob-hidden", type=int, default=576, help="size of a hidden state")
    return parser


if __name__ == "__main__":
    main()
