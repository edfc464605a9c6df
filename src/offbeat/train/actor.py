"""The actor: one update from a batch of rollouts to the next policy version.

Consumes ``TrainSample``s; produces ``StepReport``. Owns the order of things (advantages over the
whole batch, proximal log-probs under the weights at the start of the step, minibatches of whole
groups, micro-batches by token budget) and the version. The formulas are in ``algo/``, the model in
a ``TrainEngine``.

An update that raises before its first optimizer step leaves weights and version as they were. One
that raises later leaves weights between two versions: from then on the actor refuses to train and
to name a version, so that such weights are never published (``whole_version``).

Shapes: R rows, P policy tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.algo.advantages import grpo_advantages, shape_rewards, zero_truncated
from offbeat.algo.entropy import entropy_bonus
from offbeat.algo.normalize import normalize
from offbeat.algo.proximal import ApproximationErrors, approximation_errors, loglinear
from offbeat.algo.surrogate import Denominators, LossTerms, policy_loss
from offbeat.config import ActorConfig, NormConfig, NormLevel, ProxLogpMethod
from offbeat.errors import NonFiniteLoss, TrainingError, WeightSyncError
from offbeat.seeds import derive
from offbeat.train.batch import TrainBatch
from offbeat.train.engine import TrainEngine
from offbeat.train.pack import pack_siblings, split_minibatches
from offbeat.train.report import StepSums
from offbeat.types import PolicyVersion, StepReport, TrainSample

LOGP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""How far recomputed log-probs of lag-0 tokens may be from the recorded ones, nats, before the run
stops."""

_SMALLER = "; have the reward function return smaller ones"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """What the minibatches of one update share.

    Per policy token of ``batch``, [P]: ``advantage`` float32, ``in_loss`` bool, and ``prox``
    float32, the recomputed log-probs, or None when no pass of its own computes them.
    """

    batch: TrainBatch
    produce: PolicyVersion
    advantage: Tensor
    in_loss: Tensor
    prox: Tensor | None
    sums: StepSums


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Unfiltered size of one minibatch: the denominators of its loss."""

    tokens: int
    rows: int


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
        self._torn = False
        self.version = PolicyVersion(0)

    def whole_version(self) -> PolicyVersion:
        """The version of the weights; raises TrainingError when they are between two versions."""
        if self._torn:
            raise TrainingError(
                f"the update that was to produce version {self.version + 1} failed between two "
                "optimizer steps: the trainer's weights are of no version and can be neither "
                "trained on nor published; continue from a saved version"
            )
        return self.version

    def resume(self, version: PolicyVersion) -> None:
        """The engine holds the restored weights of ``version``: the next update follows it."""
        self.version = version

    def update(
        self,
        samples: Sequence[TrainSample],
        produce: PolicyVersion,
        *,
        before_step: Callable[[], None] = lambda: None,
    ) -> StepReport:
        """Train on ``samples`` and produce version ``produce``.

        The same call again returns the stored report. ``before_step`` is called before each
        optimizer step: until it returns, what training changes may be read by another thread.

        Raises:
            WeightSyncError: ``produce`` is not the next version, or a token is newer than the
                weights.
            TrainingError: nothing to train on, a token that the model does not know, a row longer
                than the token budget, recorded log-probs that are not this model's, or an earlier
                update that failed half-way.
            NonFiniteLoss: a reward, advantage, log-prob, loss or gradient is NaN or infinite;
                names the groups.
        """
        held = self.whole_version()
        if self._last is not None and produce == held:
            return self._last
        if produce != held + 1:
            raise WeightSyncError(
                f"asked to produce version {produce}, but the trainer holds version {held}"
            )
        started = time.monotonic()
        # What an update that raised before its optimizer step has left there.
        self._engine.discard_gradient()
        step, minibatches = self._prepare(samples, produce)
        waited = sum(self._minibatch(step, rows, before_step) for rows in minibatches)
        self.version, self._torn = produce, False
        self._last = StepReport(
            version=produce,
            tokens=sum(len(t) for t in step.batch.tokens),
            rows=step.batch.rows,
            started=started,
            ended=time.monotonic(),
            metrics=step.sums.metrics(step.batch, produce),
            advantages=_row_means(step.batch, step.advantage),
            staging_seconds=waited,
        )
        return self._last

    # Before the first minibatch

    def _prepare(
        self, samples: Sequence[TrainSample], produce: PolicyVersion
    ) -> tuple[_Step, list[list[int]]]:
        """Everything that can be wrong with a batch is found here, before the weights change.

        Returns the step and the rows of its minibatches, those without a token in the loss left
        out: they have no gradient.
        """
        batch = TrainBatch.build(
            samples, self._engine.device, share_prefixes=self._config.prefix_sharing
        )
        _check_versions(batch, produce)
        _check_tokens(samples, self._engine.vocab_size)
        rewards = [s.reward for s in samples]
        given = f"; the rewards go from {min(rewards):g} to {max(rewards):g}"
        limit = f", and float32 holds -3.4e38 to 3.4e38{_SMALLER}"
        _require_finite(batch.rewards, batch.group_ids, "reward", produce, given + limit)
        advantage = self._advantages(batch)
        clip = f"{_SMALLER}, or bound them with actor.reward_clip"
        _require_finite(
            advantage, batch.group_ids[batch.seq_id], "advantage", produce, given + clip
        )
        in_loss = self._in_loss(batch)
        groups = batch.group_ids.tolist()
        # The last batch of a run may be short of groups.
        n = min(self._config.ppo_n_minibatches, len(set(groups)))
        minibatches = split_minibatches(groups, n, derive(self._seed, "minibatch", produce))
        usable = (in_loss & torch.isfinite(batch.behave_logp)).cpu()
        trained = [rows for rows in minibatches if bool(usable[batch.places(rows).cpu()].any())]
        # The whole batch is cut once more than needed: a row too long must not be found late.
        micro_batches = self._micro_batches(batch, range(batch.rows))
        # With one optimizer step the training pass itself runs under the weights at the start of
        # the step: its own log-probs, detached, are the proximal ones.
        needs_pass = self._config.should_compute_prox_logp() and len(trained) > 1
        step = _Step(
            batch=batch,
            produce=produce,
            advantage=advantage,
            in_loss=in_loss,
            prox=self._recomputed(batch, micro_batches, produce) if needs_pass else None,
            sums=StepSums(),
        )
        if step.prox is not None:
            step.sums.compare(batch, step.prox, PolicyVersion(produce - 1))
        return step, trained

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

    def _in_loss(self, batch: TrainBatch) -> Tensor:
        """[P] bool, tokens that count; raises TrainingError when there is none."""
        in_loss = torch.ones_like(batch.seq_id, dtype=torch.bool)
        if self._config.exclude_truncated:
            in_loss = ~batch.truncated[batch.seq_id]
            if not bool(in_loss.any()):
                raise TrainingError(
                    f"the batch of {batch.rows} rollouts has nothing to train on: every answer was "
                    "cut by its length and actor.exclude_truncated leaves those out; raise "
                    "gconfig.max_new_tokens"
                )
        if not bool((in_loss & torch.isfinite(batch.behave_logp)).any()):
            raise TrainingError(
                f"the batch of {batch.rows} rollouts has nothing to train on: no recorded log-prob "
                "is finite"
            )
        return in_loss

    @torch.no_grad()
    def _recomputed(
        self, batch: TrainBatch, micro_batches: list[list[int]], produce: PolicyVersion
    ) -> Tensor:
        """Log-probs [P] of the whole batch under the weights at the start of the step."""
        out = torch.empty_like(batch.behave_logp)
        for rows in micro_batches:
            logp, _ = self._engine.logprobs(batch.select(rows), self._temperature)
            out[batch.places(rows)] = logp
        _require_finite(out, batch.group_ids[batch.seq_id], "log-prob", produce)
        return out

    def _micro_batches(self, batch: TrainBatch, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` of ``batch`` cut by the token budget; those the policy wrote nothing in are left
        out.
        """
        rows = [r for r in rows if len(batch.targets[r])]
        groups, shared = batch.groups.tolist(), batch.shared.tolist()
        parts = pack_siblings(
            [len(batch.tokens[r]) for r in rows],
            [groups[r] for r in rows],
            [shared[r] for r in rows],
            self._config.max_tokens_per_mb,
        )
        return [[rows[i] for i in part] for part in parts]

    # Minibatches

    def _minibatch(self, step: _Step, rows: list[int], before_step: Callable[[], None]) -> float:
        """Accumulate over the micro-batches of ``rows``, then take one optimizer step; returns the
        seconds that ``before_step`` took.
        """
        tokens = int(step.batch.row_tokens[torch.tensor(rows)].sum())
        counts = _Counts(tokens=tokens, rows=len(rows))
        for micro_rows in self._micro_batches(step.batch, rows):
            self._micro_batch(step, micro_rows, counts)
        self._check_recorded(step)
        asked = time.monotonic()
        before_step()
        waited = time.monotonic() - asked
        rate, torn = self._engine.learning_rate, self._torn
        self._torn = True
        try:
            norm = self._engine.optimizer_step()
        except NonFiniteLoss as exc:
            self._torn = torn
            groups = sorted(set(step.batch.group_ids[torch.tensor(rows)].tolist()))
            raise NonFiniteLoss(
                f"{exc}, producing version {step.produce} from groups {_few(groups)}"
            ) from exc
        step.sums.stepped(norm, rate)
        return waited

    def _micro_batch(self, step: _Step, rows: list[int], counts: _Counts) -> None:
        """Forward and backward of one micro-batch."""
        micro, at = step.batch.select(rows), step.batch.places(rows)
        logp, entropy = self._engine.logprobs(micro, self._temperature)
        now = logp.detach()
        _require_finite(now, micro.group_ids[micro.seq_id], "log-prob", step.produce)
        mask = step.in_loss[at]
        prox = self._proximal(micro, now, step.prox[at] if step.prox is not None else None, step)
        if self._config.prox_logp_method is ProxLogpMethod.METRICS:
            step.sums.add_prox_errors(_prox_errors(micro, now, prox, mask, step.produce))
        terms = self._loss(micro, logp, prox, step.advantage[at], mask, counts)
        loss = terms.loss
        if self._config.entropy_coef:
            loss = loss + entropy_bonus(entropy, mask, self._config.entropy_coef, counts.tokens)
        value = float(loss.detach())
        if not math.isfinite(value):
            groups = sorted(set(micro.group_ids.tolist()))
            raise NonFiniteLoss(
                f"the loss is {value}, producing version {step.produce} from groups {_few(groups)}"
            )
        step.sums.add(
            micro,
            terms,
            logp=now,
            prox=prox,
            entropy=entropy.detach(),
            mask=mask,
            loss=value,
            start=PolicyVersion(step.produce - 1),
        )
        self._engine.backward(loss)

    def _proximal(
        self, micro: TrainBatch, logp: Tensor, recomputed: Tensor | None, step: _Step
    ) -> Tensor:
        """[P] proximal log-probs of a micro-batch; ``logp`` [P] are the present ones, detached."""
        c = self._config
        if c.use_decoupled_loss and c.prox_logp_method is ProxLogpMethod.LOGLINEAR:
            return loglinear(micro.behave_logp, logp, micro.versions, step.produce)
        if not c.should_compute_prox_logp():
            return micro.behave_logp
        return recomputed if recomputed is not None else logp

    def _loss(
        self,
        micro: TrainBatch,
        logp: Tensor,
        prox: Tensor,
        advantage: Tensor,
        mask: Tensor,
        counts: _Counts,
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
                tokens=counts.tokens,
                rows=counts.rows,
                constant_tokens=counts.rows * self._max_new_tokens,
                row_tokens=micro.row_tokens,
            ),
        )

    def _check_recorded(self, step: _Step) -> None:
        """Engine and trainer must agree on tokens of the present version.

        Otherwise nothing that follows means anything. All rows are compared where a pass of its own
        recomputes them, else those of the first minibatch.
        """
        error = step.sums.logp_error
        if error is not None and error > self._tolerance:
            raise TrainingError(
                f"log-probs recorded by the generator and recomputed by the trainer differ by "
                f"{error:.2e} nats on tokens of version {step.produce - 1} (tolerance "
                f"{self._tolerance:.0e}): the two do not hold the same model or do not compute the "
                "same distribution; the weights were left as they are"
            )


def _row_means(batch: TrainBatch, values: Tensor) -> tuple[float, ...]:
    """Mean of ``values`` [P] over the tokens of each row; 0 in a row without tokens."""
    sums = torch.zeros_like(batch.rewards).index_add_(0, batch.seq_id, values)
    return tuple((sums / batch.row_tokens.clamp(min=1)).tolist())


def _prox_errors(
    micro: TrainBatch, logp: Tensor, prox: Tensor, mask: Tensor, produce: PolicyVersion
) -> ApproximationErrors:
    return approximation_errors(
        logp=logp,
        behave_logp=micro.behave_logp,
        recomputed_logp=prox,
        versions=micro.versions,
        produced_version=produce,
        mask=mask,
    )


def _check_tokens(samples: Sequence[TrainSample], vocab_size: int) -> None:
    """The model must know every token: on an accelerator a look-up of another kills the process."""
    for sample in samples:
        least, greatest = int(sample.tokens.min()), int(sample.tokens.max())
        if least < 0 or greatest >= vocab_size:
            raise TrainingError(
                f"group {sample.group_id} has token ids from {least} to {greatest}, and the model "
                f"knows 0 to {vocab_size - 1}: it was not this model that wrote them"
            )


def _check_versions(batch: TrainBatch, produce: PolicyVersion) -> None:
    """Every policy token must carry the version that wrote it, which cannot be a future one."""
    oldest, newest = int(batch.versions.min()), int(batch.versions.max())
    if oldest < 0:
        raise TrainingError(f"a policy token carries version {oldest}: it was never stamped")
    if newest >= produce:
        raise WeightSyncError(
            f"a policy token carries version {newest}, but the trainer holds version {produce - 1}"
        )


def _require_finite(
    values: Tensor, groups: Tensor, what: str, produce: PolicyVersion, way_out: str = ""
) -> None:
    """Raise NonFiniteLoss unless all ``values`` are finite; ``groups`` are their group ids."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        raise NonFiniteLoss(
            f"{int(bad.sum())} of {len(values)} values of {what} are not finite, producing version "
            f"{produce}: groups {_few(sorted(set(groups[bad].tolist())))}{way_out}"
        )


def _few(groups: list[int]) -> str:
    more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
    return ", ".join(str(g) for g in groups[:8]) + more


def _normalize(values: Tensor, groups: Tensor, config: NormConfig) -> Tensor:
    scaled = config.std_level is not NormLevel.NONE
    return normalize(
        values,
        groups,
        mean_level=config.mean_level.value,
        leave_one_out=config.mean_leave_one_out,
        std_level=config.std_level.value,
        unbiased=config.std_unbiased and scaled,
        eps=config.eps,
    )
