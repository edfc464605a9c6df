"""The model: which weights, in which number format, on which device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from offbeat.config.schema import Matching, PositiveInt, Section, Text

Device = Annotated[
    str, Matching(pattern=r"auto|cpu|cuda(:\d+)?", meaning="one of auto, cpu, cuda, cuda:<index>")
]


class DType(StrEnum):
    """Number format of weights and activations."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section):
    """The policy as it is loaded."""

    path: Text
    """Folder of the model in Hugging Face layout."""

    dtype: DType | None = None
    """Number format of the forward pass; null: float32 on CPU, bfloat16 on GPU."""

    device: Device = "auto"
    """auto takes the GPU when there is one."""

    onednn_linears: bool | None = None
    """Linear layers on the CPU through oneDNN, in the generator and, in float32, in the trainer;
    null: where they prove right and repeatable at start-up; true: an error where they do not, or
    where the trainer is not float32. Other bits than the ordinary product, and faster.
    """

    max_model_len: PositiveInt | None = None
    """Longest prompt plus answer, tokens; null: the model's own limit."""
