"""The generators: engine, number, slots and threads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.model import DType
from offbeat.config.schema import PositiveInt, Section


class GeneratorBackend(StrEnum):
    """Which engine generates."""

    EMBEDDED = "embedded"


class KVOnUpdate(StrEnum):
    """What running requests do with their cache when new weights come."""

    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig(Section):
    """The processes that write answers."""

    backend: GeneratorBackend = GeneratorBackend.EMBEDDED
    """Which engine generates."""

    replicas: PositiveInt = 1
    """Generator processes."""

    slots: PositiveInt = 64
    """Requests decoded together in one generator; more wait in order."""

    kv_on_update: KVOnUpdate = KVOnUpdate.KEEP
    """What happens to the cache of running requests at a weight swap."""

    threads: PositiveInt | None = None
    """CPU threads of one generator; null: ``RunConfig.generator_threads``."""

    dtype: DType | None = None
    """Number format of the engine; null: that of the model."""
