"""What one task of AsyncTaskRunner costs, against a bare asyncio.TaskGroup.

Both start 100,000 coroutines that return at once and collect every result; the runner runs 64 at a
time. Each round is a process of its own, so that the peak of its memory is known. Per contender:
tasks per second, and bytes of peak memory above the interpreter's per task, all futures held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from measure import Json, Spread, alternate, arguments, emit, facts, peak_rss_mb, ratios

CONCURRENCY = 64


async def nothing(x: int) -> int:
    """The task."""
    return x


async def with_runner(tasks: int) -> int:
    from offbeat.pipeline.task_runner import AsyncTaskRunner

    async with AsyncTaskRunner(max_concurrency=CONCURRENCY) as runner:
        futures = [runner.submit(nothing, i) for i in range(tasks)]
        return sum(await runner.wait(*futures))


async def with_group(tasks: int) -> int:
    async with asyncio.TaskGroup() as group:
        futures = [group.create_task(nothing(i)) for i in range(tasks)]
    return sum(f.result() for f in futures)


CONTENDERS: dict[str, Callable[[int], Awaitable[int]]] = {
    "runner": with_runner,
    "task_group": with_group,
}


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--tasks", type=int, default=100_000, help="tasks of one round")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        sys.stdout.write(json.dumps(_one(options.contender, options.tasks)))
    else:
        emit({**facts("tasks", options), **_measure(options)}, options.out)


def _one(contender: str, tasks: int) -> Json:
    asyncio.run(_checked(contender, 1))  # imports
    before, started = peak_rss_mb(), time.perf_counter()
    asyncio.run(_checked(contender, tasks))
    seconds = time.perf_counter() - started
    return {"rate": tasks / seconds, "bytes": (peak_rss_mb() - before) * 1e6 / tasks}


async def _checked(contender: str, tasks: int) -> None:
    assert await CONTENDERS[contender](tasks) == tasks * (tasks - 1) // 2


def _measure(options: argparse.Namespace) -> Json:
    found: dict[str, list[Json]] = {name: [] for name in CONTENDERS}

    def run(contender: str) -> float:
        command = [sys.executable, __file__, "--contender", contender]
        done = subprocess.run(
            [*command, "--tasks", str(options.tasks)], capture_output=True, check=True
        )
        found[contender].append(json.loads(done.stdout))
        return float(found[contender][-1]["rate"])

    rates = alternate({name: lambda _, name=name: run(name) for name in CONTENDERS}, options.runs)
    return {
        "tasks": options.tasks,
        "max_concurrency": CONCURRENCY,
        "tasks_per_second": {name: Spread.of(values).as_json() for name, values in rates.items()},
        "bytes_per_task": {
            name: Spread.of([r["bytes"] for r in rounds]).as_json()
            for name, rounds in found.items()
        },
        "runner_over_task_group": ratios(rates["runner"], rates["task_group"]).as_json(),
    }


if __name__ == "__main__":
    main()
