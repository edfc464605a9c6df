"""offbeat, synchronous and asynchronous, against TRL's GRPOTrainer on the same task.

    python benchmarks/vs_trl.py --trl-python PEER/bin/python --case tiny
    python benchmarks/vs_trl.py --trl-python PEER/bin/python --case smollm2 --smollm2 MODEL_FOLDER

PEER is an environment with trl 1.16 (CPU torch), in which offbeat is not needed. Each run is a
process of its own: ``offbeat train RECIPE ...`` as a user types it, and ``peers/trl_grpo.py``,
whose docstring names TRL's settings. All take the same model folder, rows in the same order, reward
function, prompts and answers per step, sampling, learning rate and schedule, AdamW, clip, loss
aggregation, entropy bonus, float32 and cores; what still differs is listed under ``differences`` of
the result. Evaluation and saving are off on both sides.

Cases: ``tiny`` is recipes/reverse.yaml (93 thousand parameters), ``smollm2`` is
recipes/smollm2_addition.yaml (135 million). One JSON line per case. Figures of one run:

    step_seconds           median distance between the ends of neighboring steps
    mean_step_seconds      (end of last step - end of first) / (steps - 1); the ratios use this one,
                           because asynchronous steps come in bursts
    startup_seconds        process start to the end of the first step, minus one step_seconds
    seconds_to_samples     process start to the end of the last step: the same number of samples
    seconds_to_reward      process start to the end of the first step at which the mean training
                           reward of the last --reward-window steps is at least --reward-threshold
    peak_pss_mb, peak_rss_mb   largest sum over the process tree; see processes.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import offbeat_runs
from measure import Json, Spread, alternate, arguments, emit, facts, note, ratios
from processes import Finished, clean_environment, first_cores, run_watched

if TYPE_CHECKING:
    from offbeat.config import RunConfig

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"
PEER = HERE / "peers" / "trl_grpo.py"

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards: fixed in TRL, a key of ours."""

LOSS_TYPES = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
"""``actor.loss_aggregation`` to TRL's ``loss_type``."""

DIFFERENCES = (
    "random streams: the same distribution is sampled, not the same answers",
    "offbeat is a controller, a trainer, a generator and a reward process; TRL is one process",
    "offbeat's weights go to its generator every step; TRL generates with the trained weights",
    "offbeat writes metrics, spans, a ledger and all rollouts to disk; TRL one line per step",
    "offbeat's ratio is to the log-probs recorded when sampling; TRL takes its own, detached",
    "asynchronous offbeat: groups up to max_staleness versions old, and the decoupled loss",
    "at an epoch's end TRL leaves out an incomplete batch, offbeat goes on in the next epoch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One task. ``trl_threads``: what is fastest for TRL there, where cores allow.

    ``max_staleness`` is that of the asynchronous runs.
    """

    recipe: str
    steps: int
    reward_threshold: float
    reward_window: int
    trl_threads: int
    max_staleness: int
    note: str = ""


CASES = {
    "tiny": Case(
        recipe="reverse",
        steps=500,
        reward_threshold=0.9,
        reward_window=10,
        trl_threads=1,
        max_staleness=4,
        note="matrix products of this model are too small to share between threads",
    ),
    "smollm2": Case(
        recipe="smollm2_addition",
        steps=12,
        reward_threshold=0.7,
        reward_window=3,
        trl_threads=64,
        max_staleness=1,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of either side. Times are CLOCK_MONOTONIC seconds, lists are by step."""

    process: Finished
    step_ends: Sequence[float]
    rewards: Sequence[float]
    lengths: Sequence[float]

    @property
    def step_seconds(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self.step_ends))

    @property
    def mean_step_seconds(self) -> float:
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

    @property
    def startup_seconds(self) -> float:
        return self.step_ends[0] - self.process.started - self.step_seconds

    @property
    def seconds_to_samples(self) -> float:
        return self.step_ends[-1] - self.process.started

    def steps_to_reward(self, threshold: float, window: int) -> int | None:
        """The first step whose last ``window`` mean rewards average at least ``threshold``."""
        for last in range(window, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[last - window : last]) >= threshold:
                return last
        return None

    def seconds_to_reward(self, threshold: float, window: int) -> float | None:
        """When that step ended, seconds after the process started; None when it never came."""
        step = self.steps_to_reward(threshold, window)
        return None if step is None else self.step_ends[step - 1] - self.process.started


class Contest:
    """One case: runs each side when asked and keeps what came out."""

    def __init__(
        self,
        case: Case,
        *,
        model: Path,
        trl_python: Path,
        steps: int,
        threads: int,
        trl_threads: int,
        micro_batch: int | None,
        generation: str,
        extra: Sequence[str],
        scratch: Path,
    ) -> None:
        self._recipe = RECIPES / f"{case.recipe}.yaml"
        self._trl_python = trl_python
        self._cores = first_cores(threads)
        self._trl_threads = min(trl_threads, threads)
        self._scratch = scratch
        self._staleness = f"rollout.max_staleness={case.max_staleness}"
        self._overrides = [
            f"model.path={model}",
            "model.dtype=float32",
            f"total_train_steps={steps}",
            "train_dataset.shuffle=false",
            f"actor.reward_norm.eps={STD_EPSILON}",
            *offbeat_runs.NO_EVALUATION,
            *offbeat_runs.NO_SAVE,
            *extra,
        ]
        self.cfg = offbeat_runs.resolved(self._recipe, self.sync)
        rows = self.cfg.train_dataset.batch_size * self.cfg.gconfig.n_samples
        self._micro_batch = micro_batch or rows
        self._generation = generation
        self.outcomes: dict[str, list[Outcome]] = {side: [] for side in self.sides()}
        self.facts: dict[str, Json] = {}

    @property
    def sync(self) -> list[str]:
        """Overrides of a synchronous run."""
        return [*self._overrides, "mode=sync"]

    def sides(self) -> Mapping[str, Callable[[int], float]]:
        """For ``alternate``."""
        return {
            "offbeat_sync": lambda number: self._offbeat("offbeat_sync", self.sync, number),
            "offbeat_async": lambda number: self._offbeat(
                "offbeat_async", [*self._overrides, "mode=async", self._staleness], number
            ),
            "trl": self._trl,
        }

    def _offbeat(self, side: str, overrides: Sequence[str], number: int) -> float:
        run = offbeat_runs.train(
            self._recipe,
            overrides,
            fileroot=self._scratch,
            trial=f"{side}-{number}",
            cores=self._cores,
        )
        self.facts[side] = {
            "threads": run.threads,
            "max_staleness": run.cfg.rollout.max_staleness,
            "prompt_tokens": run.prompt_tokens_mean,
        }
        return self._keep(
            side,
            Outcome(
                process=run.process,
                step_ends=run.step_ends,
                rewards=run.rewards,
                lengths=run.lengths,
            ),
        )

    def _trl(self, number: int) -> float:
        folder = self._scratch / f"trl-{number}"
        folder.mkdir()
        task = self._task(folder)
        (folder / "task.json").write_text(json.dumps(task), "utf-8")
        process = run_watched(
            [str(self._trl_python), str(PEER), str(folder / "task.json")],
            cores=self._cores,
            log=folder / "log",
            env=clean_environment(
                {"OMP_NUM_THREADS": str(self._trl_threads), "HF_HUB_OFFLINE": "1"}
            ),
        )
        lines = [json.loads(x) for x in Path(task["out"]).read_text("utf-8").splitlines()]
        setup, steps = lines[0]["setup"], lines[1:]
        own = {k: v for k, v in setup["settings"].items() if k != "output_dir"}
        self.facts["trl"] = {**setup, "settings": own}
        return self._keep(
            "trl",
            Outcome(
                process=process,
                step_ends=[s["time"] for s in steps],
                rewards=[s["reward"] for s in steps],
                lengths=[s["length"] for s in steps],
            ),
        )

    def _keep(self, side: str, outcome: Outcome) -> float:
        self.outcomes[side].append(outcome)
        return outcome.mean_step_seconds

    def _task(self, folder: Path) -> Json:
        """Everything that TRL is told, from the configuration that offbeat runs."""
        cfg = self.cfg
        actor, optimizer = cfg.actor, cfg.actor.optimizer
        steps = cfg.total_train_steps or 0
        schedule = str(optimizer.lr_scheduler_type)
        file, function = cfg.rollout.reward_fn.split(":")
        return {
            "model": cfg.model.path,
            "rows": str(self._write_rows(cfg, folder)),
            "reward": f"{self._recipe.parent / file}.py:{function}",
            "out": str(folder / "steps.jsonl"),
            "threads": self._trl_threads,
            "steps": steps,
            "prompts": cfg.train_dataset.batch_size,
            "samples": cfg.gconfig.n_samples,
            "max_new_tokens": cfg.gconfig.max_new_tokens,
            "temperature": cfg.gconfig.temperature,
            "loss_type": LOSS_TYPES[str(actor.loss_aggregation)],
            "epsilon": actor.eps_clip,
            "epsilon_high": actor.eps_clip_higher,
            "entropy_coef": actor.entropy_coef,
            "scale_rewards": str(actor.reward_norm.std_level),
            "learning_rate": optimizer.lr,
            "lr_scheduler_type": "constant_with_warmup" if schedule == "constant" else schedule,
            "warmup_steps": round(optimizer.warmup_steps_proportion * steps),
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_epsilon": optimizer.eps,
            "max_grad_norm": optimizer.gradient_clipping,
            "seed": cfg.seed,
            "micro_batch": self._micro_batch,
            "generation": self._generation,
        }

    def _write_rows(self, cfg: RunConfig, folder: Path) -> Path:
        """The recipe's rows as TRL reads them: messages, where there are any, are the prompt."""
        from offbeat.data.dataset import load_rows

        data = cfg.train_dataset
        rows = load_rows(
            data.path,
            args=data.args,
            limit=data.limit,
            search_dir=cfg.plugin_dir,
            key="train_dataset.path",
        )
        path = folder / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for index in range(len(rows)):
                row = dict(rows[index])
                prompt = row.pop("messages", None) or row["prompt"]
                file.write(json.dumps({**row, "prompt": prompt}) + "\n")
        return path


def summarized(outcomes: Sequence[Outcome], threshold: float, window: int) -> Json:
    """Median and spread of every figure of one side."""
    names = ("step_seconds", "mean_step_seconds", "startup_seconds", "seconds_to_samples")
    figures: Json = {n: Spread.of([getattr(o, n) for o in outcomes]).as_json() for n in names}
    reached = [s for o in outcomes if (s := o.seconds_to_reward(threshold, window)) is not None]
    steps = [n for o in outcomes if (n := o.steps_to_reward(threshold, window)) is not None]
    memory = {
        "peak_pss_mb": [o.process.peak_pss_bytes / 1e6 for o in outcomes],
        "peak_rss_mb": [o.process.peak_rss_bytes / 1e6 for o in outcomes],
    }
    return {
        **figures,
        "seconds_to_reward": Spread.of(reached).as_json() if reached else None,
        "steps_to_reward": Spread.of(steps).as_json() if steps else None,
        "runs_that_reached_it": len(reached),
        "last_reward": Spread.of(
            [statistics.fmean(o.rewards[-window:]) for o in outcomes]
        ).as_json(),
        "answer_tokens": Spread.of([statistics.fmean(o.lengths) for o in outcomes]).as_json(),
        "process_seconds": Spread.of(
            [o.process.ended - o.process.started for o in outcomes]
        ).as_json(),
        **{name: Spread.of(values).as_json() for name, values in memory.items()},
    }


def compared(
    trl: Sequence[Outcome], ours: Sequence[Outcome], threshold: float, window: int
) -> Json:
    """TRL's figure over ours, round by round: above 1 offbeat is better."""

    def over(figure: Callable[[Outcome], float]) -> Json:
        return ratios([figure(o) for o in trl], [figure(o) for o in ours]).as_json()

    both = [
        (a, b)
        for x, y in zip(trl, ours, strict=True)
        if (a := x.seconds_to_reward(threshold, window)) is not None
        and (b := y.seconds_to_reward(threshold, window)) is not None
    ]
    return {
        "per_step": over(lambda o: o.mean_step_seconds),
        "to_samples": over(lambda o: o.seconds_to_samples),
        "to_reward": Spread.of([a / b for a, b in both]).as_json() if both else None,
        "startup": over(lambda o: o.startup_seconds),
        "memory": over(lambda o: o.process.peak_pss_bytes),
    }


def run_case(name: str, options: argparse.Namespace, scratch: Path) -> Json:
    """All runs of one case, as one record."""
    case = CASES[name]
    threshold = options.reward_threshold or case.reward_threshold
    window = options.reward_window or case.reward_window
    steps = options.steps or case.steps
    note(f"case {name}: {steps} steps, {options.runs} rounds")
    contest = Contest(
        case,
        model=_model(name, options, scratch),
        trl_python=options.trl_python,
        steps=steps,
        threads=options.threads,
        trl_threads=options.trl_threads or case.trl_threads,
        micro_batch=options.trl_micro_batch,
        generation=options.trl_generation,
        extra=options.set,
        scratch=scratch,
    )
    alternate(contest.sides(), options.runs)
    outcomes = contest.outcomes
    return {
        **facts("vs_trl", options),
        "case": name,
        "steps": steps,
        "prompts_per_step": contest.cfg.train_dataset.batch_size,
        "answers_per_prompt": contest.cfg.gconfig.n_samples,
        "max_new_tokens": contest.cfg.gconfig.max_new_tokens,
        "dtype": "float32",
        "reward_threshold": threshold,
        "reward_window": window,
        **{side: summarized(runs, threshold, window) for side, runs in outcomes.items()},
        "trl_over_offbeat_sync": compared(
            outcomes["trl"], outcomes["offbeat_sync"], threshold, window
        ),
        "trl_over_offbeat_async": compared(
            outcomes["trl"], outcomes["offbeat_async"], threshold, window
        ),
        "setups": contest.facts,
        "differences": list(DIFFERENCES) + ([case.note] if case.note else []),
    }


def _model(name: str, options: argparse.Namespace, scratch: Path) -> Path:
    if name == "smollm2":
        if options.smollm2 is None:
            raise SystemExit(
                "--case smollm2 needs --smollm2 FOLDER; recipes/smollm2_addition.yaml says how"
            )
        return options.smollm2.resolve()
    return offbeat_runs.init_model(scratch / "tiny-model", offbeat_runs.TINY_MODEL)


def main() -> None:
    """Parse, run, print."""
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter that has trl")
    parser.add_argument("--case", choices=(*CASES, "both"), default="tiny", help="what to train")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct, float32")
    parser.add_argument("--steps", type=int, help="steps of a run; default per case")
    parser.add_argument("--reward-threshold", type=float, help="default per case")
    parser.add_argument("--reward-window", type=int, help="steps averaged; default per case")
    parser.add_argument(
        "--trl-threads", type=int, help="TRL's torch threads; default: what is fastest per case"
    )
    parser.add_argument(
        "--trl-micro-batch", type=int, help="rows of one forward in TRL; default: the whole batch"
    )
    parser.add_argument(
        "--trl-generation", choices=("generate", "continuous"), default="generate", help="in TRL"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of offbeat's runs"
    )
    options = parser.parse_args()
    if options.steps is not None and options.steps < 2:
        parser.error("--steps must be at least 2: a step is measured between two ends")
    for name in CASES if options.case == "both" else (options.case,):
        with tempfile.TemporaryDirectory(prefix="vs-trl-") as scratch:
            emit(run_case(name, options, Path(scratch)), options.out)


if __name__ == "__main__":
    main()
