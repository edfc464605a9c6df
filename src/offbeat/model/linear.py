"""Linear layers through oneDNN's matrix product, the same bits in the engine and in training.

Owns: the two private operations of torch that reach oneDNN in float32, the check that they can be
relied on, and the layers built on them. Knows no engine and no loss: who loads the model asks
``use_onednn`` first and leaves the model as it is when that is False.

Why: in float32 torch multiplies through another library (MKL), which on some CPUs uses half the
vector width. oneDNN also takes weights laid out in advance, which saves their reading order at the
few rows of a decode step. Its sums are other bits than the ordinary product's, so either both
sides of a float32 run take it or neither does:

    generator   pack_for_inference   each layer holds its packed weight only
    trainer     prepare_for_training products straight from the ordinary parameters, both ways

Packed and ordinary weights give the same bits here, so the trainer keeps no packed copy that could
be stale; ``packing_works`` checks that, too. As everywhere, rows come in multiples of 16: a single
row takes another kernel.

``torch.ops.mkldnn._reorder_linear_weight`` and ``_linear_pointwise`` belong to torch's compiler and
may change or vanish with any release. Then ``packing_works`` is False in every process of the run,
and everything is computed by ``torch.nn.functional.linear``: slower, nothing else. They are used in
this module only.

Shapes: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat.errors import ModelError
from offbeat.model.attention import TOKEN_ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x Wᵀ + b of (x, W, b), as ``torch.nn.functional.linear`` computes it."""

_ROWS_HINT = 64
"""Rows the packed layout is chosen for; speed and bits were the same for hints of 16 to 1024."""

_CHECKED_ROWS = (16, 48, 64, 208, 528)
"""Passes compared bit for bit: decode steps, and more rows than one chunk of the loss."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _pack(weight: Tensor, ops: Any = torch.ops.mkldnn) -> Tensor:
    """A copy of ``weight`` [O, I] in oneDNN's own layout: opaque but for shape, dtype, to_dense."""
    packed: Tensor = ops._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, ops: Any = torch.ops.mkldnn) -> Tensor:
    """x Wᵀ + b; ``weight`` packed, or an ordinary tensor of any strides."""
    y: Tensor = ops._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def linear_shapes(model: nn.Module) -> frozenset[tuple[int, int]]:
    """(I, O) of the layers that would be replaced."""
    return frozenset((m.in_features, m.out_features) for _, m in _linears(model))


@torch.no_grad()
def packing_works(
    dtype: torch.dtype, shapes: Collection[tuple[int, int]], *, ops: Any = torch.ops.mkldnn
) -> bool:
    """Whether the private operations exist and can be relied on for layers of these (I, O).

    They must give the ordinary values of the product and its gradients, and for each row the same
    bits whatever is computed beside it and whether the weight is packed or not. Depends on the
    build, the machine and the arguments only, so that two processes that load one model come to
    one answer. One to three seconds for a vocabulary of 50,000.

    Args:
        dtype: float32 or bfloat16; the layers'.
        ops: where the operations are looked up.
    """
    present = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if dtype not in _TOLERANCE or not present:
        return False
    try:
        return all(_layer_works(dtype, i, o, ops) for i, o in sorted(shapes))
    except (AttributeError, TypeError, RuntimeError):
        # Gone, another signature, or refused for this dtype on this CPU: what torch raises then.
        return False


def use_onednn(wanted: bool | None, dtype: torch.dtype, model: nn.Module) -> bool:
    """Whether ``model`` is to compute its linear layers in ``dtype`` through oneDNN.

    Args:
        wanted: ``model.onednn_linears``; None takes it where ``packing_works``.

    Raises: ModelError when it is demanded and does not work here.
    """
    if wanted is False:
        return False
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    works = on_cpu and packing_works(dtype, linear_shapes(model))
    if wanted and not works:
        raise ModelError(
            f"model.onednn_linears is true, but torch {torch.__version__} has no usable oneDNN "
            f"products in {str(dtype).removeprefix('torch.')} for this model here; set it to false "
            "or leave it out"
        )
    return works


def _layer_works(dtype: torch.dtype, inputs: int, outputs: int, ops: Any) -> bool:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype)
    x = torch.randn(max(_CHECKED_ROWS), inputs, generator=random).to(dtype)
    packed = _pack(weight, ops)
    y = _product(x, packed, bias, ops)
    few, g = x[:TOKEN_ROWS], y[:TOKEN_ROWS]
    close = _close(g, torch.nn.functional.linear(few, weight, bias))
    weights = [packed]
    if dtype is torch.float32:
        # Ordinary weights and gradients take part in float32 only, see ``linear``.
        weights.append(weight)
        close = close and _close(_product(g, weight.t(), None, ops), g @ weight)
        close = close and _close(_product(g.t(), few.t(), None, ops), g.t() @ few)
    return close and all(
        torch.equal(_product(rows, w, bias, ops), y[len(x) - len(rows) :])
        for w in weights
        for rows in (x[-n:] for n in _CHECKED_ROWS)
    )


def _close(found: Tensor, exact: Tensor) -> bool:
    if found.shape != exact.shape:
        return False
    error = (found.float() - exact.float()).norm() / exact.float().norm()
    return bool(error <= _TOLERANCE[exact.dtype])


class _Product(torch.autograd.Function):
    """x Wᵀ + b and its gradients, all through oneDNN, from the ordinary weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        d_x = d_weight = d_bias = None
        if for_x:
            d_x = _product(g, weight.t(), None).view(x.shape)
        if for_weight:
            d_weight = _product(g.t(), x.reshape(-1, x.shape[-1]).t(), None)
        if for_bias:
            d_bias = g.sum(0)
        return d_x, d_weight, d_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b with the bits of the packed layers, differentiable; ``weight`` is ordinary.

    In another dtype than float32, or under autocast, it is the ordinary product: equal bits are
    promised in float32 only, and bfloat16 reaches oneDNN anyway.

    Args:
        x: [..., I]; weight: [O, I]; bias: [O] or None.
    """
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if dtypes != {torch.float32} or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
    y: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return y


class AbsentWeight(Tensor):
    """Shape and dtype of a weight whose values lie elsewhere; any other use raises ModelError.

    A plain meta tensor would not do: products with it raise nothing, and writing their result into
    a cache is silently left out.
    """

    @classmethod
    def like(cls, weight: Tensor) -> AbsentWeight:
        """In the place of ``weight``, on the meta device."""
        return torch.empty_like(weight.detach(), device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Attributes (shape, dtype, is_meta) are read through functions of this name.
        if func.__name__ not in ("__get__", "size", "dim", "numel", "__repr__"):
            raise ModelError(
                f"{func.__name__} of a packed weight: the model uses the weight of a linear layer "
                "without calling the layer; it cannot run with packed linears"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch leaves it untyped


class TrainedLinear(nn.Module):
    """A linear layer that shares ``source``'s parameters and computes with ``linear``."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.weight = source.weight
        self.bias = source.bias
        self.train(source.training)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear layer without gradients that holds its weight in oneDNN's layout only.

    ``weight`` has the shape and dtype of what was packed and no values; it is not a parameter.
    """

    weight: AbsentWeight
    packed: Tensor

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.weight = AbsentWeight.like(source.weight)
        self.packed = _pack(source.weight.detach())
        self.bias = source.bias
        self.train(source.training)

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.packed, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """What turns hidden states into logits: ``linear(hidden, weight, bias)``.

    ``weight`` [V, hidden] may be packed: only ``linear`` can compute with it then.
    """

    weight: Tensor
    bias: Tensor | None
    linear: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] of [N, hidden]."""
        return self.linear(hidden, self.weight, self.bias)


def output_head(model: PreTrainedModel) -> OutputHead:
    """The model's output layer as it is now; a weight swap makes the result old."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if isinstance(head, PackedLinear):
        return OutputHead(weight=head.packed, bias=bias, linear=_product)
    trained = isinstance(head, TrainedLinear)
    product = linear if trained else torch.nn.functional.linear
    return OutputHead(weight=head.weight, bias=bias, linear=product)


def prepare_for_training(model: nn.Module) -> None:
    """Let every linear layer, the output head included, compute with ``linear``.

    Parameters stay the objects they are, under their names. Works with gradient checkpointing.

    Raises: ModelError for a layer that is not on the CPU.
    """
    _replace(model, TrainedLinear)


def pack_for_inference(model: nn.Module) -> PackedWeights:
    """Replace the weight of every linear layer by its packed copy.

    Layer by layer, so that at no time two copies of the model are held, provided that nothing else
    holds its parameters.

    Raises: ModelError for a layer that is not on the CPU.
    """
    names = _names(model)
    _replace(model, PackedLinear)
    return PackedWeights(model, names)


class PackedWeights:
    """The weights of a packed model under the names it was loaded with; a tied one comes once.

    New weights are packed by ``stage``, in the caller's thread, while forward passes go on. Between
    ``stage`` and the end of the action it returns, a second copy is held; the action only swaps
    pointers.
    """

    reads_late = False

    def __init__(self, model: nn.Module, names: Mapping[str, Collection[str]]) -> None:
        """``names``: of each weight all the places ``module.attribute`` where it is used."""
        self._packed: dict[str, list[PackedLinear]] = {}
        self._ordinary: dict[str, nn.Parameter] = {}
        for name, places in names.items():
            for place in places:
                owner, _, attribute = place.rpartition(".")
                module = model.get_submodule(owner)
                if isinstance(module, PackedLinear) and attribute == "weight":
                    self._packed.setdefault(name, []).append(module)
                else:
                    self._ordinary[name] = model.get_parameter(place)
        self._tensors: dict[str, Tensor] = {
            name: self._ordinary[name] if name in self._ordinary else self._packed[name][0].weight
            for name in names
        }

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Shape and dtype of every weight; the packed ones are on the meta device."""
        return self._tensors

    def read(self) -> Mapping[str, Tensor]:
        """Every weight with its values; the packed ones are unpacked, which copies them."""
        return {
            name: t if name in self._ordinary else self._packed[name][0].packed.to_dense()
            for name, t in self._tensors.items()
        }

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Copy and pack ``tensors`` now; the action returned makes them the model's weights.

        Args:
            tensors: one of each of ``self.tensors``' shapes under its name; the dtype is converted.
                They may go when this returns.
        """
        packed: list[tuple[PackedLinear, Tensor]] = []
        copied: list[tuple[nn.Parameter, Tensor]] = []
        for name, live in self._tensors.items():
            new = tensors[name]
            if name in self._packed:
                once = _pack(new.to(live.dtype))
                packed += [(module, once) for module in self._packed[name]]
            if name in self._ordinary:
                copied.append((self._ordinary[name], new.to(live.dtype, copy=True)))

        def swap() -> None:
            for module, weight in packed:
                module.packed = weight
            for parameter, values in copied:
                parameter.data = values

        return swap


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every place of a plain linear layer; a subclass may compute something else."""
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear:
            if module.weight.device.type != "cpu":
                raise ModelError(f"layer {name} is on {module.weight.device}, not on the CPU")
            yield name, module


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Of each parameter its first name and all the names it has."""
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return places


def _replace(model: nn.Module, build: Callable[[nn.Linear], nn.Module]) -> None:
    """Put ``build(layer)`` in the place of every plain linear layer, one for each layer."""
    places: dict[nn.Linear, list[str]] = {}
    for name, layer in _linears(model):
        places.setdefault(layer, []).append(name)
    while places:
        # Taken out of the table: the old layer's weight goes as soon as the new one is in place.
        layer, names = places.popitem()
        replacement = build(layer)
        for name in names:
            model.set_submodule(name, replacement)
