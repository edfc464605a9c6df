"""One child process and everything it starts: when it ran, and the most memory all of it held.

Owns the cores of the child and the sampling of its memory from /proc; knows nothing of what runs.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SAMPLE_SECONDS = 0.25
TAIL_LINES = 30

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ProcessFailed(RuntimeError):
    """The child ended with an exit code other than 0; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A child that went well. Times are CLOCK_MONOTONIC seconds, memory is bytes.

    ``peak_pss_bytes`` is the largest sum over the process tree of proportional set sizes: a page
    that n processes share counts 1/n in each. ``peak_rss_bytes`` counts it fully in each. Both are
    sampled every ``SAMPLE_SECONDS``.
    """

    started: float
    ended: float
    peak_pss_bytes: int
    peak_rss_bytes: int


def first_cores(n: int) -> frozenset[int]:
    """The first ``n`` cores that this process may use. Raises ValueError when there are fewer."""
    usable = sorted(os.sched_getaffinity(0))
    if not 1 <= n <= len(usable):
        raise ValueError(f"{n} cores wanted, {len(usable)} usable")
    return frozenset(usable[:n])


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without thread counts, which each side sets for itself, and ``extra``."""
    kept = {k: v for k, v in os.environ.items() if k not in _THREAD_VARIABLES}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", **(extra or {})}


def run_watched(
    command: Sequence[str],
    *,
    cores: frozenset[int],
    log: Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> Finished:
    """Run ``command`` on ``cores`` to its end; its output goes to ``log``.

    Raises:
        ProcessFailed: it did not end with 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        started = time.monotonic()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )
        with _MemoryWatch(child.pid) as memory:
            try:
                code = child.wait()
            except BaseException:
                child.terminate()
                child.wait()
                raise
        ended = time.monotonic()
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise ProcessFailed(f"exit code {code} of {' '.join(command)}\n{tail}")
    return Finished(
        started=started, ended=ended, peak_pss_bytes=memory.pss, peak_rss_bytes=memory.rss
    )


class _MemoryWatch:
    """Samples the memory of a process tree in a thread until it is left."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")
        self.pss = 0
        self.rss = 0

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            sizes = [size for pid in _tree(self._pid) if (size := _sizes(pid)) is not None]
            self.pss = max(self.pss, sum(pss for pss, _ in sizes))
            self.rss = max(self.rss, sum(rss for _, rss in sizes))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the thread or the process ended while we looked
            continue
        for child in children:
            yield from _tree(int(child))


def _sizes(pid: int) -> tuple[int, int] | None:
    """Proportional and resident set size of one process, bytes; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if line.startswith(("Pss:", "Rss:")))
    if len(found) != 2:
        return None
    return tuple(int(found[name].split()[0]) * 1024 for name in ("Pss", "Rss"))
