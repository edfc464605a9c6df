"""What an update did, summed over its micro-batches and reduced once.

Owns the names ``actor/…`` and ``lag/token_…`` and how each is reduced; knows no model. Sums are
over trained tokens unless a name says otherwise: policy tokens of rows that are in the loss, with a
finite recorded log-prob.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from offbeat.algo.behavior import (
    RatioStatistics,
    WeightSums,
    effective_sample_size,
    ratio_statistics,
    weight_sums,
)
from offbeat.algo.proximal import ApproximationErrors, LogprobError
from offbeat.algo.surrogate import LossTerms
from offbeat.observe.metrics import PROX_APPROXIMATIONS, prox_name
from offbeat.train.batch import TrainBatch
from offbeat.types import PolicyVersion


class StepSums:
    """Accumulates the facts of one update; ``metrics`` reduces them.

    Attributes:
        optimizer_steps: taken so far.
        logp_error: largest distance of recomputed from recorded log-probs, nats; None as long as no
            row could be compared.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.logp_error: float | None = None
        self._totals: dict[str, float] = {}
        self._lowest: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._weights = WeightSums(total=torch.zeros(()), squares=torch.zeros(()))
        self._rate = 0.0

    def add(
        self,
        micro: TrainBatch,
        terms: LossTerms,
        *,
        logp: Tensor,
        prox: Tensor,
        entropy: Tensor,
        mask: Tensor,
        loss: float,
        start: PolicyVersion,
    ) -> None:
        """Count one micro-batch.

        Args:
            micro: its rows. terms: its loss.
            logp, prox, entropy: [P] float32 nats, detached. mask: [P] bool, false on tokens of rows
                that are not in the loss.
            loss: all terms. start: version of the weights at the start of the step.
        """
        trained = mask & ~terms.nonfinite_T
        sums = weight_sums(terms.weight_T, trained)
        self._weights = WeightSums(
            total=self._weights.total + sums.total.cpu(),
            squares=self._weights.squares + sums.squares.cpu(),
        )
        lag = start - micro.versions
        self._count("trained", trained.sum())
        self._count("loss", loss)
        self._count("entropy", entropy[trained].sum())
        self._count("clipped", terms.clipped_T.sum())
        self._count("dual_clipped", terms.dual_clipped_T.sum())
        self._count("masked", (trained & ~terms.kept_T).sum())
        self._count("nonfinite", terms.nonfinite_T.sum())
        self._count("lag", lag[trained].sum())
        self._count_ratio(terms.ratio_T[trained])
        self._count_behavior(ratio_statistics(prox, micro.behave_logp, trained))
        # The weights are those of the recorded log-probs only until the first optimizer step.
        if self.optimizer_steps == 0:
            self.compare(micro, logp, start)

    def compare(self, rows: TrainBatch, logp: Tensor, start: PolicyVersion) -> None:
        """Recomputed log-probs [P] against recorded ones, under the weights ``start`` names.

        A row that a weight swap overtook was continued on keys of the older weights: its later
        tokens have no counterpart in a pass under one version, so only whole rows of the present
        version compare.
        """
        lag = start - rows.versions
        oldest = lag.new_zeros(rows.rows).scatter_reduce(0, rows.seq_id, lag, "amax")
        usable = (oldest == 0)[rows.seq_id] & torch.isfinite(rows.behave_logp)
        if bool(usable.any()):
            error = float((logp - rows.behave_logp)[usable].abs().max())
            self.logp_error = max(self.logp_error or 0.0, error)

    def add_prox_errors(self, errors: ApproximationErrors) -> None:
        """Count how far the approximations of the proximal log-prob are off in one micro-batch."""
        self._count("prox_logp", errors.recomputed_total)
        self._count("prox_abs_logp", errors.recomputed_abs_total)
        for name, error in _by_name(errors).items():
            for measure, total in _measured(error).items():
                self._count(f"prox_{name}_{measure}", total)
            self._extremes(f"prox_{name}", error.abs_max, error.abs_max)

    def stepped(self, grad_norm: float, learning_rate: float) -> None:
        """Count one optimizer step and the learning rate it was taken with."""
        self.optimizer_steps += 1
        self._count("grad_norm", grad_norm)
        self._rate = learning_rate

    def metrics(self, batch: TrainBatch, produce: PolicyVersion) -> dict[str, float]:
        """The step's metrics by name.

        Means are over trained tokens; of loss and gradient norm over optimizer steps.
        """
        t, n = self._totals, self._totals["trained"]
        return {
            "actor/loss": t["loss"] / self.optimizer_steps,
            "actor/grad_norm": t["grad_norm"] / self.optimizer_steps,
            "actor/lr": self._rate,
            "actor/entropy": t["entropy"] / n,
            "actor/clip_fraction": t["clipped"] / n,
            "actor/dual_clip_fraction": t["dual_clipped"] / n,
            "actor/ratio_mean": t["ratio"] / n,
            "actor/ratio_min": self._lowest["ratio"],
            "actor/ratio_max": self._highest["ratio"],
            "actor/masked_fraction": t["masked"] / n,
            "actor/nonfinite_count": t["nonfinite"],
            "actor/ess": float(effective_sample_size(self._weights, n)),
            "actor/minibatches_count": float(self.optimizer_steps),
            "actor/rows_count": float(batch.rows),
            "actor/tokens_count": n,
            "lag/token_mean": t["lag"] / n,
            "lag/token_max": float(((produce - 1) - batch.versions).max()),
            **self._behavior_metrics(),
            **self._prox_metrics(),
        }

    def _behavior_metrics(self) -> dict[str, float]:
        """Proximal against behavior policy, and recomputed against recorded log-probs."""
        t, n = self._totals, self._totals["trained"]
        compared = {} if self.logp_error is None else {"actor/logp_error_max": self.logp_error}
        return {
            "actor/behave_weight_mean": t["behave_ratio"] / n,
            "actor/behave_weight_min": self._lowest["behave_ratio"],
            "actor/behave_weight_max": self._highest["behave_ratio"],
            "actor/kl_k1": t["k1"] / n,
            "actor/kl_k3": t["k3"] / n,
            **compared,
        }

    def _prox_metrics(self) -> dict[str, float]:
        """The approximations of the proximal log-prob, when they were measured."""
        t, n = self._totals, self._totals["trained"]
        if "prox_logp" not in t:
            return {}
        found = {"actor/prox_logp_mean": t["prox_logp"] / n}
        for name in PROX_APPROXIMATIONS:
            values = {m: t[f"prox_{name}_{m}"] / n for m in _TOTALED}
            # Where every token was certain, Σ|p| = 0, only an error of 0 is none.
            size = max(t["prox_abs_logp"] / n, sys.float_info.min)
            values["relative_error_mean"] = values["error_mean"] / size
            values["error_max"] = self._highest[f"prox_{name}"]
            found |= {prox_name(name, measure): value for measure, value in values.items()}
        return found

    def _count(self, name: str, value: Tensor | float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + float(value)

    def _extremes(self, name: str, low: Tensor, high: Tensor) -> None:
        self._lowest[name] = min(self._lowest.get(name, float("inf")), float(low))
        self._highest[name] = max(self._highest.get(name, float("-inf")), float(high))

    def _count_ratio(self, ratio: Tensor) -> None:
        self._count("ratio", ratio.sum())
        if len(ratio):
            self._extremes("ratio", ratio.min(), ratio.max())

    def _count_behavior(self, ratios: RatioStatistics) -> None:
        self._count("behave_ratio", ratios.ratio_total)
        self._count("k1", ratios.k1_total)
        self._count("k3", ratios.k3_total)
        self._extremes("behave_ratio", ratios.ratio_min, ratios.ratio_max)


_TOTALED = (
    "logp_mean",
    "error_mean",
    "squared_error_mean",
    "behave_weight_mean",
    "behave_error_mean",
    "behave_relative_error_mean",
    "ratio_mean",
    "ratio_error_mean",
    "ratio_relative_error_mean",
)


def _measured(error: LogprobError) -> dict[str, Tensor]:
    """The sums behind the means of `PROX_MEASURES`."""
    sums = (
        error.logp_total,
        error.abs_total,
        error.squared_total,
        error.behave_total,
        error.behave_abs_total,
        error.behave_relative_total,
        error.ratio_total,
        error.ratio_abs_total,
        error.ratio_relative_total,
    )
    return dict(zip(_TOTALED, sums, strict=True))


def _by_name(errors: ApproximationErrors) -> dict[str, LogprobError]:
    return {"loglinear": errors.loglinear, "linear": errors.linear, "rollout": errors.rollout}
