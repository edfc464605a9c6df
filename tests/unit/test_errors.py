"""The error tree: what passes a boundary, what it becomes, and which of several errors is told."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from offbeat import errors
from offbeat.errors import (
    ConfigError,
    DataError,
    GenerationError,
    ModelError,
    OffbeatError,
    PromptTooLong,
    RewardError,
    RolloutError,
    StallError,
    TrainingError,
    WorkerError,
    boundary,
    by_name,
    true_cause,
)


def tree(cls: type[OffbeatError]) -> list[type[OffbeatError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in tree(sub))]


OWN = [cls for cls in tree(OffbeatError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", OWN)
def test_every_error_travels_by_pickle_and_by_name(cls: type[OffbeatError]) -> None:
    error = cls("what went wrong")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back)) == (cls, "what went wrong")
    assert by_name(cls.__name__) is cls


@pytest.mark.parametrize("cls", OWN)
def test_the_docstring_shows_every_error(cls: type[OffbeatError]) -> None:
    assert errors.__doc__ is not None
    assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize("name", ["KeyError", "Exception", "", "offbeat.errors.ConfigError"])
def test_a_name_from_outside_the_tree_is_a_worker_error(name: str) -> None:
    assert by_name(name) is WorkerError


@pytest.mark.parametrize("cls", [ConfigError, DataError, ModelError])
def test_what_a_caller_got_wrong_is_a_value_error(cls: type[OffbeatError]) -> None:
    assert issubclass(cls, ValueError)
    assert not issubclass(cls, RolloutError)


def test_a_foreign_error_becomes_the_named_one_and_keeps_its_cause() -> None:
    with (
        pytest.raises(RewardError, match=r"^scoring group 3: KeyError: 'answer'$") as caught,
        boundary(RewardError, "scoring group 3"),
    ):
        raise KeyError("answer")
    assert type(caught.value) is RewardError
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_the_tree_passes_a_boundary_as_the_same_object() -> None:
    error = PromptTooLong("too long")
    with pytest.raises(PromptTooLong) as caught, boundary(WorkerError, "anything"):
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_interruptions_pass_a_boundary_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, boundary(WorkerError, "anything"):
        raise error
    assert caught.value is error


def test_a_block_that_succeeds_is_left_alone() -> None:
    with boundary(WorkerError, "anything"):
        value = 3
    assert value == 3


async def test_an_error_of_the_tree_comes_out_of_a_task_group_alone() -> None:
    async def fail() -> None:
        raise DataError("row 7")

    with pytest.raises(DataError, match=r"^row 7$"), boundary(WorkerError, "loading"):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


async def test_a_foreign_error_out_of_a_task_group_is_named_by_its_leaf() -> None:
    async def fail() -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(WorkerError, match=r"loading: OSError: \[Errno 28\] No space"),
        boundary(WorkerError, "loading"),
    ):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


ROLLOUT = GenerationError("one request")
FOREIGN = KeyError("bug")
RUN = StallError("the run")


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        ((ROLLOUT,), ROLLOUT),
        ((ROLLOUT, FOREIGN), FOREIGN),
        ((FOREIGN, RUN), RUN),
        ((ROLLOUT, FOREIGN, RUN), RUN),
        ((RUN, TrainingError("later")), RUN),
        ((ROLLOUT, ExceptionGroup("inner", [FOREIGN, ExceptionGroup("deeper", [RUN])])), RUN),
    ],
)
def test_of_several_errors_the_one_that_ends_the_run_is_told(
    leaves: tuple[Exception, ...], told: Exception
) -> None:
    assert true_cause(ExceptionGroup("several", leaves)) is told


def test_a_single_error_is_its_own_true_cause() -> None:
    assert true_cause(FOREIGN) is FOREIGN
