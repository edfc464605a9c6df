"""What is kept of an update so that it can be repeated: how it was computed, and what came out.

One record for each step, in the step's rollouts file, beside what went in. So a file says all that
a replay of its step needs: a configuration that was changed when the run was resumed, a data set
that is gone, or another machine for a later attempt make no difference. Knows no file format.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Self

import msgspec

from offbeat.errors import DataError
from offbeat.train.client import RemoteTrainer, TrainerSpec
from offbeat.types import Environment, PolicyVersion, WeightUpdate
from offbeat.weights.digests import tensor_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update. ``trainer`` is what it was computed with, without a place to restore from.

    ``before`` and ``digest`` are the digests of the weights that it started from and of those it
    produced, which are ``version``; ``tensors`` those of each tensor, in the order of the layout.
    """

    trainer: TrainerSpec
    environment: Environment
    version: PolicyVersion
    before: str
    digest: str
    tensors: tuple[str, ...]

    def to_json(self) -> str:
        """One line; floats keep their bits."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str, where: object) -> Self:
        """What ``to_json`` wrote.

        Raises:
            DataError: it is no such record; names ``where``.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as exc:
            raise DataError(
                f"{where}: the record of its update cannot be read ({exc}): replay it with the "
                "version of offbeat that trained it"
            ) from exc


class UpdateRecorder:
    """Makes the records of one attempt, in the order of its updates.

    Args:
        trainer: what the trainer was started with.
        environment: what its bits depend on beside that.
        digest: of the weights that it holds now.
    """

    def __init__(self, trainer: TrainerSpec, environment: Environment, digest: str) -> None:
        self._trainer = dataclasses.replace(trainer, restore=None, snapshots=False)
        self.environment = environment
        self._before = digest

    @classmethod
    async def begin(cls, trainer: TrainerSpec, remote: RemoteTrainer) -> Self:
        """For a trainer that was just started; it publishes once, for the digest."""
        environment = await remote.environment()
        return cls(trainer, environment, (await remote.publish()).digest)

    async def record(self, update: WeightUpdate) -> UpdateRecord:
        """The record of the update that was just published; reads it, in a thread."""
        tensors = await asyncio.to_thread(tensor_digests, update)
        before, self._before = self._before, update.digest
        return UpdateRecord(
            trainer=self._trainer,
            environment=self.environment,
            version=update.version,
            before=before,
            digest=update.digest,
            tensors=tuple(tensors.values()),
        )
