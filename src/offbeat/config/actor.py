"""The actor: objective, normalization, optimizer and batch sizes of the trainer.

Symbols: ℓ is the log-probability under the current weights, o under those that sampled the token
(behavior), p the proximal one, ρ = exp(p - o) the behavior weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from offbeat.config.schema import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Problem,
    Range,
    Section,
    preset,
    store,
)

AboveOne = Annotated[float, Range(gt=1)]
BelowOne = Annotated[float, Range(ge=0, lt=1)]
UpToOne = Annotated[float, Range(gt=0, le=1)]
Finite = Annotated[float, Range()]

DEFAULT_BEHAVE_CAP = 5.0


class LRSchedule(StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class LossAggregation(StrEnum):
    """Denominator: policy tokens; mean over rows of row means; rows times ``max_new_tokens``."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT = "constant"


class ProxLogpMethod(StrEnum):
    """Where the proximal log-probability comes from."""

    RECOMPUTE = "recompute"
    LOGLINEAR = "loglinear"
    METRICS = "metrics"


class BehaveImpWeightMode(StrEnum):
    """What happens to the weight ρ = exp(p - o) above its cap."""

    DISABLED = "disabled"
    TOKEN_TRUNCATE = "token_truncate"
    TOKEN_MASK = "token_mask"
    SEQUENCE_TRUNCATE = "sequence_truncate"
    SEQUENCE_MASK = "sequence_mask"

    @property
    def masks(self) -> bool:
        """Whether the mode drops what is outside its bounds, instead of cutting the weight."""
        return self in (self.TOKEN_MASK, self.SEQUENCE_MASK)


class NormLevel(StrEnum):
    """Over what a mean or a standard deviation is taken."""

    BATCH = "batch"
    GROUP = "group"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig(Section):
    """x ← (x - mean) / (std + eps), each over a batch, a group or not at all.

    Keys left out of ``actor.reward_norm`` come from ``algorithm``, those left out of
    ``actor.adv_norm`` from the defaults here.
    """

    mean_level: NormLevel = field(default_factory=preset(NormLevel.BATCH))
    """Over what the mean is taken; none subtracts nothing."""

    mean_leave_one_out: bool = field(default_factory=preset(False))
    """Leave the value itself out of its mean."""

    std_level: NormLevel = field(default_factory=preset(NormLevel.BATCH))
    """Over what the standard deviation is taken; none divides by nothing."""

    std_unbiased: bool = field(default_factory=preset(True))
    """Divide by n - 1."""

    eps: PositiveFloat = 1e-5
    """Added to the standard deviation."""

    @property
    def uses_group(self) -> bool:
        """Whether mean or standard deviation compares the siblings of one prompt."""
        return NormLevel.GROUP in (self.mean_level, self.std_level)

    def _contradictions(self) -> Iterator[Problem]:
        if self.mean_leave_one_out and self.mean_level is NormLevel.NONE:
            yield Problem(
                path="mean_leave_one_out",
                text="true has no effect: mean_level is none; set mean_level to batch or group",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    beta1: BelowOne = 0.9
    """Decay of the first moment."""

    beta2: BelowOne = 0.999
    """Decay of the second moment."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    lr_scheduler_type: LRSchedule = LRSchedule.CONSTANT
    """Shape after the warm-up."""

    warmup_steps_proportion: Fraction = 0.0
    """Share of the run's steps in which the learning rate rises from 0."""

    gradient_clipping: PositiveFloat = 1.0
    """Largest gradient norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig(Section):
    """What one update computes.

    Left out, ``prox_logp_method``, ``behave_imp_weight_mode`` and ``behave_imp_weight_cap`` follow
    ``use_decoupled_loss``: recompute, token_mask and 5.0 when true, else null, disabled and null.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule."""

    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps per batch; whole groups go to each."""

    max_tokens_per_mb: PositiveInt = 16384
    """Token budget of one packed micro-batch; no effect on gradients. Tokens that siblings share
    count once.
    """

    prefix_sharing: bool = True
    """Compute the tokens that all siblings of a group begin with (the prompt) once per micro-batch;
    no effect on gradients.
    """

    eps_clip: UpToOne = 0.2
    """Ratios below 1 - eps_clip are clipped."""

    eps_clip_higher: PositiveFloat | None = None
    """Ratios above 1 + eps_clip_higher are clipped; null: eps_clip."""

    c_clip: AboveOne | None = None
    """Dual clip c > 1 for negative advantages; null is off."""

    loss_aggregation: LossAggregation = field(default_factory=preset(LossAggregation.SEQUENCE_MEAN))
    """Denominator of the loss; by ``algorithm`` when left out."""

    use_decoupled_loss: bool = field(default_factory=preset(False))
    """Clip around the proximal policy and weight by behavior; by ``mode`` when left out."""

    recompute_logprob: bool = False
    """Without decoupled loss: clip around recomputed log-probabilities, not the recorded ones."""

    prox_logp_method: ProxLogpMethod | None = field(default_factory=preset(None))
    """Source of p with decoupled loss; null without."""

    behave_imp_weight_mode: BehaveImpWeightMode = field(
        default_factory=preset(BehaveImpWeightMode.DISABLED)
    )
    """Use of the behavior weight ρ with decoupled loss; disabled without."""

    behave_imp_weight_cap: AboveOne | None = field(default_factory=preset(None))
    """Cap of ρ, > 1; null when the mode is disabled."""

    behave_imp_weight_floor: UpToOne | None = None
    """Mask modes: ρ below it is masked too; null is off."""

    reward_bias: Finite = 0.0
    """Added to every reward, before scaling."""

    reward_scaling: PositiveFloat = 1.0
    """Multiplies every reward."""

    reward_clip: PositiveFloat | None = None
    """Rewards are cut to ± this, after scaling; null is off."""

    reward_norm: NormConfig = field(default_factory=NormConfig)
    """From rewards to advantages; by ``algorithm`` where left out."""

    adv_norm: NormConfig | None = None
    """Normalization of advantages over policy tokens; null is off."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    mask_no_eos_with_zero: bool = False
    """An answer cut by its length gets reward 0."""

    exclude_truncated: bool = False
    """An answer cut by its length leaves the loss."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""

    threads: PositiveInt | None = None
    """CPU threads of the trainer; null: with ``max_staleness`` 0 all cores, else a share of them
    (cores / (replicas + 1)); 1 below 50 MB of weights."""

    def should_compute_prox_logp(self) -> bool:
        """Whether a step needs a forward pass for p before its first minibatch.

        (use_decoupled_loss and method ≠ loglinear)
        or (not use_decoupled_loss and recompute_logprob)
        """
        if self.use_decoupled_loss:
            return self.prox_logp_method is not ProxLogpMethod.LOGLINEAR
        return self.recompute_logprob

    def _settle(self) -> None:
        if not self.use_decoupled_loss:
            return
        if "prox_logp_method" not in self.given:
            store(self, "prox_logp_method", ProxLogpMethod.RECOMPUTE)
        if "behave_imp_weight_mode" not in self.given:
            store(self, "behave_imp_weight_mode", BehaveImpWeightMode.TOKEN_MASK)
        weighted = self.behave_imp_weight_mode is not BehaveImpWeightMode.DISABLED
        if "behave_imp_weight_cap" not in self.given and weighted:
            store(self, "behave_imp_weight_cap", DEFAULT_BEHAVE_CAP)

    def _contradictions(self) -> Iterator[Problem]:
        yield from self._clip_problems()
        # When it is not given, ``mode`` still decides it: RunConfig then builds the section again.
        if "use_decoupled_loss" in self.given:
            yield from self._decoupling_problems()
            yield from self._weight_problems()
        if self.mask_no_eos_with_zero and self.exclude_truncated:
            yield Problem(
                path="mask_no_eos_with_zero",
                text="true has no effect: exclude_truncated takes the same rows out; set one",
            )

    def _clip_problems(self) -> Iterator[Problem]:
        higher = self.eps_clip_higher
        if higher is not None and higher < self.eps_clip:
            yield Problem(
                path="eps_clip_higher",
                text=f"{higher} is not >= eps_clip ({self.eps_clip}); raise it or leave it out",
            )

    def _decoupling_problems(self) -> Iterator[Problem]:
        if not self.use_decoupled_loss and self.prox_logp_method is not None:
            yield Problem(
                path="prox_logp_method",
                text=f"{self.prox_logp_method} has no effect: use_decoupled_loss is false; "
                "set it to true or leave prox_logp_method out",
            )
        approximated = self.prox_logp_method is ProxLogpMethod.LOGLINEAR
        if self.use_decoupled_loss and approximated and self.recompute_logprob:
            yield Problem(
                path="recompute_logprob",
                text="true contradicts prox_logp_method loglinear, which skips that forward pass; "
                "set recompute_logprob to false or prox_logp_method to recompute",
            )

    def _weight_problems(self) -> Iterator[Problem]:
        mode, cap, floor = (
            self.behave_imp_weight_mode,
            self.behave_imp_weight_cap,
            self.behave_imp_weight_floor,
        )
        disabled = mode is BehaveImpWeightMode.DISABLED
        if not disabled and not self.use_decoupled_loss:
            yield Problem(
                path="behave_imp_weight_mode",
                text=f"{mode} has no effect: use_decoupled_loss is false; "
                "set it to true or behave_imp_weight_mode to disabled",
            )
        if disabled and cap is not None:
            yield Problem(
                path="behave_imp_weight_cap",
                text=f"{cap} has no effect: behave_imp_weight_mode is disabled; "
                "choose a mode (with use_decoupled_loss: true) or leave the cap out",
            )
        if floor is not None and not mode.masks:
            yield Problem(
                path="behave_imp_weight_floor",
                text=f"{floor} has no effect: behave_imp_weight_mode is {mode}; "
                "choose token_mask or sequence_mask, or leave the floor out",
            )


PPOActorConfig = ActorConfig
"""AReaL's name of the same class."""
