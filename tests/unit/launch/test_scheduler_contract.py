"""What every scheduler promises, run on all of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from offbeat.errors import ConfigError, ModelError, NonFiniteLoss, StallError, WorkerError
from offbeat.launch.protocols import Scheduler, WorkerHandle, WorkerSpec
from offbeat.launch.scheduler import SCHEDULERS, make_scheduler
from offbeat.types import (
    Completion,
    GenerateRequest,
    GroupId,
    PolicyVersion,
    SamplingParams,
    StepReport,
    StopReason,
    WeightUpdate,
)

MakeSpec = Callable[..., WorkerSpec]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(params=list(SCHEDULERS), scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scheduler(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scheduler]:
    async with make_scheduler(kind, tmp_path_factory.mktemp("logs")) as scheduler:
        yield scheduler


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(scheduler: Scheduler, make_spec: MakeSpec) -> WorkerHandle:
    """A worker for the tests that leave it as it was."""
    return await scheduler.start(make_spec())


@pytest_asyncio.fixture(loop_scope="module")
async def worker(scheduler: Scheduler, make_spec: MakeSpec) -> WorkerHandle:
    """A worker that the test may end."""
    return await scheduler.start(make_spec())


async def test_typed_calls_carry_arrays_and_values_both_ways(shared: WorkerHandle) -> None:
    request = GenerateRequest(
        request_id="r-1", group_id=GroupId(4), sibling=0, turn=0, prompt_ids=np.array([1, 2, 3]),
        params=SamplingParams(stop=("x",)), seed=2**63 + 5,
    )  # fmt: skip
    got = await shared.client.call("generate", request, returns=Completion, timeout=5)
    assert got.token_ids.tolist() == [3, 2, 1]
    assert got.logprobs.dtype == np.float32
    assert got.versions.tolist() == [7, 7, 7]
    assert got.stop_reason is StopReason.LENGTH
    update = WeightUpdate(version=PolicyVersion(3), uri="/x", nbytes=12, digest="d")
    report = await shared.client.call("update", update, 4, returns=StepReport, timeout=5)
    assert report == StepReport(
        version=PolicyVersion(4), tokens=12, rows=1, started=0.5, ended=1.0, metrics={"a/b": 2.0}
    )


async def test_a_large_array_travels_whole(shared: WorkerHandle) -> None:
    values = np.arange(500_000)
    total = await shared.client.call("total", values, ["a", "b"], returns=float, timeout=10)
    assert total == values.sum() + 2


async def test_defaults_and_none_are_ordinary(shared: WorkerHandle) -> None:
    assert await shared.client.call("add", 1, returns=int, timeout=5) == 11
    assert await shared.client.call("add", 1, 2, returns=int, timeout=5) == 3
    assert await shared.client.call("nothing", timeout=None) is None
    await shared.client.health(timeout=5)


async def test_an_error_of_ours_arrives_as_its_class_with_the_name_once(
    shared: WorkerHandle,
) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        await shared.client.call("nonfinite", timeout=5)
    assert type(caught.value) is NonFiniteLoss
    assert str(caught.value) == "echo-0: loss is nan at step 3"


async def test_a_foreign_exception_is_a_worker_error_with_its_traceback(
    shared: WorkerHandle,
) -> None:
    with pytest.raises(WorkerError) as caught:
        await shared.client.call("unexpected", timeout=5)
    assert str(caught.value) == "echo-0: unexpected: KeyError: 'surprise'"
    assert "launch_services.py" in caught.value.__notes__[0]
    assert await shared.client.call("add", 1, returns=int, timeout=5) == 11


async def test_wrong_calls_say_what_is_wrong(shared: WorkerHandle) -> None:
    with pytest.raises(WorkerError, match="echo-0: no method 'secret'; there are add, "):
        await shared.client.call("secret", timeout=5)
    with pytest.raises(WorkerError, match="add takes 2 arguments, 3 were given"):
        await shared.client.call("add", 1, 2, 3, timeout=5)
    with pytest.raises(WorkerError, match="add takes 2 arguments, 0 were given"):
        await shared.client.call("add", timeout=5)
    with pytest.raises(WorkerError, match=r"not a int.*Expected `int`, got `str`"):
        await shared.client.call("add", "one", timeout=5)
    with pytest.raises(WorkerError, match="echo-0: answer to wrong_type"):
        await shared.client.call("wrong_type", returns=int, timeout=5)


async def test_a_passed_deadline_names_worker_method_and_seconds(shared: WorkerHandle) -> None:
    with pytest.raises(StallError, match=r"^echo-0: no answer to hang in 0\.05 s$"):
        await shared.client.call("hang", "late", timeout=0.05)
    await shared.client.call("seen", "late/cancelled", timeout=5)


async def test_cancelling_a_call_cancels_the_method(shared: WorkerHandle) -> None:
    async with asyncio.TaskGroup() as group:
        call = group.create_task(shared.client.call("hang", "c", timeout=None))
        await shared.client.call("seen", "c/began", timeout=5)
        call.cancel()
    assert call.cancelled()
    await shared.client.call("seen", "c/cancelled", timeout=5)


async def test_two_hundred_calls_run_at_once(shared: WorkerHandle) -> None:
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(shared.client.call("gather", 200, returns=int, timeout=20))
            for _ in range(200)
        ]
    assert {call.result() for call in calls} == {200}


async def test_closing_ends_calls_in_flight_and_later_ones(
    worker: WorkerHandle,
) -> None:
    async def fails() -> None:
        with pytest.raises(WorkerError, match="echo-0: connection lost in hang"):
            await worker.client.call("hang", "c", timeout=None)

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await worker.client.call("seen", "c/began", timeout=5)
        await worker.close()
    assert (await worker.wait()).startswith("echo-0 ")
    await worker.close()
    with pytest.raises(WorkerError, match="echo-0"):
        await worker.client.call("add", 1, returns=int, timeout=5)
    with pytest.raises(WorkerError, match="echo-0"):
        await worker.client.health(timeout=5)


async def test_wait_lasts_as_long_as_the_worker(worker: WorkerHandle) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(worker.wait())
        await worker.client.call("add", 1, returns=int, timeout=5)
        assert not waiting.done()
        await worker.close()
    assert "echo-0" in waiting.result()


async def test_a_failing_background_task_ends_the_worker_with_its_reason(
    worker: WorkerHandle,
) -> None:
    await worker.client.call("crash_later", timeout=5)
    reason = await worker.wait()
    assert "RuntimeError: background task failed" in reason


async def test_an_error_in_the_body_still_cleans_up_and_leaves_unwrapped(
    kind: str, tmp_path: Path, make_spec: MakeSpec
) -> None:
    marks = [tmp_path / f"mark{i}" for i in range(2)]

    async def run() -> None:
        async with make_scheduler(kind, tmp_path / "logs") as scheduler:
            async with asyncio.TaskGroup() as group:
                for i, mark in enumerate(marks):
                    spec = make_spec(name=f"echo-{i}", payload=str(mark).encode())
                    group.create_task(scheduler.start(spec))
            assert not any(mark.exists() for mark in marks)
            raise NonFiniteLoss("from the run")

    with pytest.raises(NonFiniteLoss, match=r"^from the run$"):
        await run()
    assert all(mark.exists() for mark in marks)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("open_model_error", ModelError, r"^echo-0: no config.json in $"),
        ("open_zero_division", WorkerError, r"echo-0: opening launch_serv.*ZeroDivisionError"),
        ("open_nothing", ConfigError, r"echo-0: worker target: .* has no 'open_nothing'"),
        ("open_sync", WorkerError, r"Sync.plain is not an async method"),
    ],
)
async def test_a_service_that_cannot_open_raises_its_own_error(
    scheduler: Scheduler, make_spec: MakeSpec, factory: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        await scheduler.start(make_spec(factory))
    assert type(caught.value) is error


async def test_a_service_that_never_opens_is_a_stall_and_is_ended(
    scheduler: Scheduler, make_spec: MakeSpec
) -> None:
    with pytest.raises(StallError, match=r"^echo-0: not ready after 0\.7 s"):
        await scheduler.start(make_spec("open_never", start_timeout_seconds=0.7))
    handle = await scheduler.start(make_spec())
    assert await handle.client.call("add", 1, returns=int, timeout=5) == 11


async def test_leaving_the_context_ends_a_start_in_progress(
    kind: str, tmp_path: Path, make_spec: MakeSpec
) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:

        async def fails(scheduler: Scheduler) -> None:
            with pytest.raises(WorkerError, match="echo-0"):
                await scheduler.start(make_spec("open_never"))

        async with make_scheduler(kind, tmp_path / "logs") as scheduler:
            start = group.create_task(fails(scheduler))
            await scheduler.start(make_spec(name="echo-1"))
            assert not start.done()


async def test_an_unknown_scheduler_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler.type: 'slurm' is not one of local, inline"):
        make_scheduler("slurm", tmp_path)
