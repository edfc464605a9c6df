"""What every benchmark here shares: alternation, statistics, facts of the machine, the one line.

Owns ``Worker`` (a contender in a process of its own that answers one command at a time), the order
of the timed runs and the shape of the result line. Knows no contender and imports the standard
library only, so that it also loads in the environments of peers.

A benchmark is two halves of one file. The parent starts a ``Worker`` per contender, hands them to
``alternate`` and prints with ``emit``; the child calls ``serve`` with its commands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

Json = dict[str, Any]
"""An object of a result line or of a worker's answer."""

_LOG_BYTES = 64_000
_ERROR = re.compile(r"\b\w*(Error|Exception): ")

VERSIONS = ("offbeat", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and extremes of the runs; ``values`` in the order they were taken."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without a value."""
        if not values:
            raise ValueError("a spread needs at least one run")
        return cls(
            median=statistics.median(values),
            min=min(values),
            max=max(values),
            values=tuple(values),
        )

    def as_json(self) -> Json:
        """Four significant digits: more would be noise."""
        return {k: _rounded(v) for k, v in asdict(self).items()}


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Round by round, because what slows a round (heat, neighbors) slows both sides of it."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def alternate(
    contenders: Mapping[str, Callable[[int], float]], runs: int
) -> dict[str, list[float]]:
    """Time ``contenders`` in turn, ``runs`` times; every second round goes backwards.

    Args:
        contenders: by name, a function of the round that makes one run and returns its figure
            (seconds, or tokens per second).

    Returns: the figures of each contender, by round.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(runs):
        names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in names:
            figures[name].append(contenders[name](number))
            note(f"round {number + 1}/{runs}  {name}: {figures[name][-1]:.4g}")
    return figures


def note(message: str) -> None:
    """Progress for a person, on stderr; stdout carries the result line only."""
    print(message, file=sys.stderr, flush=True)


# The command line and the result line


def arguments(description: str, *, runs: int = 5) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has: ``--runs``, ``--threads``, ``--out``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--runs", type=_positive, default=runs, help="timed rounds, alternating")
    parser.add_argument(
        "--threads", type=_positive, default=cores(), help="threads of every contender"
    )
    parser.add_argument("--out", type=Path, help="append the JSON line to this file, too")
    return parser


def emit(record: Json, out: Path | None) -> None:
    """Print ``record`` as one JSON line, and append it to ``out``."""
    line = json.dumps(record, allow_nan=False)
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def facts(benchmark: str, options: argparse.Namespace) -> Json:
    """The head of a result line: what ran, on what, with which options."""
    kept = {k: v for k, v in vars(options).items() if k != "out"}
    return {
        "benchmark": benchmark,
        "options": {k: _plain(v) for k, v in kept.items()},
        "threads": options.threads,
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> Json:
    """Processor, cores this process may use, memory, load before the benchmark; no host name."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def versions(names: Sequence[str] = VERSIONS) -> dict[str, str]:
    """Of the distributions that are installed here; others are left out."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def rss_mb() -> float:
    """Resident memory of this process, MB (10^6)."""
    return _status_mb("VmRSS")


def peak_rss_mb() -> float:
    """Highest resident memory of this process so far, or since ``reset_peak_rss``; MB (10^6)."""
    return _status_mb("VmHWM")


def reset_peak_rss() -> None:
    """Let the peak start again from what is resident now: loading is not what is measured."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}")


# Workers


class WorkerFailed(RuntimeError):
    """A contender cannot run; the message has its own words."""


class Worker:
    """A contender in a process of its own; used as a context manager, which ends it.

    Args:
        name: for messages.
        argv: the command; it must call ``serve``.
        threads: its OpenMP and MKL threads.
        env: set in addition.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, threads: int, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - close() ends it
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **thread_settings(threads), **(env or {})},
            start_new_session=True,
        )

    def call(self, command: str, **values: Any) -> Json:
        """One command and its answer; raises WorkerFailed when it failed or the process ended."""
        try:
            _write_line(self._process.stdin, {"command": command, **values})
            line = _file(self._process.stdout).readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed(f"{self.name} ended: {self._last_words()}")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise WorkerFailed("\n".join([f"{self.name}: {answer['error']}", *self._errors()]))
        return answer

    def close(self) -> None:
        """End the process and everything it started."""
        _file(self._process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _file(self._process.stdout).close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        return "\n".join([f"exit code {code}", *self._logged()[-15:]])

    def _errors(self) -> list[str]:
        """What processes of the worker's own logged: the reason is seldom in its exception."""
        found = [line.strip()[-300:] for line in self._logged() if _ERROR.search(line)]
        return list(dict.fromkeys(found))[-5:]

    def _logged(self) -> list[str]:
        """The end of the log; read without moving the place where the worker writes."""
        size = os.fstat(self._log.fileno()).st_size
        end = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
        return end.decode("utf-8", errors="replace").splitlines()


def thread_settings(threads: int) -> dict[str, str]:
    """The environment that gives a process so many threads for its kernels."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"TOKENIZERS_PARALLELISM": "false"}


def serve(commands: Mapping[str, Callable[..., Json]]) -> None:
    """Answer the commands of the parent's ``Worker`` until it closes the pipe.

    Standard output becomes standard error for everybody else, libraries in C included: only
    answers may reach the pipe.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        command = commands[request.pop("command")]
        try:
            answer = command(**request)
        except Exception as exc:  # whatever a contender raises is its answer
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        _write_line(answers, answer)


def _write_line(file: IO[str] | None, value: Json) -> None:
    out = _file(file)
    out.write(json.dumps(value) + "\n")
    out.flush()


def _file(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "Worker opens both pipes"
    return pipe


def _rounded(value: float | Sequence[float]) -> float | list[float]:
    if isinstance(value, float | int):
        return float(f"{value:.4g}")
    return [float(f"{v:.4g}") for v in value]


def _plain(value: Any) -> Any:
    """For the result line: paths by their last part only, which says what and not where."""
    return value.name if isinstance(value, Path) else value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
