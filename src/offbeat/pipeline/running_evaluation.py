"""An evaluation that runs beside training, and the record of the step that waits for its result.

Owns its task, and the wait for it; the loop decides when it begins, and commits nothing before it
is through. Unblocked by the last row, or by a silence of which `Patience` has had enough.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from offbeat.errors import StallError
from offbeat.observe.metrics import StepRecord
from offbeat.pipeline.evaluate import EvalResult, Evaluator
from offbeat.pipeline.stall import Patience
from offbeat.types import PolicyVersion, RolloutGroup


class RunningEvaluation:
    """Begins at once, as one of ``tasks``.

    Args:
        version: the live one; it must stay so until ``result`` returns.
        record: of the step that made it.
        groups: those of that step.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        version: PolicyVersion,
        record: StepRecord,
        groups: Sequence[RolloutGroup],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._evaluator = evaluator
        self._task = tasks.create_task(evaluator.run(version), name="evaluation")
        self._record = record
        self.groups = tuple(groups)
        self.began = time.monotonic()
        """CLOCK_MONOTONIC seconds."""

    @property
    def step(self) -> int:
        """The one whose version it is of."""
        return self._record.step

    @property
    def progress(self) -> str:
        """How far it is, for a person."""
        return self._evaluator.progress

    async def result(self, patience: Patience, tokens: Callable[[], Awaitable[int]]) -> EvalResult:
        """Its result, once it is through.

        Args:
            tokens: how many all generators have written by now.

        Raises:
            StallError: no row was answered and no token written for too long.
            OffbeatError: as ``Evaluator.run``.
        """
        while True:
            before = self._evaluator.answered
            await asyncio.wait([self._task], timeout=patience.stall_seconds)
            if self._task.done():
                return self._task.result()
            if self._evaluator.answered != before:
                patience.something_happened()
            elif patience.is_spent(generating=self._evaluator.is_generating, tokens=await tokens()):
                raise StallError(
                    f"no row was answered and no token written for {patience.stall_seconds:g} s "
                    f"(rollout.stall_seconds): {self.progress}"
                )

    def record(self, result: EvalResult) -> StepRecord:
        """The step's record with ``result``."""
        return StepRecord(
            step=self._record.step,
            version=self._record.version,
            seconds=self._record.seconds or result.seconds,
            metrics={**self._record.metrics, **result.metrics()},
        )
