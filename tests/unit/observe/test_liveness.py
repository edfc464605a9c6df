"""Claims about telling a run that goes on from one that was killed."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.observe import liveness
from offbeat.observe.liveness import FILE_NAME, Life, held, life_of

_HOLDER = """
import subprocess, sys
from pathlib import Path
from offbeat.observe.liveness import held
with held(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def test_run_is_alive_until_its_process_is_killed_and_children_do_not_count(
    tmp_path: Path,
) -> None:
    assert life_of(tmp_path) is Life.UNKNOWN
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert life_of(tmp_path) is Life.ALIVE
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            os.kill(child, 0)
            assert life_of(tmp_path) is Life.DEAD
        finally:
            os.kill(child, signal.SIGKILL)


def test_run_that_ended_by_itself_is_dead_and_can_begin_again(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path):
            assert life_of(tmp_path) is Life.ALIVE
        assert life_of(tmp_path) is Life.DEAD


def test_readers_do_not_take_each_other_for_the_run(tmp_path: Path) -> None:
    with held(tmp_path):
        pass
    with (tmp_path / FILE_NAME).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert life_of(tmp_path) is Life.DEAD


def test_where_the_file_system_has_no_locks_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        assert life_of(tmp_path) is Life.UNKNOWN
    monkeypatch.undo()
    assert life_of(tmp_path) is Life.UNKNOWN


def test_a_run_that_is_held_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "TRY_SECONDS", 0.0)
    with (
        held(tmp_path),
        pytest.raises(ConfigError, match=f"{tmp_path.name} is still running"),
        held(tmp_path),
    ):
        pass
