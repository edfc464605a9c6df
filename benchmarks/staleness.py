"""What the staleness policies cost and give, on virtual time, with the classes of the pipeline.

No model and no clock: answers have log-normal lengths (cv 1.3), a token takes one unit of time
whatever runs beside it, a group is complete with its last answer, an update takes as long as a
batch takes to decode when all slots are busy (so that training and generation balance). Everything
else is ``StalenessManager`` and ``SlotGauge`` as the loop drives them.

Per policy and max_staleness: updates per unit of time over those of synchronous training; mean and
largest lag of the groups trained on; tokens of dropped groups as a share of all; mean length
trained on over mean length dispatched. Over seeds: medians.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from dataclasses import dataclass

import numpy as np
from measure import Json, arguments, emit, facts

from offbeat.pipeline.staleness import Policy, SlotGauge, StalenessManager, Ticket
from offbeat.types import GroupId, PolicyVersion, Prompt, RolloutGroup

NO_TOKENS = np.zeros(0, dtype=np.int64)
CV = 1.3
MEAN_LENGTH = 200.0
STALENESS = (0, 1, 2, 4, 8)
VARIANTS = {
    "pace, full": (Policy.PACE, False),
    "pace, adaptive": (Policy.PACE, True),
    "drop": (Policy.DROP, False),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``groups`` prompts of ``answers`` answers per step, ``slots`` requests at a time."""

    groups: int = 16
    answers: int = 8
    slots: int = 128
    steps: int = 200

    @property
    def update_time(self) -> float:
        return self.groups * self.answers * MEAN_LENGTH / self.slots


class Simulation:
    """One run of ``steps`` updates; heap entries are (time, order, group or -1 for the update)."""

    def __init__(self, load: Workload, eta: int, variant: str, seed: int) -> None:
        policy, adaptive = VARIANTS[variant]
        self.load = load
        self.manager = StalenessManager(
            max_staleness=eta,
            groups_per_step=load.groups,
            total_groups=load.groups * load.steps,
            policy=policy,
            adaptive_lookahead=adaptive,
        )
        self.gauge = SlotGauge(load.slots)
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, int]] = []
        self.now, self.order = 0.0, 0
        self.tickets: dict[int, Ticket] = {}
        self.left: dict[int, int] = {}
        self.tokens: dict[int, float] = {}
        self.trained: list[int] = []
        self.lags: list[int] = []
        self.training, self.waits = False, True

    def run(self) -> Simulation:
        self.react()
        while self.events:
            self.now, _, group = heapq.heappop(self.events)
            if group < 0:
                self.training = False
                self.manager.publish(PolicyVersion(self.manager.live + 1))
            else:
                self.answered(group)
            self.react()
        return self

    def later(self, delay: float, group: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, group))

    def answered(self, group: int) -> None:
        self.gauge.end()
        self.left[group] -= 1
        if self.left[group] == 0:
            self.gauge.release(GroupId(group))
            self.manager.deliver(GroupId(group), self.complete(self.tickets[group]))

    def complete(self, ticket: Ticket) -> RolloutGroup:
        prompt = Prompt(group_id=ticket.group_id, epoch=0, row=0, token_ids=NO_TOKENS, text="")
        return RolloutGroup(prompt=prompt, rollouts=(), admission_version=ticket.admission_version)

    def react(self) -> None:
        manager, load = self.manager, self.load
        for late in manager.stale():
            manager.drop(late)
        while manager.may_admit() and self.gauge.fits(load.answers):
            self.admit(manager.admit())
        if self.training or manager.finished:
            return
        if not manager.batch_ready():
            self.waits = True
            return
        groups = manager.take()
        manager.lookahead.batch_taken(
            waited=self.waits,
            slots_free=self.gauge.fits(load.answers),
            finished=manager.finished_groups,
        )
        self.lags += [manager.live - g.admission_version for g in groups]
        self.trained += [g.prompt.group_id for g in groups]
        self.training, self.waits = True, False
        self.later(load.update_time, -1)

    def admit(self, ticket: Ticket) -> None:
        group, n = ticket.group_id, self.load.answers
        self.tickets[group], self.left[group] = ticket, n
        sigma = math.sqrt(math.log(1 + CV**2))
        lengths = [
            self.random.lognormvariate(math.log(MEAN_LENGTH) - sigma**2 / 2, sigma)
            for _ in range(n)
        ]
        self.tokens[group] = sum(lengths)
        self.gauge.reserve(group, n)
        for length in lengths:
            self.gauge.start(group)
            self.later(length, group)

    def figures(self) -> dict[str, float]:
        dispatched, trained = sum(self.tokens.values()), sum(self.tokens[g] for g in self.trained)
        bias = (trained / len(self.trained)) / (dispatched / len(self.tokens))
        return {
            "steps_per_time": self.load.steps / self.now,
            "lag_mean": statistics.fmean(self.lags),
            "lag_max": float(max(self.lags)),
            "waste": 1 - trained / dispatched,
            "length_bias": bias,
        }


def main() -> None:
    parser = arguments(__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="updates of one run")
    options = parser.parse_args()
    emit({**facts("staleness", options), "rows": _rows(options)}, options.out)


def _rows(options: argparse.Namespace) -> list[Json]:
    load = Workload(steps=options.steps)
    sync = [Simulation(load, 0, "pace, full", seed).run().figures() for seed in range(options.runs)]
    rows = []
    for variant in VARIANTS:
        for eta in STALENESS:
            if eta == 0 and variant != "pace, full":
                continue  # refused by the configuration: one batch is open at a time
            runs = [
                Simulation(load, eta, variant, seed).run().figures() for seed in range(options.runs)
            ]
            speed = [
                r["steps_per_time"] / s["steps_per_time"] for r, s in zip(runs, sync, strict=True)
            ]
            row: Json = {"policy": variant, "max_staleness": eta}
            row["speed_over_sync"] = statistics.median(speed)
            for name in ("lag_mean", "lag_max", "waste", "length_bias"):
                row[name] = statistics.median(r[name] for r in runs)
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
