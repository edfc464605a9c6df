"""Processes: how they start, die, are found dead, and never outlive the controller."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from process_table import alive, gone_within

from offbeat.errors import ConnectionLost, StallError, WorkerError
from offbeat.launch.local import LocalScheduler, LocalWorker
from offbeat.launch.protocols import LOG_END, WorkerSpec

MakeSpec = Callable[..., WorkerSpec]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scheduler(log_dir: Path) -> AsyncIterator[LocalScheduler]:
    async with LocalScheduler(log_dir, grace=2) as scheduler:
        yield scheduler


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(scheduler: LocalScheduler, make_spec: MakeSpec) -> LocalWorker:
    """A worker for the tests that leave it as it was."""
    return await scheduler.start(make_spec(name="shared", threads=3, env={"EXTRA": "yes"}))


@pytest_asyncio.fixture(loop_scope="module")
async def worker(scheduler: LocalScheduler, make_spec: MakeSpec) -> LocalWorker:
    """A worker that the test may end."""
    return await scheduler.start(make_spec())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


async def test_a_worker_is_small_and_has_the_threads_of_its_spec(shared: LocalWorker) -> None:
    env = await shared.client.call("threads", returns=list[str], timeout=5)
    assert env == ["3", "3", "false", "yes"]
    heavy, kilobytes = await shared.client.call("modules", returns=tuple[list[str], int], timeout=5)
    assert heavy == []
    assert kilobytes < 120_000
    assert shared.pid != os.getpid()
    assert os.getpgid(shared.pid) == shared.pid


async def test_a_worker_can_be_called_by_its_name(
    scheduler: LocalScheduler, shared: LocalWorker
) -> None:
    call = scheduler.async_call_engine
    assert await call("shared", "add", 1, 2, returns=int, timeout=5) == 3
    assert await call("shared", "nothing", timeout=5) is None
    with pytest.raises(WorkerError, match=r"there is no worker 'trainer'; started: .*shared"):
        await call("trainer", "add", 1, returns=int, timeout=5)


async def test_a_name_means_the_worker_that_is_not_closed(
    scheduler: LocalScheduler, make_spec: MakeSpec
) -> None:
    for _ in range(3):  # as a set keeps them in any order
        first = await scheduler.start(make_spec(name="twin"))
        await first.close()
        second = await scheduler.start(make_spec(name="twin"))
        assert await scheduler.async_call_engine("twin", "add", 1, 2, returns=int, timeout=5) == 3
        await second.close()
    with pytest.raises(WorkerError, match="there is no worker 'twin'"):
        await scheduler.async_call_engine("twin", "add", 1, 2, returns=int, timeout=5)


async def test_a_request_without_the_token_is_refused(shared: LocalWorker) -> None:
    url = shared.client.url
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \u00e9"}):
            for request in (session.post(f"{url}/rpc/nothing", data=b"\x90", headers=headers),
                            session.get(f"{url}/health", headers=headers)):  # fmt: skip
                async with request as response:
                    assert response.status == 401
    environ = _text(Path(f"/proc/{shared.pid}/environ"))
    cmdline = _text(Path(f"/proc/{shared.pid}/cmdline"))
    token = shared.client._session.headers["Authorization"].removeprefix("Bearer ")
    assert len(token) >= 32
    assert token not in environ + cmdline


async def test_a_worker_listens_on_loopback_only(shared: LocalWorker) -> None:
    port = int(shared.client.url.rsplit(":", 1)[1])
    tables = _text(Path("/proc/self/net/tcp")) + _text(Path("/proc/self/net/tcp6"))
    rows = [line.split() for line in tables.splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


async def test_sigkill_is_noticed_within_a_second_and_fails_calls_in_flight(
    worker: LocalWorker,
) -> None:
    async def fails() -> None:
        with pytest.raises(WorkerError, match=r"^echo-0: connection lost in hang") as caught:
            await worker.client.call("hang", "k", timeout=None)
        assert type(caught.value) is ConnectionLost

    await worker.client.call("print_line", "the last line", timeout=5)
    child = await worker.client.call("spawn_child", returns=int, timeout=5)
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await worker.client.call("seen", "k/began", timeout=5)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(1):
            reason = await worker.wait()
    how = f"echo-0 (pid {worker.pid}) was killed by SIGKILL (out of memory?)"
    assert reason.startswith(f"{how}{LOG_END}")
    assert reason.endswith("the last line")
    assert gone_within([child, worker.pid], 1)
    with pytest.raises(WorkerError, match="echo-0"):
        await worker.client.call("add", 1, returns=int, timeout=5)


async def test_a_worker_is_found_by_its_name_in_the_process_table(shared: LocalWorker) -> None:
    command = _text(Path(f"/proc/{shared.pid}/cmdline")).split("\0")
    assert command[-4:-1] == ["offbeat.launch.worker", str(os.getpid()), "shared"]


async def test_a_stopped_process_is_found_by_its_health_and_can_be_killed(
    worker: LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(StallError, match=r"^echo-0: no answer to health in 0\.2 s$"):
        await worker.client.health(timeout=0.2)
    await worker.close(grace=0)
    assert "did not stop" not in caplog.text, "it was given no time to stop in"
    assert (await worker.wait()).startswith(f"echo-0 (pid {worker.pid}) was killed by SIGKILL")


async def test_ctrl_c_does_not_reach_a_worker(shared: LocalWorker) -> None:
    os.killpg(shared.pid, signal.SIGINT)
    assert await shared.client.call("add", 1, returns=int, timeout=5) == 11


async def test_sigusr1_writes_the_stacks_to_the_log(shared: LocalWorker, log_dir: Path) -> None:
    os.kill(shared.pid, signal.SIGUSR1)
    await shared.client.call("nothing", timeout=5)
    assert "in _run" in _text(log_dir / "shared.log")


async def test_an_orderly_end_leaves_no_process_of_the_group(worker: LocalWorker) -> None:
    child = await worker.client.call("spawn_child", returns=int, timeout=5)
    await worker.close()
    assert (await worker.wait()).startswith(f"echo-0 (pid {worker.pid}) exited with code 0")
    assert gone_within([child, worker.pid], 1)
    assert not Path(f"/proc/{worker.pid}").exists(), "the worker was not reaped"  # noqa: ASYNC240


async def test_death_before_readiness_shows_how_and_the_end_of_the_log(
    scheduler: LocalScheduler, make_spec: MakeSpec
) -> None:
    with pytest.raises(WorkerError, match=r"echo-0 \(pid \d+\) exited with code 3") as caught:
        await scheduler.start(make_spec("open_exit"))
    assert "last words" in str(caught.value)


async def test_a_restarted_worker_appends_to_its_log_and_quotes_only_itself(
    scheduler: LocalScheduler, make_spec: MakeSpec, log_dir: Path
) -> None:
    path = log_dir / "phoenix.log"
    path.write_text("the first life\n", encoding="utf-8")
    with pytest.raises(WorkerError) as caught:
        await scheduler.start(make_spec("open_exit", name="phoenix"))
    assert "the first life" not in str(caught.value)
    assert _text(path) == "the first life\nlast words\n"


async def test_a_worker_that_ignores_sigterm_is_killed(
    scheduler: LocalScheduler, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await scheduler.start(make_spec("open_deaf"))
    with pytest.raises(StallError):
        await worker.client.call("block", timeout=0.2)
    await worker.close(grace=0.3)
    assert "echo-0 did not stop within 0.3 s of SIGTERM: killed" in caplog.messages
    assert (await worker.wait()).startswith(f"echo-0 (pid {worker.pid}) was killed by SIGKILL")
    assert not alive(worker.pid)


async def test_cancelling_a_start_leaves_no_process(
    scheduler: LocalScheduler, make_spec: MakeSpec
) -> None:
    before = set(scheduler._children)
    async with asyncio.TaskGroup() as group:
        start = group.create_task(scheduler.start(make_spec("open_never")))
        while not (newborn := scheduler._children - before):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (pid,) = (child.pid for child in newborn)
        start.cancel()
    assert start.cancelled()
    assert not alive(pid)


async def test_a_process_that_cannot_be_started_is_named(
    scheduler: LocalScheduler, make_spec: MakeSpec, tmp_path: Path
) -> None:
    nowhere = f"../{tmp_path.name}/absent/echo"
    with pytest.raises(WorkerError, match=r"^starting the process .*absent/echo: FileNotFoundErr"):
        await scheduler.start(make_spec(name=nowhere))
