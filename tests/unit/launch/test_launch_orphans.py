"""Seen from outside: what a controller leaves behind, and what it loads."""

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from process_table import alive, gone_within

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), *sys.path])

CONTROLLER = """
import asyncio, sys
from pathlib import Path
from offbeat.errors import StallError
from offbeat.launch.local import LocalScheduler
from offbeat.launch.protocols import WorkerSpec

async def main():
    async with LocalScheduler(Path(sys.argv[1]), grace=0.5) as scheduler:
        handles = [await scheduler.start(WorkerSpec(
            name=f"w-{i}", target="launch_services:" + factory, env={"PYTHONPATH": sys.argv[2]}
        )) for i, factory in enumerate(["open_echo", "open_deaf"])]
        try:
            await handles[1].client.call("block", timeout=0.1)
        except StallError:
            pass
        print(*(h.pid for h in handles), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_die_with_the_controller(number: signal.Signals, tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONTROLLER), str(tmp_path), PATHS],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        controller.send_signal(number)
        controller.wait(timeout=10)
        assert gone_within(pids, 1)
    finally:
        for pid in [controller.pid, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        controller.communicate()


def test_launch_loads_neither_torch_nor_aiohttp() -> None:
    code = (
        "import sys, offbeat.launch.scheduler, offbeat.launch.worker, offbeat.launch.blob\n"
        "print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert out.stdout.strip() == "[]"
