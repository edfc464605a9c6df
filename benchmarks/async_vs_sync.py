"""How much asynchronous training gains over synchronous, and how much it could gain at most.

    python benchmarks/async_vs_sync.py --workload all

Each run is ``offbeat train`` in a process of its own, as a user types it; sync and async differ in
``mode`` and ``rollout.max_staleness`` (0, and eta = --max-staleness) only. Workloads, in
benchmarks/workloads/:

    short      compute-bound: answers of 16 tokens, a model of 14 million parameters (or --smollm2),
               large enough that a synchronous run uses all cores for each phase
    lognormal  answer lengths log-normal, mean 32, coefficient of variation 1.3; tiny model
    waiting    each reward waits 0.5 to 5 s without using a core; tiny model
    one-core   ``short`` with one core for everything: here async loses

A round is three runs: sync, async, and a third (``split``) that measures what the bound needs.
One JSON line per workload. Measured quantities, all in seconds per step, means over steady steps:

    step   (end of the last steady step - end of the step before the first) / steady steps; a step
           ends when its weights are live on the generator. Left out: the first eta + 1 steps, and
           in async runs the last eta + 1, when generation has ended already. The number of steady
           steps is a multiple of eta + 1: async steps come in bursts of that length.
    M      sync run: from the start of the first request of a batch to the end of its last request
           or reward call.
    t      sync run: from the moment the batch is complete to the moment the new weights are live:
           update, publication, transfer, commit. M + t is a sync step up to a few milliseconds.
    G'     split run: seconds per batch in which a forward pass of the engine ran. The split run is
           synchronous, with the threads that trainer and generator have in async mode, rewards
           that do not wait, and answers of equal length, so that every slot is busy to the end:
           fully packed generation. Scaled by generated tokens to the batch of the sync run.
    t'     split run: t with the threads of async mode, scaled by trained tokens in the same way.

With f the share of the cores that trains, G' = G/(1-f) and t' = t_all/f of MATH.md's model, where
G and t_all use all cores; they are measured with the split instead of assuming that time goes with
1/cores. So the bound on the speed-up is

    bound = (M + t) / max(G', t', (G' c_g + t' c_t) / C, (M + t) / (eta + 1))

with c_g and c_t the threads of generator and trainer in async mode and C the cores. The third term
binds only where c_g + c_t > C, as on one core. In ``waiting``, waiting needs no core: f does not
split it, and G' is what the engine computes for a batch, not how long the batch takes.

    speed-up             sync step / async step, round by round
    fraction             speed-up / bound
    bound_in_order       the same bound if batches of makespans M_k, as measured, are trained in
                         order: e_k = max(e_(k-1), e_(k-eta-1) + M_k) + t, and not faster than the
                         other terms. Lower than bound where M_k varies from batch to batch.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import offbeat_runs
from measure import Json, Spread, alternate, arguments, emit, facts, note, ratios
from offbeat_runs import OffbeatRun
from processes import first_cores

WORKLOADS = Path(__file__).resolve().parent / "workloads"

SHORT_MODEL = (
    *("--characters", "0123456789=", "--layers", "8", "--hidden", "384", "--heads", "6"),
    *("--kv-heads", "6", "--head-dim", "64", "--intermediate", "1024", "--max-len", "64"),
)
LONG_TINY_MODEL = (*offbeat_runs.TINY_MODEL, "--max-len", "512")
"""The tiny model of recipes/reverse.yaml with room for long answers: the last option counts."""

SPLIT_SKIPPED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``split``: overrides of the split run. ``sync_bursts``: steady sync steps / (eta + 1)."""

    recipe: str
    model: Sequence[str]
    split: Sequence[str] = ()
    sync_bursts: int
    one_core: bool = False


CASES = {
    "short": Workload(recipe="short", model=SHORT_MODEL, sync_bursts=2),
    "lognormal": Workload(
        recipe="lognormal",
        model=LONG_TINY_MODEL,
        split=(
            "rollout.workflow=offbeat.rollout.rlvr:RLVRWorkflow",
            "gconfig.ignore_eos=true",
            "gconfig.max_new_tokens=32",
        ),
        sync_bursts=4,
    ),
    "waiting": Workload(
        recipe="waiting",
        model=offbeat_runs.TINY_MODEL,
        split=("rollout.reward_fn=async_workloads:even_share",),
        sync_bursts=2,
    ),
    "one-core": Workload(recipe="short", model=SHORT_MODEL, sync_bursts=2, one_core=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The steady steps of one run; every figure is a mean over them, seconds per step.

    ``makespans`` are those of its batches. ``engine`` is time in forward passes of the engine,
    ``training`` from a complete batch to live weights, ``waiting`` the trainer's wait for groups.
    """

    step: float
    makespans: Sequence[float]
    training: float
    waiting: float
    engine: float
    tokens: float
    lag: float
    length_cv: float

    @property
    def makespan(self) -> float:
        return statistics.fmean(self.makespans)


def steady(run: OffbeatRun, skipped: int, count: int) -> Steady:
    """The ``count`` steps after the first ``skipped`` ones of ``run``."""
    from offbeat.observe.spans import total_seconds

    ends = run.step_ends
    begin, end = ends[skipped - 1], ends[skipped + count - 1]
    steps = range(skipped + 1, skipped + count + 1)
    waits = {s.step: s for s in run.spans if s.name == "wait"}
    engine = [
        (max(begin, s.start), min(end, s.end))
        for s in run.spans
        if s.name in ("decode", "prefill") and s.end > begin and s.start < end
    ]
    records = [r for r in run.records if r.step in steps]
    lengths = run.answer_lengths_of(steps)
    return Steady(
        step=(end - begin) / count,
        makespans=run.makespans(steps),
        training=statistics.fmean(ends[k - 1] - waits[k].end for k in steps),
        waiting=statistics.fmean(waits[k].end - waits[k].start for k in steps),
        engine=total_seconds(engine) / count,
        tokens=statistics.fmean(r.metrics["tokens/generated_count"] for r in records),
        lag=statistics.fmean(r.metrics["lag/group_mean"] for r in records),
        length_cv=statistics.pstdev(lengths) / statistics.fmean(lengths),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the model of the docstring says of one round; seconds per step."""

    eta: int
    makespans: Sequence[float]
    training: float
    generation_split: float
    training_split: float
    generator_threads: int
    trainer_threads: int
    cores: int

    @property
    def sync(self) -> float:
        """M + t."""
        return statistics.fmean(self.makespans) + self.training

    @property
    def work(self) -> float:
        """The least that the cores need."""
        g, t = self.generation_split, self.training_split
        busy = (g * self.generator_threads + t * self.trainer_threads) / self.cores
        return max(g, t, busy)

    @property
    def bound(self) -> float:
        """The largest speed-up."""
        return self.sync / max(self.work, self.sync / (self.eta + 1))

    @property
    def in_order(self) -> float:
        """The largest speed-up of batches trained in order; see the module's docstring."""
        bursts = 50
        ends = [0.0] * (self.eta + 1)
        for k in range(bursts * len(self.makespans)):
            makespan = self.makespans[k % len(self.makespans)]
            ready = max(ends[-1], ends[-self.eta - 1] + makespan)
            ends.append(ready + self.training)
        step = (ends[-1] - ends[self.eta]) / (len(ends) - self.eta - 1)
        return self.sync / max(self.work, step)


class Race:
    """One workload: runs each mode when asked and keeps what came out."""

    def __init__(
        self,
        workload: Workload,
        *,
        model: Path,
        eta: int,
        bursts: int,
        cores: int,
        extra: Sequence[str],
        scratch: Path,
    ) -> None:
        self._workload = workload
        self._recipe = WORKLOADS / f"{workload.recipe}.yaml"
        self._cores = first_cores(1 if workload.one_core else cores)
        self._scratch = scratch
        self._common = [
            f"model.path={model}",
            "model.dtype=float32",
            *offbeat_runs.NO_SAVE,
            *extra,
        ]
        self.eta = eta
        self._skipped = eta + 1
        self._steady_async = bursts * (eta + 1)
        self._steady_sync = min(bursts, workload.sync_bursts) * (eta + 1)
        self._steady_split = eta + 1
        self.runs: dict[str, list[Steady]] = {"sync": [], "async": [], "split": []}
        self.threads: dict[str, Json] = {}

    @property
    def cores(self) -> int:
        return len(self._cores)

    @property
    def _sync(self) -> list[str]:
        return [*self._common, "mode=sync", "rollout.max_staleness=0"]

    @property
    def _async(self) -> list[str]:
        return [*self._common, "mode=async", f"rollout.max_staleness={self.eta}"]

    def sides(self) -> Mapping[str, Callable[[int], float]]:
        """For ``alternate``."""
        return {
            "sync": lambda n: self._run("sync", self._sync, n, self._skipped, self._steady_sync),
            "async": lambda n: self._run(
                "async", self._async, n, self._skipped, self._steady_async, self._skipped
            ),
            "split": self._split,
        }

    def _split(self, number: int) -> float:
        """Synchronous, with the threads of async mode; see the module's docstring."""
        cfg = offbeat_runs.resolved(self._recipe, self._async)
        threads = offbeat_runs.threads_of(cfg, self.cores)
        overrides = [
            *self._sync,
            f"generator.threads={threads['generator']}",
            f"actor.threads={threads['trainer']}",
            *self._workload.split,
        ]
        return self._run("split", overrides, number, SPLIT_SKIPPED, self._steady_split)

    def _run(
        self,
        side: str,
        overrides: Sequence[str],
        number: int,
        skipped: int,
        count: int,
        after: int = 0,
    ) -> float:
        run = offbeat_runs.train(
            self._recipe,
            [*overrides, f"total_train_steps={skipped + count + after}"],
            fileroot=self._scratch,
            trial=f"{side}-{number}",
            cores=self._cores,
        )
        self.threads[side] = run.threads
        self.runs[side].append(steady(run, skipped, count))
        shutil.rmtree(run.run_dir)
        return self.runs[side][-1].step

    def bounds(self) -> list[Bound]:
        """One per round."""
        return [
            Bound(
                eta=self.eta,
                makespans=sync.makespans,
                training=sync.training,
                generation_split=split.engine * sync.tokens / split.tokens,
                training_split=split.training * sync.tokens / split.tokens,
                generator_threads=self.threads["async"]["generator"],
                trainer_threads=self.threads["async"]["trainer"],
                cores=self.cores,
            )
            for sync, split in zip(self.runs["sync"], self.runs["split"], strict=True)
        ]


def result(name: str, race: Race, options: argparse.Namespace) -> Json:
    """The record of one workload."""
    sync, overlapped, bounds = race.runs["sync"], race.runs["async"], race.bounds()
    speedup = ratios([s.step for s in sync], [a.step for a in overlapped])
    threads = race.threads["async"]
    share = threads["trainer"] / (threads["trainer"] + threads["generator"])
    return {
        **facts("async_vs_sync", options),
        "workload": name,
        "max_staleness": race.eta,
        "cores": race.cores,
        "threads_by_run": race.threads,
        "speedup": speedup.as_json(),
        "bound": _spread([b.bound for b in bounds]),
        "fraction": ratios(speedup.values, [b.bound for b in bounds]).as_json(),
        "bound_in_order": _spread([b.in_order for b in bounds]),
        "fraction_in_order": ratios(speedup.values, [b.in_order for b in bounds]).as_json(),
        "seconds": {
            "sync_step": _spread([s.step for s in sync]),
            "async_step": _spread([a.step for a in overlapped]),
            "M": _spread([s.makespan for s in sync]),
            "t": _spread([s.training for s in sync]),
            "G_split": _spread([b.generation_split for b in bounds]),
            "t_split": _spread([b.training_split for b in bounds]),
            "async_training": _spread([a.training for a in overlapped]),
            "async_waiting": _spread([a.waiting for a in overlapped]),
            "async_engine": _spread([a.engine for a in overlapped]),
            "async_makespan": _spread([a.makespan for a in overlapped]),
        },
        "f": share,
        "tokens_per_step": _spread([s.tokens for s in sync]),
        "length_cv": _spread([s.length_cv for s in sync]),
        "async_lag_mean": _spread([a.lag for a in overlapped]),
    }


def _spread(values: Sequence[float]) -> Json:
    return Spread.of(values).as_json()


def run_workload(name: str, options: argparse.Namespace, scratch: Path) -> Json:
    """All rounds of one workload, as one record."""
    workload = CASES[name]
    model = options.smollm2.resolve() if options.smollm2 and workload.recipe == "short" else None
    if model is None:
        model = offbeat_runs.init_model(scratch / "model", workload.model)
    race = Race(
        workload,
        model=model,
        eta=options.max_staleness,
        bursts=options.bursts,
        cores=options.threads,
        extra=options.set,
        scratch=scratch,
    )
    note(f"workload {name}: {options.runs} rounds of sync, async, split")
    alternate(race.sides(), options.runs)
    return result(name, race, options)


def main() -> None:
    """Parse, run, print."""
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--workload", choices=(*CASES, "all"), default="all", help="what to run")
    parser.add_argument("--max-staleness", type=int, default=4, help="eta of the async runs")
    parser.add_argument(
        "--bursts", type=int, default=4, help="steady async steps / (eta + 1); fewer is shorter"
    )
    parser.add_argument("--smollm2", type=Path, help="folder of the model of short and one-core")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override in every run"
    )
    options = parser.parse_args()
    if options.max_staleness < 1 or options.bursts < 1:
        parser.error("--max-staleness and --bursts must be at least 1")
    for name in CASES if options.workload == "all" else (options.workload,):
        with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as scratch:
            emit(run_workload(name, options, Path(scratch)), options.out)


if __name__ == "__main__":
    main()
