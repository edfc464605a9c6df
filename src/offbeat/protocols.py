"""The seams: what the pipeline asks of a generator, a trainer, a workflow and a sink.

Each Protocol is small on purpose; implementations live one row up and are named in a literal
dictionary beside the code that chooses them. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from offbeat.types import (
    BlobRef,
    Completion,
    GenerateRequest,
    GeneratorStats,
    PolicyVersion,
    Progress,
    Prompt,
    Rollout,
    SamplingParams,
    StepReport,
    TrainerState,
    WeightUpdate,
)

JsonValue: TypeAlias = (
    str | int | float | bool | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
)


@runtime_checkable
class Generator(Protocol):
    """Something that writes completions and takes new weights while it does."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one completion.

        Raises:
            PromptTooLong: the prompt does not fit the context.
            GenerationError: the request could not be served.
        """

    async def stream(
        self, request: GenerateRequest, wrote: Callable[[Progress], None]
    ) -> Completion:
        """``generate`` that calls ``wrote`` with what has been written, until the answer ends.

        What was told is told again when a lost process or reply is made good: see ``Progress``.
        ``request_id`` must not have been used for a streamed request before.
        """

    async def stage(self, update: WeightUpdate) -> None:
        """Open ``update`` and verify its digest; generation goes on. Raises WeightSyncError."""

    async def commit(self, version: PolicyVersion) -> float:
        """Swap to the staged weights between two decode steps; running requests continue.

        Returns the seconds for which generation stood still.

        Raises:
            WeightSyncError: ``version`` is not staged.
        """

    async def pause(self) -> None:
        """Start no further forward pass until ``resume``; running requests keep their state."""

    async def resume(self) -> None:
        """Undo ``pause``."""

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End these requests with ``StopReason.ABORTED`` and what they wrote so far.

        Returns how many were found.
        """

    async def stats(self) -> GeneratorStats:
        """Counters and spans; answered without waiting for a forward pass."""


class Trainer(Protocol):
    """The actor: one update per version, and the weights it produced."""

    async def update(self, batch: BlobRef, produce: PolicyVersion) -> StepReport:
        """Train on ``batch`` (msgpack of ``list[TrainSample]``) and produce version ``produce``.

        Idempotent by ``produce``: a trainer already there returns its stored report.

        Raises:
            TrainingError: the step cannot be taken.
            WeightSyncError: ``produce`` is not the trainer's version + 1.
        """

    async def publish(self) -> WeightUpdate:
        """Write the current weights to shared memory and return where, with version and digest."""

    async def begin_snapshot(self) -> PolicyVersion:
        """Begin to copy all that training needs to go on from here; of which version that is.

        The copy before is overwritten. An update may be asked for at once: it changes nothing
        before the copy is complete.
        """

    async def snapshot(self) -> TrainerState:
        """The copy that was begun, when it is complete."""


class EpisodeEngine(Protocol):
    """What a workflow sees: generation and tokens, already bound to one group of the run."""

    @property
    def n_samples(self) -> int:
        """Siblings to produce for the prompt."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the run (training or evaluation)."""

    async def agenerate(
        self,
        prompt_ids: Sequence[int],
        *,
        sibling: int,
        turn: int = 0,
        params: SamplingParams | None = None,
    ) -> Completion:
        """Generate one completion; its random stream is (run seed, group, sibling, turn)."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens skipped."""


class Workflow(Protocol):
    """How a prompt becomes rollouts: one async method."""

    async def arun_episode(self, engine: EpisodeEngine, data: Prompt) -> Sequence[Rollout]:
        """Produce the ``engine.n_samples`` siblings of one prompt, rewards included."""


class Sink(Protocol):
    """Receives every step's metrics; a failing sink is reported once and never stops training."""

    def write(self, step: int, metrics: Mapping[str, JsonValue]) -> None: ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """The record of one run in an experiment tracker, begun when the object is made.

    Lives in a process of its own; whatever it raises is reported once and ends the record only.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step; values may be NaN or infinite."""

    def finish(self, status: str, error: str | None) -> None:
        """Close the record: a value of ``RunStatus``, and the message of a failed run."""
