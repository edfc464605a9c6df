"""The actor: one update from a batch of rollouts to the next policy version.

Consumes ``TrainSample``s; produces ``StepReport``. Owns the order of things (advantages over the whole batch, proximal log-probs under
the weights at the start of the step, minibatches of whole groups, micro-batches by token budget) and the version. The formulas
are in ``algo/``, the model in a ``TrainEngine``.

Shapes: R rows, P policy tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.algo.advantages import grpo_advantages, shape_rewards, zero_truncated
from offbeat.algo.entropy import entropy_bonus
from offbeat.algo.normalize import normalize
from offbeat.algo.proximal import loglinear
from offbeat.algo.surrogate import Denominators, LossTerms, policy_loss
from offbeat.config import ActorConfig, NormConfig, ProxLogpMethod
from offbeat.errors import NonFiniteLoss, TrainingError, WeightSyncError
from offbeat.seeds import derive
from offbeat.train.batch import TrainBatch
from offbeat.train.engine import TrainEngine
from offbeat.train.pack import pack, split_minibatches
from offbeat.train.report import StepSums
from offbeat.types import PolicyVersion, StepReport, TrainSample

LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""How far recomputed log-probs of lag-0 tokens may be from the recorded ones, nats, before the run stops."""


class PPOActor:
    """PPO with group-normalized rewards (GRPO and its relatives), decoupled or not.

    Args:
        engine: the model to train.
        config: objective and batching.
        temperature: of the rollouts; log-probs are of ``logits / temperature``.
        max_new_tokens: of the rollouts; denominator of the ``constant`` aggregation.
        seed: of the run; orders the minibatches.
        compute_dtype: sets the tolerance of the check against recorded log-probs.
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: ActorConfig,
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._engine = engine
        self._config = config
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._tolerance = LOGP_TOLERANCE[compute_dtype]
        self._last: StepReport | None = None
        self.version = PolicyVersion(0)

    def update(self, samples: Sequence[TrainSample], produce: PolicyVersion) -> StepReport:
        """Train on ``samples`` and produce version ``produce``; the same call again returns the stored report.

        Raises:
            WeightSyncError: ``produce`` is not the next version.
            TrainingError: nothing to train on, or a row longer than the token budget.
            NonFiniteLoss: a log-prob, the loss or the gradient is NaN or infinite.
        """
        if self._last is not None and produce == self.version:
            return self._last
        if produce != self.version + 1:
            raise WeightSyncError(
                f"asked to produce version {produce}, but the trainer holds version {self.version}"
            )
        started = time.monotonic()
        batch = TrainBatch.build(samples, self._engine.device)
        advantage = self._advantages(batch)
        prox = self._recomputed(batch) if self._needs_pass() else None
        sums = StepSums()
        for rows in split_minibatches(
            batch.group_ids.tolist(),
            self._minibatches(batch),
            derive(self._seed, "minibatch", produce),
        ):
            self._optimizer_step(batch, rows, advantage, prox, produce, sums)
        self.version = produce
        self._last = StepReport(
            version=produce,
            tokens=sum(len(t) for t in batch.tokens),
            rows=batch.rows,
            started=started,
            ended=time.monotonic(),
            metrics=sums.metrics(batch, produce, learning_rate=self._engine.learning_rate),
        )
        return self._last

    def _minibatches(self, batch: TrainBatch) -> int:
        # The last batch of a run may be short of groups.
        return min(self._config.ppo_n_minibatches, len(set(batch.group_ids.tolist())))

    def _advantages(self, batch: TrainBatch) -> Tensor:
        """[P] float32, over the whole batch, before any cut."""
        c = self._config
        rewards = shape_rewards(
            batch.rewards, bias=c.reward_bias, scaling=c.reward_scaling, clip=c.reward_clip
        )
        rewards = _normalize(rewards, batch.group_ids, c.reward_norm)
        if c.mask_no_eos_with_zero:
            rewards = zero_truncated(rewards, batch.truncated)
        everything = torch.ones_like(batch.seq_id, dtype=torch.bool)
        advantage = grpo_advantages(rewards, everything, batch.seq_id)
        if c.adv_norm is not None:
            advantage = _normalize(advantage, batch.group_ids[batch.seq_id], c.adv_norm)
        return advantage

    def _needs_pass(self) -> bool:
        """Whether proximal log-probs need a forward pass of their own.

        With one optimizer step per update the training pass runs under the weights at the start of the step: its own
        log-probs, detached, are the proximal ones.
        """
        return self._config.should_compute_prox_logp() and self._config.ppo_n_minibatches > 1

    @torch.no_grad()
    def _recomputed(self, batch: TrainBatch) -> Tensor:
        """Log-probs [P] of the whole batch under the weights at the start of the step."""
        out = torch.empty_like(batch.behave_logp)
        for rows in self._micro_batches(batch):
            logp, _ = self._engine.logprobs(batch.select(rows), self._temperature)
            out[batch.places(rows)] = logp
        return out

    def _micro_batches(self, batch: TrainBatch) -> list[list[int]]:
        return pack([len(t) for t in batch.tokens], self._config.max_tokens_per_mb)

    def _optimizer_step(
        self,
        batch: TrainBatch,
        rows: list[int],
        advantage: Tensor,
        prox: Tensor | None,
        produce: PolicyVersion,
        sums: StepSums,
    ) -> None:
        """One minibatch: accumulate over its micro-batches, then step."""
        minibatch = batch.select(rows)
        places = batch.places(rows)
        advantage = advantage[places]
        prox = prox[places] if prox is not None else None
        kept = ~minibatch.truncated if self._config.exclude_truncated else None
        for micro_rows in self._micro_batches(minibatch):
            micro = minibatch.select(micro_rows)
            at = minibatch.places(micro_rows)
            logp, entropy = self._engine.logprobs(micro, self._temperature)
            p = self._proximal(
                micro, logp.detach(), prox[at] if prox is not None else None, produce
            )
            mask = torch.ones_like(micro.seq_id, dtype=torch.bool)
            if kept is not None:
                mask = kept[micro_rows][micro.seq_id]
            terms = self._loss(minibatch, micro, logp, p, advantage[at], mask)
            loss = terms.loss
            if self._config.entropy_coef:
                loss = loss + entropy_bonus(
                    entropy, mask, self._config.entropy_coef, minibatch.policy_tokens
                )
            self._check_finite(loss, micro)
            # Recorded against recomputed is only meaningful before the weights moved.
            fresh = sums.optimizer_steps == 0
            sums.add(
                micro, terms, logp.detach(), p, entropy.detach(), loss.detach(), produce, fresh
            )
            self._engine.backward(loss)
        self._check_recorded(sums, produce)
        sums.stepped(self._engine.optimizer_step())

    def _proximal(
        self, micro: TrainBatch, logp: Tensor, recomputed: Tensor | None, produce: PolicyVersion
    ) -> Tensor:
        c = self._config
        if c.should_compute_prox_logp():
            return recomputed if recomputed is not None else logp
        if c.use_decoupled_loss and c.prox_logp_method is ProxLogpMethod.LOGLINEAR:
            return loglinear(micro.behave_logp, logp, micro.versions, produce)
        return micro.behave_logp

    def _loss(
        self,
        minibatch: TrainBatch,
        micro: TrainBatch,
        logp: Tensor,
        prox: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> LossTerms:
        c = self._config
        return policy_loss(
            logp=logp,
            prox_logp=prox,
            behave_logp=micro.behave_logp,
            advantage=advantage,
            mask=mask,
            seq_id=micro.seq_id,
            level="token",
            eps_clip=c.eps_clip,
            eps_clip_higher=c.eps_clip_higher,
            c_clip=c.c_clip,
            behavior_mode=c.behave_imp_weight_mode.value,
            behavior_cap=c.behave_imp_weight_cap,
            behavior_floor=c.behave_imp_weight_floor,
            aggregation=c.loss_aggregation.value,
            denominators=Denominators(
                tokens=minibatch.policy_tokens,
                rows=minibatch.rows,
                constant_tokens=minibatch.rows * self._max_new_tokens,
                row_tokens=micro.row_tokens,
            ),
        )

    def _check_finite(self, loss: Tensor, micro: TrainBatch) -> None:
        if not bool(torch.isfinite(loss)):
            groups = sorted(set(micro.group_ids.tolist()))
            raise NonFiniteLoss(
                f"the loss is {float(loss)} while producing version {self.version + 1}, in the rows of groups "
                f"{groups[:8]}; the weights were left as they are"
            )

    def _check_recorded(self, sums: StepSums, produce: PolicyVersion) -> None:
        """Engine and trainer must agree on tokens of the present version, or nothing else means anything."""
        if sums.logp_error > self._tolerance:
            raise TrainingError(
                f"log-probs recorded by the generator and recomputed by the trainer differ by {sums.logp_error:.2e} nats "
                f"on tokens of version {produce - 1} (tolerance {self._tolerance:.0e}): the two do not hold the same "
                "model or do not compute the same distribution"
            )


def _normalize(values: Tensor, groups: Tensor, config: NormConfig) -> Tensor:
    return normalize(
        values,
        groups,
        mean_level=config.mean_level.value,
        leave_one_out=config.mean_leave_one_out,
        std_level=config.std_level.value,
        unbiased=config.std_unbiased,
        eps=config.eps,
    )
