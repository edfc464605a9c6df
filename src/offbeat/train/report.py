"""What an update did, summed over its micro-batches and reduced once.

Owns the names ``actor/…`` and ``lag/token_…`` and how each is reduced; knows no model. Sums are over policy tokens unless a name says
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.algo.behavior import effective_sample_size, ratio_statistics, weight_sums, WeightSums
from offbeat.algo.surrogate import LossTerms
from offbeat.train.batch import TrainBatch
from offbeat.types import PolicyVersion


class StepSums:
    """Accumulates the facts of one update; ``metrics`` reduces them."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.logp_error = 0.0
        self._totals: dict[str, float] = {}
        self._weights = WeightSums(total=torch.zeros(()), squares=torch.zeros(()))
        self._ratio_min, self._ratio_max = float("inf"), 0.0

    def add(
        self,
        micro: TrainBatch,
        terms: LossTerms,
        logp: Tensor,
        prox: Tensor,
        entropy: Tensor,
        loss: Tensor,
        produce: PolicyVersion,
        fresh: bool,
    ) -> None:
        """Count one micro-batch. ``fresh``: the weights are still those of the start of the step."""
        mask = torch.ones_like(micro.seq_id, dtype=torch.bool)
        ratios = ratio_statistics(prox, micro.behave_logp, mask)
        sums = weight_sums(terms.weight_T, mask)
        self._weights = WeightSums(
            total=self._weights.total + sums.total.cpu(),
            squares=self._weights.squares + sums.squares.cpu(),
        )
        self._ratio_min = min(self._ratio_min, float(ratios.ratio_min))
        self._ratio_max = max(self._ratio_max, float(ratios.ratio_max))
        lag = (produce - 1) - micro.versions
        for name, value in (
            ("tokens", len(micro.seq_id)),
            ("loss", loss),
            ("entropy", entropy.sum()),
            ("clipped", terms.clipped_T.sum()),
            ("dual_clipped", terms.dual_clipped_T.sum()),
            ("dropped", (~terms.kept_T).sum()),
            ("nonfinite", terms.nonfinite_T.sum()),
            ("behave_ratio", ratios.ratio_total),
            ("ratio", terms.ratio_T.sum()),
            ("k1", ratios.k1_total),
            ("k3", ratios.k3_total),
            ("lag", lag.sum()),
        ):
            self._totals[name] = self._totals.get(name, 0.0) + float(value)
        # A row that a weight swap overtook was continued on keys of the older weights (kv_on_update: keep): its later
        # tokens have no counterpart in a pass under one version, so only whole rows of the present version compare.
        oldest = lag.new_zeros(micro.rows).scatter_reduce(0, micro.seq_id, lag, "amax")
        current = (oldest == 0)[micro.seq_id]
        if fresh and bool(current.any()):
            error = (logp - micro.behave_logp)[current].abs().max()
            self.logp_error = max(self.logp_error, float(error))

    def stepped(self, grad_norm: float) -> None:
        """Count one optimizer step."""
        self.optimizer_steps += 1
        self._totals["grad_norm"] = self._totals.get("grad_norm", 0.0) + grad_norm

    def metrics(
        self, batch: TrainBatch, produce: PolicyVersion, *, learning_rate: float
    ) -> dict[str, float]:
        """The step's metrics by name: means over policy tokens, or over optimizer steps for loss and norm."""
        t, n = self._totals, self._totals["tokens"]
        return {
            "actor/loss": t["loss"] / self.optimizer_steps,
            "actor/grad_norm": t["grad_norm"] / self.optimizer_steps,
            "actor/lr": learning_rate,
            "actor/entropy": t["entropy"] / n,
            "actor/clip_fraction": t["clipped"] / n,
            "actor/dual_clip_fraction": t["dual_clipped"] / n,
            "actor/ratio_mean": t["ratio"] / n,
            "actor/behave_weight_mean": t["behave_ratio"] / n,
            "actor/behave_weight_min": self._ratio_min,
            "actor/behave_weight_max": self._ratio_max,
            "actor/masked_fraction": t["dropped"] / n,
            "actor/nonfinite_count": t["nonfinite"],
            "actor/ess": float(effective_sample_size(self._weights, n)),
            "actor/kl_k1": t["k1"] / n,
            "actor/kl_k3": t["k3"] / n,
            "actor/logp_error_max": self.logp_error,
            "actor/minibatches_count": float(self.optimizer_steps),
            "actor/rows_count": float(batch.rows),
            "actor/tokens_count": n,
            "lag/token_mean": t["lag"] / n,
            "lag/token_max": float(((produce - 1) - batch.versions).max()),
        }
