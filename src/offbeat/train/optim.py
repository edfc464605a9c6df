"""AdamW and its learning-rate schedule from the actor's configuration, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from offbeat.config import OptimizerConfig

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR


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
) -> LambdaLR:
    """Constant, linear or cosine over ``total_steps`` optimizer steps.

    The configured share of them is a linear warm-up from 0: the first step is taken with rate 0
    when there is one.
    """
    from transformers import get_scheduler

    warmup = round(config.warmup_steps_proportion * total_steps)
    kind = str(config.lr_scheduler_type)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=max(total_steps, 1)
    )
    return scheduler


def moments(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's tensors as ``<kind>/<parameter>``; none before a parameter's first step."""
    for name, parameter in named.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{kind}/{name}", value


def restore_moments(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, torch.nn.Parameter],
    values: Mapping[str, torch.Tensor],
) -> None:
    """Take over what ``moments`` gave. Raises KeyError for a parameter that is not there."""
    optimizer.state.clear()
    for key, value in values.items():
        kind, _, name = key.partition("/")
        parameter = named[name]
        optimizer.state[parameter][kind] = value.to(parameter.device, copy=True)


def fast_forward(scheduler: LambdaLR, steps: int) -> None:
    """Continue the schedule as it is after ``steps`` optimizer steps: a rate is a function of them,
    so that a changed schedule holds from here on.
    """
    rates = [
        float(base) * scale(steps)
        for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    place = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    scheduler.load_state_dict({**scheduler.state_dict(), **place})
