"""Bytes by name: what a reader gets, and what it is told when it gets nothing."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from offbeat.errors import WorkerError
from offbeat.launch.blob import read_blob, write_blob
from offbeat.types import BlobRef


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(3 << 20)], ids=len)
def test_a_blob_reads_back_equal(data: bytes) -> None:
    with write_blob(data) as blob:
        assert blob.ref.nbytes == len(data)
        assert read_blob(blob.ref) == data


def test_a_memoryview_of_numbers_is_written_as_its_bytes() -> None:
    with write_blob(memoryview(b"12345678").cast("q")) as blob:
        assert read_blob(blob.ref) == b"12345678"


def test_a_plain_file_is_a_blob_too(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"abc")
    ref = BlobRef(uri=str(path), nbytes=3, digest=xxhash.xxh3_128_hexdigest(b"abc"))
    assert read_blob(ref) == b"abc"


def test_a_closed_blob_is_gone_and_its_descriptor_with_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    blob = write_blob(b"abc")
    blob.close()
    blob.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(WorkerError, match=blob.ref.uri):
        read_blob(blob.ref)


def test_a_name_taken_over_by_a_pipe_is_refused_without_hanging() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(WorkerError, match="let it go"):
            read_blob(BlobRef(uri=f"/proc/{os.getpid()}/fd/{reader}", nbytes=1, digest=""))
    finally:
        os.close(reader)
        os.close(writer)


def test_another_size_or_digest_is_refused_by_uri() -> None:
    with write_blob(b"abc") as blob:
        with pytest.raises(WorkerError, match=rf"{blob.ref.uri} has 3 bytes, expected 4"):
            read_blob(replace(blob.ref, nbytes=4))
        with pytest.raises(WorkerError, match=rf"{blob.ref.uri} has digest"):
            read_blob(replace(blob.ref, digest="0" * 32))


def test_a_written_blob_cannot_be_changed_by_its_readers() -> None:
    with write_blob(b"abc") as blob:
        fd = os.open(blob.ref.uri, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.write(fd, b"xyz")
        finally:
            os.close(fd)
        assert read_blob(blob.ref) == b"abc"


def test_memory_that_is_refused_is_an_error_that_names_the_size() -> None:
    before = set(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WorkerError, match="putting 20,000 bytes into shared memory: OSError"):
            write_blob(bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) == before
