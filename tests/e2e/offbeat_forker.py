"""Runs ``offbeat`` commands, each in a fork of this process, which has imported what they need.

A command of its own costs half a second of imports; a fork costs a hundredth, and is as real: its
own process, folder, environment, limits and modules. One JSON object per line of stdin is an order,
one per line of stdout its answer. Called as ``python offbeat_forker.py MODULE...``.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from typing import Any


def run(order: dict[str, Any]) -> None:
    """The command of ``order``, in a fork; never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(order["folder"])
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(order["environment"])
        sys.argv = ["offbeat", *order["arguments"]]
        try:
            exec(order["before"], {"__name__": "before"})
            runpy.run_module("offbeat", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
            if isinstance(left.code, str):
                sys.stderr.write(f"{left.code}\n")
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code (negative: the signal); None after ``seconds``, and the process killed."""
    watch = os.pidfd_open(pid)
    ready, _, _ = select.select([watch], [], [], seconds)
    os.close(watch)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ready else None


def main(modules: list[str]) -> None:
    """Import, then answer orders until stdin ends."""
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(order)
        sys.stdout.write(json.dumps({"code": wait(pid, order["seconds"])}) + "\n")
        sys.stdout.flush()
    os._exit(0)  # with torch loaded the interpreter's own end takes seconds


if __name__ == "__main__":
    main(sys.argv[1:])
