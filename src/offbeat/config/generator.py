"""The generators: engine, number, slots and threads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from offbeat.config.model import DType
from offbeat.config.schema import NonNegativeInt, PositiveInt, Range, Section

Replicas = Annotated[int, Range(ge=1, le=256)]
Slots = Annotated[int, Range(ge=1, le=65536)]
Heartbeat = Annotated[float, Range(ge=0.1)]


class GeneratorBackend(StrEnum):
    """Which engine generates."""

    EMBEDDED = "embedded"


class KVOnUpdate(StrEnum):
    """What running requests do with the keys and values of their tokens when new weights come."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig(Section):
    """The processes that write answers."""

    backend: GeneratorBackend = GeneratorBackend.EMBEDDED
    """Which engine generates."""

    replicas: Replicas = 1
    """Generator processes."""

    slots: Slots = 64
    """Requests decoded together in one generator; more wait in order."""

    kv_on_update: KVOnUpdate = KVOnUpdate.KEEP
    """The cache of running requests at a weight swap. keep: tokens written before it keep the keys
    and values of older weights, which costs nothing. recompute: all are computed anew beside
    decoding, prompts once for all siblings, before a request's next token; each token is then drawn
    from the distribution that its version gives the whole sequence before it.
    """

    max_restarts: NonNegativeInt = 3
    """Processes of one generator that may die or hang, and are replaced, before the run ends."""

    heartbeat_seconds: Heartbeat = 30.0
    """How often a generator must answer; one that does not for as long again is replaced."""

    threads: PositiveInt | None = None
    """CPU threads of one generator; null: with ``max_staleness`` 0 the cores are shared among the
    replicas, else among replicas and trainer; 1 below 50 MB of weights."""

    dtype: DType | None = None
    """Number format of the engine; null: that of the model."""
