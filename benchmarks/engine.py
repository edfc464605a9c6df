"""Tokens per second of generation: ours, transformers' two ways, and vLLM's CPU build.

Owns the workload and the arithmetic of the result; ``generators.py`` has the contenders. Each lives
in a process of its own per data type. All get the same prompts in the same round, siblings of a
group equal as in training, and new ones in every round, so that no cache of prompts helps across
rounds. Every answer has the same length. Timed is the whole generation, prompts included.

The limit: a decoded token costs 2 operations per parameter, so no engine that multiplies as fast as
one large square product does writes more than GFLOP/s ÷ (2 × parameters) tokens per second.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from generators import Prompts
from measure import (
    Json,
    Spread,
    Worker,
    WorkerFailed,
    alternate,
    arguments,
    emit,
    facts,
    note,
    ratios,
)

SIBLINGS = 8
PROMPT_LENGTHS = (31, 39)
"""Shortest and longest prompt; 35 on average."""

OURS = "offbeat"
LIMIT = "gemm"


@dataclass(slots=True, kw_only=True)
class Contenders:
    """The workers of one data type; those that failed are named with their own words."""

    limit: Worker
    working: dict[str, Worker] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)

    def drop(self, name: str, error: WorkerFailed) -> None:
        """Take ``name`` out of the comparison."""
        note(f"{name} cannot run: {error}")
        self.working.pop(name, None)
        self.failed[name] = str(error)


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    options = _parser().parse_args()
    results: list[Json] = []
    found: Json = {}
    for dtype in options.dtype:
        with _contenders(dtype, options) as contenders:
            size = contenders.limit.call("size")
            rows = [_measure(contenders, n, size, options) for n in options.concurrency]
            results += [{"dtype": dtype, **row} for row in rows]
            found |= contenders.versions
    peers = {"contender_versions": found, "results": results}
    emit(facts("engine", options) | peers, options.out)


def prompts(concurrency: int, number: int, vocab: int) -> Prompts:
    """Of round ``number``: groups of up to ``SIBLINGS`` equal prompts of random tokens."""
    rng = random.Random(f"{concurrency}/{number}")
    groups = [
        [rng.randrange(vocab) for _ in range(rng.randint(*PROMPT_LENGTHS))]
        for _ in range(-(-concurrency // SIBLINGS))
    ]
    return [groups[i // SIBLINGS] for i in range(concurrency)]


@contextmanager
def _contenders(dtype: str, options: argparse.Namespace) -> Iterator[Contenders]:
    """Start and load everything that works."""
    with ExitStack() as stack:
        contenders = Contenders(limit=stack.enter_context(_worker(LIMIT, dtype, options)))
        for name, settings in _wanted(options).items():
            note(f"loading {name}, {dtype}")
            worker = stack.enter_context(_worker(name, dtype, options))
            try:
                loaded = worker.call(
                    "load",
                    concurrency=max(options.concurrency),
                    max_len=PROMPT_LENGTHS[1] + options.new_tokens,
                    settings=settings,
                )
            except WorkerFailed as exc:
                contenders.drop(name, exc)
            else:
                contenders.working[name] = worker
                contenders.versions[name] = loaded["versions"]
        yield contenders


def _wanted(options: argparse.Namespace) -> dict[str, Json]:
    """Names and settings of the contenders asked for."""
    wanted: dict[str, Json] = {
        OURS: {},
        "transformers": {"cache": options.transformers_cache},
        "transformers_continuous": {},
        "vllm": {"compiled": options.vllm_compiled},
    }
    if options.vllm_python is None:
        del wanted["vllm"]
    return {name: wanted[name] for name in wanted if name not in options.without}


def _worker(name: str, dtype: str, options: argparse.Namespace) -> Worker:
    vllm = name == "vllm"
    python = str(options.vllm_python) if vllm else sys.executable
    script = Path(__file__).with_name("generators.py")
    argv = [python, str(script), name, "--model", str(options.model.resolve()), "--dtype", dtype]
    argv += ["--threads", str(options.threads)]
    env = {"HF_HUB_OFFLINE": "1", **(_vllm_settings(options) if vllm else {})}
    return Worker(name, argv, threads=options.threads, env=env)


def _vllm_settings(options: argparse.Namespace) -> dict[str, str]:
    """One thread bound to each core, as its manual advises, and room for all keys."""
    bound = sorted(os.sched_getaffinity(0))[: options.threads]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, bound)),
        "VLLM_CPU_KVCACHE_SPACE": str(options.vllm_cache_gb),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _measure(
    contenders: Contenders, concurrency: int, size: Json, options: argparse.Namespace
) -> Json:
    """Warm up and time one number of concurrent requests."""
    steps: list[float] = []

    def run(name: str, number: int) -> float:
        answer = contenders.working[name].call(
            "run",
            prompts=prompts(concurrency, number, size["vocab"]),
            new_tokens=options.new_tokens,
        )
        if number >= 0 and "decode_step_s" in answer:
            steps.append(answer["decode_step_s"])
        return float(answer["tokens"] / answer["seconds"])

    for name in list(contenders.working):
        note(f"warming up {name}, {concurrency} concurrent")
        try:
            run(name, -1)
        except WorkerFailed as exc:
            contenders.drop(name, exc)
    runs: dict[str, Callable[[int], float]] = {n: partial(run, n) for n in contenders.working}
    runs[LIMIT] = lambda _: float(contenders.limit.call("gemm")["gflops"])
    figures = alternate(runs, options.runs)
    row = _row(concurrency, figures, 2 * size["parameters"])
    if steps:
        row["contenders"][OURS]["decode_step_s"] = Spread.of(steps).as_json()
    row["failed"] = dict(contenders.failed)
    return row


def _row(concurrency: int, figures: Mapping[str, list[float]], flop_per_token: int) -> Json:
    """Rates, fractions of the limit, and ours over each other contender, round by round."""
    limits = [gflops * 1e9 / flop_per_token for gflops in figures[LIMIT]]
    rates = {name: values for name, values in figures.items() if name != LIMIT}
    return {
        "concurrency": concurrency,
        "gemm_gflops": Spread.of(figures[LIMIT]).as_json(),
        "flop_per_token": flop_per_token,
        "limit_tokens_per_s": Spread.of(limits).as_json(),
        "contenders": {
            name: {
                "tokens_per_s": Spread.of(values).as_json(),
                "fraction_of_limit": ratios(values, limits).as_json(),
            }
            for name, values in rates.items()
        },
        "ratio": {
            f"{OURS}/{name}": ratios(rates[OURS], values).as_json()
            for name, values in rates.items()
            if OURS in rates and name != OURS
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = arguments("Tokens per second of generation, ours and others.")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="HF folder")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="of weights and products",
    )
    parser.add_argument(
        "--concurrency", nargs="+", type=int, default=[1, 8, 64], help="requests at a time"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="length of every answer")
    parser.add_argument(
        "--vllm-python", type=Path, help="interpreter of an environment with vllm-cpu"
    )
    parser.add_argument("--vllm-compiled", action="store_true", help="compile instead of eager")
    parser.add_argument("--vllm-cache-gb", type=int, default=2, help="its room for keys, GiB")
    parser.add_argument(
        "--transformers-cache", choices=["dynamic", "static"], default="dynamic", help="its cache"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=[OURS, "transformers", "transformers_continuous", "vllm"],
        help="contenders to leave out",
    )
    return parser


if __name__ == "__main__":
    main()
