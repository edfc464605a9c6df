"""What a save of the whole training state costs the training: ours, and torch's.

Owns the order of the measurement; ``savers.py`` has the contenders. Each saves weights and
optimizer moments while the model trains:

    torch_save   ``torch.save`` on the training thread, flushed
    sync         our snapshot, and training waits for its end
    async        our snapshot in the background
    torch_async  ``torch.distributed.checkpoint.async_save``: a process, staged by a thread

Seconds: ``blocked``, training stood still; ``ended``, from the beginning to the device; ``slower``,
steps beside the save over steps without one. What was saved is removed again, so that every save
meets a cold page cache; with ``--warm`` it stays until the next one replaces it. The first one of
a process is reported by itself: before it the page cache was dropped, where the system allows that.
At the end every contender saves once more while training goes on, and what lies on the device must
have the digest of the state at the beginning of that save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from measure import Json, Spread, Worker, arguments, emit, facts, note, ratios
from train_step import rollouts

CONTENDERS = ("torch_save", "sync", "async", "torch_async")

FIGURES = ("blocked", "ended", "slower")


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="offbeat-saves-", dir=options.folder) as folder:
        found = _measure(options, Path(folder))
    emit({**facts("checkpoint", options), **found}, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "", runs=5)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--folder", type=Path, help="a folder on the disk to save to")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--idle-steps", type=int, default=3, help="steps before each save")
    parser.add_argument("--warm", action="store_true", help="leave what was saved before")
    shape = parser.add_argument_group("one training step")
    shape.add_argument("--groups", type=int, default=1)
    shape.add_argument("--siblings", type=int, default=8)
    shape.add_argument("--prompt", type=int, default=50)
    shape.add_argument("--answer-min", type=int, default=16)
    shape.add_argument("--answer-max", type=int, default=48)
    return parser


def _measure(options: argparse.Namespace, folder: Path) -> Json:
    saves: dict[str, list[Json]] = {name: [] for name in options.contenders}
    dropped = False
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(name, options)) for name in saves}
        for name, worker in workers.items():
            note(f"loading {name}")
            (folder / name).mkdir()
            loaded = worker.call(
                "load", model=str(options.model.resolve()), folder=str(folder / name)
            )
            started = worker.call("start", rows=rollouts(loaded["vocab"], options))
        for number in range(options.runs + 1):
            names = list(workers) if number % 2 == 0 else list(workers)[::-1]
            for name in names:
                dropped = _drop_cache() if number == 0 else dropped
                saves[name].append(workers[name].call("save", idle_steps=options.idle_steps))
                if not options.warm:
                    _empty(folder / name)
                note(f"round {number}/{options.runs}  {name}: {saves[name][-1]}")
        digests = {name: worker.call("verify") for name, worker in workers.items()}
    for name, digest in digests.items():
        if digest["saved"] != digest["was"]:
            raise SystemExit(f"{name}: the save has digest {digest['saved']}, not {digest['was']}")
    return {
        "state_mb": started["state_mb"],
        "cache_dropped_before_the_first": dropped,
        "first": {name: runs[0] for name, runs in saves.items()},
        "later": {name: _spreads(runs[1:]) for name, runs in saves.items()},
        "blocked_less": _blocked_less(saves),
    }


def _empty(folder: Path) -> None:
    """Give the disk and the page cache back: what one contender left must not cost the next."""
    shutil.rmtree(folder)
    folder.mkdir()
    os.sync()


def _spreads(runs: Sequence[Json]) -> Json:
    return {key: Spread.of([run[key] for run in runs]).as_json() for key in FIGURES}


def _blocked_less(saves: dict[str, list[Json]]) -> Json:
    """How many times longer training stood still than with ``async``; of the first saves too."""
    ours = [run["blocked"] for run in saves.get("async", ())]
    if not ours:
        return {}
    others = {n: [r["blocked"] for r in runs] for n, runs in saves.items() if n != "async"}
    return {
        "first": {name: blocked[0] / ours[0] for name, blocked in others.items()},
        "later": {n: ratios(blocked[1:], ours[1:]).as_json() for n, blocked in others.items()},
    }


def _drop_cache() -> bool:
    """Forget what the kernel has of the disk; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError:
        return False
    return True


def _worker(name: str, options: argparse.Namespace) -> Worker:
    script = Path(__file__).with_name("savers.py")
    argv = [sys.executable, str(script), name, "--threads", str(options.threads)]
    return Worker(name, argv, threads=options.threads)


if __name__ == "__main__":
    main()
