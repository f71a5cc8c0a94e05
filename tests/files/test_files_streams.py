"""Streams of unknown length become one object, or none if they fail."""

import errno
import io
import os
import subprocess
import sys
import threading

import pytest

import torchobj
from torchobj import exceptions, files

pytestmark = pytest.mark.providers("s3", "gs")

MIB = 1 << 20


@pytest.fixture
def upload(bucket):
    def upload(stream, **arguments):
        return files.upload_stream(stream, f"{bucket.url}/k", config=bucket.config, **arguments)

    return upload


class Reader:
    """A file with `read` only."""

    def __init__(self, data):
        self._file = io.BytesIO(data)
        self.read = self._file.read


@pytest.mark.parametrize("size", [0, 10, 19 * MIB + 3])
@pytest.mark.parametrize("kind", ["file", "reader", "iterator", "tensor-like"])
def test_each_kind_of_stream_becomes_the_object(bucket, upload, size, kind):
    data = os.urandom(size)
    stream = {
        "file": io.BytesIO(data),
        "reader": Reader(data),
        "iterator": (data[at : at + 70_001] for at in range(0, size, 70_001)),
        "tensor-like": [memoryview(data), bytearray()],
    }[kind]
    done = upload(stream)
    assert (done.size, done.path, done.skipped, done.version) == (size, None, False, bucket.version("k"))
    assert bucket.body("k") == data


def test_a_fifo_is_read_to_its_end(bucket, upload, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(bytes(3 * MIB)))
    writer.start()
    with (tmp_path / "fifo").open("rb") as stream:
        assert upload(stream).size == 3 * MIB
    writer.join()


def test_an_error_of_the_stream_leaves_no_object_and_no_parts(bucket, upload):
    def broken():
        yield bytes(20 * MIB)
        raise LookupError("the source failed")

    with pytest.raises(LookupError, match="the source failed"):
        upload(broken())
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_an_exception_of_progress_aborts_the_upload(bucket, upload, monkeypatch):
    monkeypatch.setattr("torchobj.files.streams._PROGRESS_INTERVAL_S", 0)

    def stop(now):
        assert now.files_total is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload([bytes(20 * MIB), b"x"], progress=stop)
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_attributes_conditions_and_the_last_progress(bucket, upload):
    seen = []
    upload([b"ab", b"c"], content_type="text/plain", metadata={"a": "1"}, progress=seen.append)
    assert seen == [files.Progress(1, 1, 3, 3, 0)]
    info = torchobj.Store(bucket.url, config=bucket.config).head("k")
    assert (info.content_type, info.metadata) == ("text/plain", {"a": "1"})
    with pytest.raises(exceptions.PreconditionFailedError):
        upload([b"x"], overwrite=False)


@pytest.mark.parametrize("stream", ["path", b"bytes", 3, io.StringIO, ["text"], [1]], ids=repr)
def test_what_is_no_stream_of_bytes_is_refused(bucket, upload, stream):
    stream = stream("text") if stream is io.StringIO else stream
    with pytest.raises(exceptions.ConfigError, match="stream"):
        upload(stream)
    assert bucket.keys() == []


def test_a_non_blocking_pipe_without_data_is_refused(upload):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as stream, pytest.raises(exceptions.ConfigError, match="non-blocking"):
        upload(stream)
    os.close(writing)


FULL = """
import resource, sys
import torchobj
store = torchobj.Store("memory://full")
store.put("k", bytes(20 << 20))
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    store.download_file("k", sys.argv[1])
except torchobj.StoreError as error:
    print(error.errno, error)
"""


def test_a_file_that_is_too_large_for_the_system_is_refused_and_its_temporary_file_is_removed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "k"), str(5 << 20)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    assert done.stdout.startswith(f"{errno.EFBIG} put file://{tmp_path}/k: no space for the file"), done
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_refused_with_the_number_of_missing_bytes(tmp_path):
    command = 'mount -t tmpfs -o size=12m none "$0" && "$1" -c "$2" "$0/k" -1 && ls -A "$0"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, str(tmp_path), sys.executable, FULL],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.stdout.startswith(f"{errno.ENOSPC} put file://{tmp_path}/k: no space for the file: "), done
    assert f"it has {20 << 20} bytes, the file system lacks {8 << 20} of them: " in done.stdout
    assert done.stdout.count("\n") == 1
