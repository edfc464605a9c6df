"""A training engine: forward, backward and optimizer step of one model; knows no objective.

Owns the model in the trainer process, its optimizer and its schedule. ``PPOActor`` says what the
loss is. The Protocol is the seam for sharded engines; ``SingleDeviceEngine`` is the one that
exists.

Shapes: P policy tokens of the rows given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from offbeat.algo.logprobs import chunked_logprobs
from offbeat.config import OptimizerConfig
from offbeat.errors import CheckpointError, NonFiniteLoss
from offbeat.model.attention import TOKEN_ROWS, PackedContext, round_up
from offbeat.model.linear import output_head
from offbeat.model.load import hidden_states
from offbeat.train.batch import TrainBatch
from offbeat.train.optim import (
    build_optimizer,
    build_scheduler,
    fast_forward,
    moments,
    restore_moments,
)
from offbeat.train.packed import PackedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainEngine(Protocol):
    """What an objective needs from the model it trains."""

    @property
    def device(self) -> torch.device:
        """Where batches must lie."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    def logprobs(self, rows: TrainBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the policy's tokens, [P] float32 nats each.

        They carry a gradient unless under ``no_grad``.
        """

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to the accumulated one."""

    def discard_gradient(self) -> None:
        """Forget the accumulated gradient."""

    def optimizer_step(self) -> float:
        """Clip, step, advance the schedule, clear the gradient; returns the norm before clipping.

        Raises NonFiniteLoss, the weights untouched, when the gradient is not finite.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors; a tied weight comes once."""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that training changes, by name: weights, then the optimizer's."""

    def restore(self, state: Mapping[str, Tensor], optimizer_steps: int) -> None:
        """Go on from ``state`` after so many optimizer steps.

        Raises CheckpointError when it is not the state of this model.
        """

    @property
    def optimizer_steps(self) -> int:
        """Taken so far."""

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""


class SingleDeviceEngine:
    """The whole model on one device, float32 master weights.

    Args:
        model: float32, as loaded by ``model.load.load_model``.
        compute_dtype: of matrix products; float32, or bfloat16 through autocast.
        optimizer: its configuration. total_steps: optimizer steps of the run, for the schedule.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype,
        optimizer: OptimizerConfig,
        total_steps: int,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._model = model
        self._compute_dtype = compute_dtype
        self._clip = optimizer.gradient_clipping
        self._optimizer = build_optimizer(model, optimizer)
        self._scheduler = build_scheduler(self._optimizer, optimizer, total_steps)
        if gradient_checkpointing:
            # Transformers recomputes activations only in training mode; our models have no dropout.
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().weight.shape[0])

    @property
    def learning_rate(self) -> float:
        return float(self._scheduler.get_last_lr()[0])

    def logprobs(self, rows: TrainBatch, temperature: float) -> tuple[Tensor, Tensor]:
        packed = PackedRows.build(rows)
        layout, count = packed.layout, len(packed.states)
        padding = (0, round_up(count, TOKEN_ROWS) - count)
        states = torch.nn.functional.pad(packed.states, padding)
        targets = torch.nn.functional.pad(packed.targets, padding)
        autocast = self._compute_dtype is not torch.float32
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=autocast):
            ctx = PackedContext(layout)
            hidden = hidden_states(self._model, packed.tokens, layout.positions, ctx)
        predicting = hidden.index_select(0, states).to(self._compute_dtype)
        head = output_head(self._model)
        logp, entropy = chunked_logprobs(
            predicting, head.weight, head.bias, targets, temperature, linear=head.linear
        )
        return logp[:count], entropy[:count]

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def discard_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip))
        if not math.isfinite(norm):
            raise NonFiniteLoss(f"the gradient norm is {norm}; the weights were left as they are")
        self._optimizer.step()
        self._scheduler.step()
        self.discard_gradient()
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        named = dict(self._model.named_parameters())
        for name, parameter in named.items():
            yield f"{_WEIGHTS}{name}", parameter
        for name, moment in moments(self._optimizer, named):
            yield f"{_OPTIMIZER}{name}", moment

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], optimizer_steps: int) -> None:
        named = dict(self._model.named_parameters())
        weights = _below(_WEIGHTS, state)
        _require_same(named, weights)
        for name, parameter in named.items():
            parameter.copy_(weights[name])
        restore_moments(self._optimizer, named, _below(_OPTIMIZER, state))
        fast_forward(self._scheduler, optimizer_steps)

    @property
    def optimizer_steps(self) -> int:
        return int(self._scheduler.last_epoch)


_WEIGHTS = "weights/"
_OPTIMIZER = "optimizer/"


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _require_same(named: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name in sorted(named.keys() ^ weights.keys()):
        where = "missing in the snapshot" if name in named else "unknown to the model"
        raise CheckpointError(f"the snapshot is not one of this model: {name!r} is {where}")
    for name, parameter in named.items():
        if parameter.shape != weights[name].shape:
            raise CheckpointError(
                f"the snapshot is not one of this model: {name!r} has shape "
                f"{tuple(weights[name].shape)} there, {tuple(parameter.shape)} here"
            )
