"""AdamW and its learning-rate schedule from the actor's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat.config import OptimizerConfig

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; weight decay on matrices, not on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LRScheduler:
    """Constant, linear or cosine over ``total_steps`` optimizer steps.

    The configured share of them is a linear warm-up from 0: the first step is taken with rate 0
    when there is one.
    """
    from transformers import get_scheduler

    warmup = round(config.warmup_steps_proportion * total_steps)
    kind = str(config.lr_scheduler_type)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler: LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=max(total_steps, 1)
    )
    return scheduler
