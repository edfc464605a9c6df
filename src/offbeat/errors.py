"""The error vocabulary of offbeat: one tree, one meaning per class.

    OffbeatError
    ├── ConfigError(ValueError)      cannot be used; names path, value, allowed set
    ├── DataError(ValueError)        data set, row or column cannot be used; names file and row
    ├── ModelError(ValueError)       model folder not loadable or not supported; names layer or file
    ├── RolloutError                 one rollout went wrong; its group ends, the run goes on
    │   ├── GenerationError          the generator could not serve a request
    │   ├── PromptTooLong            prompt plus answer do not fit the context
    │   └── RewardError              a reward function raised, or returned what is not a number
    │       └── RewardTimeout        ... or was killed at its deadline
    ├── TrainingError(RuntimeError)  the optimizer step could not be taken
    │   ├── NonFiniteLoss            loss, log-prob or gradient is NaN or infinite
    │   └── StaleBatchError          a group was later than max_staleness allows
    ├── CheckpointError              a save or load failed
    │   └── CorruptCheckpoint        what is on disk is not what the manifest says
    ├── WeightSyncError              a worker holds other weights than the controller believes
    └── WorkerError                  a process died, hung or raised what it should not
        ├── StallError               a wait passed its deadline; names what and since when
        └── ConnectionLost           a connection broke before the answer came

A bad *rollout* is data: it is recorded once and counted. A bad *run* is one of the others and ends
the run. Every class takes one message, so that instances pickle and travel by name (``by_name``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OffbeatError(Exception):
    """Root of every error that offbeat raises on purpose; the message is written for the user."""


class ConfigError(OffbeatError, ValueError):
    """The configuration cannot be used."""


class DataError(OffbeatError, ValueError):
    """A data set, row or column cannot be used."""


class ModelError(OffbeatError, ValueError):
    """A model folder cannot be loaded or its architecture is not supported."""


class RolloutError(OffbeatError):
    """One rollout failed; the run goes on."""


class GenerationError(RolloutError):
    """The generator could not serve a request."""


class PromptTooLong(RolloutError):
    """Prompt plus answer do not fit the context."""


class RewardError(RolloutError):
    """A reward function raised or returned something that is not a finite number."""


class RewardTimeout(RewardError):
    """A reward function was killed at its deadline."""


class TrainingError(OffbeatError, RuntimeError):
    """The optimizer step could not be taken."""


class NonFiniteLoss(TrainingError):
    """Loss, log-prob or gradient norm is NaN or infinite."""


class StaleBatchError(TrainingError):
    """A group reached the trainer later than ``max_staleness`` allows."""


class CheckpointError(OffbeatError):
    """A save or a load failed."""


class CorruptCheckpoint(CheckpointError):
    """What is on disk is not what the manifest says."""


class WeightSyncError(OffbeatError):
    """A worker holds other weights than the controller believes."""


class WorkerError(OffbeatError):
    """A process of the run died, hung or answered with an unexpected exception."""


class StallError(WorkerError):
    """A wait passed its deadline."""


class ConnectionLost(WorkerError):
    """A connection broke before the answer came; what was asked may have been done."""


def _tree(cls: type[OffbeatError]) -> Iterator[type[OffbeatError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def by_name(name: str) -> type[OffbeatError]:
    """The class called ``name``; ``WorkerError`` for a name from outside the tree.

    This is how an exception crosses a process boundary: as its class name and message, never as an
    object.
    """
    return {cls.__name__: cls for cls in _tree(OffbeatError)}.get(name, WorkerError)


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for part in exc.exceptions:
            yield from _leaves(part)
    else:
        yield exc


def true_cause(exc: BaseException) -> BaseException:
    """The one error to report of a task group's several: what ends a run comes first.

    Among the leaves, an error of this tree that is no ``RolloutError`` comes first, then any other
    error, then a ``RolloutError``.
    """

    def rank(leaf: BaseException) -> int:
        if isinstance(leaf, RolloutError):
            return 2
        return 0 if isinstance(leaf, OffbeatError) else 1

    return min(_leaves(exc), key=rank)


@contextmanager
def boundary(error: type[OffbeatError], what: str) -> Iterator[None]:
    """Turn any foreign exception raised inside into ``error``, naming ``what`` was being done.

    Errors of this tree pass unchanged, also out of a task group; cancellation and interpreter exits
    too. This is the only broad ``except`` of the package: it classifies and re-raises, it never
    swallows.
    """
    try:
        yield
    except OffbeatError:
        raise
    except Exception as exc:
        cause = true_cause(exc)
        if isinstance(cause, OffbeatError):
            raise cause from exc
        raise error(f"{what}: {type(cause).__name__}: {cause}") from exc
