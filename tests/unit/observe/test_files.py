"""Claims about appending lines, replacing files, and surviving a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.observe.files import Guard, append_lines, replacing


def test_append_makes_the_folder_and_adds_lines(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    append_lines(path, b"1\n2\n")
    append_lines(path, b"3\n")
    assert path.read_bytes() == b"1\n2\n3\n"


@pytest.mark.parametrize("before", [b"", b"whole\n", b"whole\n" + b"x" * 200_000 + b"\n"])
def test_half_line_of_a_killed_writer_is_cut_before_the_next(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(before + b'{"step": 7, "rew')
    append_lines(path, b"next\n")
    assert path.read_bytes() == before + b"next\n"


def test_half_line_longer_than_one_read_is_cut_whole(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(b"whole\n" + b"y" * 300_000)
    append_lines(path, b"next\n")
    assert path.read_bytes() == b"whole\nnext\n"


def test_device_without_space_is_an_os_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_lines(Path("/dev/full"), b"1\n")


_LIMITED = """
import resource, sys
from pathlib import Path
from offbeat.observe.files import append_lines
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
path = Path(sys.argv[1])
append_lines(path, b"a" * 899 + b"\\n")
try:
    append_lines(path, b"b" * 899 + b"\\n")
except OSError as exc:
    print(exc.errno)
"""


def test_write_that_fails_half_way_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    command = [sys.executable, "-c", _LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "27", done  # EFBIG
    assert path.read_bytes() == b"a" * 899 + b"\n"


def test_replacing_keeps_the_old_file_and_no_litter_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def replace() -> None:
        with replacing(path) as aside:
            aside.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_replacing_renames_so_that_a_reader_of_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with path.open() as reader:
        with replacing(path) as aside:
            aside.write_text("new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_guard_reports_once_and_never_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    guard, tries = Guard("metrics", "/runs/x/metrics.jsonl"), []

    def write() -> None:
        tries.append(1)
        raise OSError(28, "No space left on device")

    assert [guard.run(write) for _ in range(3)] == [False, False, False]
    assert len(tries) == 1
    assert len(caplog.records) == 1
    assert "/runs/x/metrics.jsonl" in caplog.text
    assert "No space left" in caplog.text
    assert "training goes on" in caplog.text
    assert "Free space" in caplog.text
    assert guard.failure is not None


def test_guard_lets_an_interrupt_pass() -> None:
    def write() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard("metrics", "x").run(write)


def test_guard_survives_errors_of_our_own_tree(caplog: pytest.LogCaptureFixture) -> None:
    def write() -> None:
        raise OffbeatError("tracker says no")

    assert not Guard("metrics", "tracker").run(write)
    assert "tracker says no" in caplog.text
