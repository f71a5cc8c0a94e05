"""One file and one object: the same bytes, attributes and times on both sides, and nothing half-written in between."""

import contextlib
import dataclasses
import errno
import io
import os
import stat
import sys
import threading

import pytest

import torchobj
from tests.support.interrupting import interrupted
from torchobj import exceptions, files

pytestmark = pytest.mark.providers("s3", "gs")

MIB = 1 << 20
#: Below and above the size from which objects are transferred in parts.
SIZES = [0, 1, 300_000, 16 * MIB - 1, 16 * MIB, 21 * MIB + 17]


@pytest.fixture(params=["bucket", "memory", "file"])
def place(request, tmp_path):
    """The URL of a prefix without objects, and its configuration."""
    if request.param == "bucket":
        bucket = request.getfixturevalue("bucket")
        return bucket.url, bucket.config
    return (f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/store"), None


@pytest.fixture
def file(tmp_path):
    return tmp_path / "local" / "file.bin"


def write(path, size, seed=0):
    path.parent.mkdir(exist_ok=True)
    data = bytes(range(seed, 251)) * (size // 200 + 1)
    path.write_bytes(data[:size])
    return data[:size]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_uploaded_and_downloaded_unchanged(place, file, tmp_path, size):
    url, config = place
    data = write(file, size)
    sent = files.upload_file(file, f"{url}/folder/k", config=config)
    assert (sent.url, sent.path, sent.size, sent.skipped) == (f"{url}/folder/k", file, size, False)
    back = files.download_file(f"{url}/folder/k", tmp_path / "new" / "back", config=config)
    assert (back.size, back.version, back.skipped) == (size, sent.version, False)
    assert (tmp_path / "new" / "back").read_bytes() == data
    assert os.listdir(tmp_path / "new") == ["back"]


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_clients_of_the_provider_read_what_was_uploaded(bucket, file, size):
    data = write(file, size)
    files.upload_file(file, f"{bucket.url}/k", config=bucket.config)
    assert bucket.body("k") == data
    assert bucket.uploads() == []


@pytest.mark.parametrize("size", [0, 10, 17 * MIB])
def test_what_clients_of_the_provider_wrote_is_downloaded(bucket, tmp_path, size):
    data = os.urandom(size)
    bucket.write("k", data)
    files.download_file(f"{bucket.url}/k", tmp_path / "k", config=bucket.config)
    assert (tmp_path / "k").read_bytes() == data


def test_attributes_and_conditions_are_those_of_put(bucket, file):
    write(file, 10)
    sent = files.upload_file(
        file, f"{bucket.url}/k", config=bucket.config, content_type="text/plain", metadata={"a": "1"}
    )
    info = torchobj.Store(bucket.url, config=bucket.config).head("k")
    assert info.content_type == "text/plain"
    assert info.metadata["a"] == "1"
    with pytest.raises(exceptions.PreconditionFailedError):
        files.upload_file(file, f"{bucket.url}/k", config=bucket.config, overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        files.upload_file(
            file, f"{bucket.url}/k", config=bucket.config, if_version='"0"' if "s3" in bucket.url else "1"
        )
    files.upload_file(file, f"{bucket.url}/k", config=bucket.config, if_version=sent.version)


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_the_time_of_modification_is_kept_in_metadata_and_restored(bucket, file, tmp_path, size):
    write(file, size)
    os.utime(file, ns=(0, 1_600_000_000_123_456_700))
    files.upload_file(file, f"{bucket.url}/k", config=bucket.config)
    store = torchobj.Store(bucket.url, config=bucket.config)
    assert store.head("k").metadata["mtime"] == "1600000000.1234567"
    store.download_file("k", tmp_path / "k")
    assert (tmp_path / "k").stat().st_mtime_ns == 1_600_000_000_123_456_700


def test_without_a_time_in_metadata_the_file_has_that_of_the_object(bucket, tmp_path):
    bucket.write("k", b"x")
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.download_file("k", tmp_path / "k")
    assert (tmp_path / "k").stat().st_mtime == store.head("k").last_modified.timestamp()


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_unchanged_files_are_skipped_in_both_directions_and_others_are_not(place, file, tmp_path, size):
    url, config = place
    write(file, size)
    target = tmp_path / "back"
    first = files.upload_file(file, f"{url}/k", config=config, skip_unchanged=True)
    again = files.upload_file(file, f"{url}/k", config=config, skip_unchanged=True)
    assert (first.skipped, again.skipped, again.version) == (False, True, first.version)
    assert not files.download_file(f"{url}/k", target, config=config, skip_unchanged=True).skipped
    assert files.download_file(f"{url}/k", target, config=config, skip_unchanged=True).skipped
    data = write(file, size, seed=1)
    assert not files.upload_file(file, f"{url}/k", config=config, skip_unchanged=True).skipped
    assert not files.download_file(f"{url}/k", target, config=config, skip_unchanged=True).skipped
    assert target.read_bytes() == data


def test_an_object_of_another_client_is_compared_by_its_bytes(bucket, tmp_path):
    bucket.write("k", b"same")
    (tmp_path / "k").write_bytes(b"same")
    url = f"{bucket.url}/k"
    assert files.upload_file(tmp_path / "k", url, config=bucket.config, skip_unchanged=True).skipped
    assert files.download_file(url, tmp_path / "k", config=bucket.config, skip_unchanged=True).skipped
    (tmp_path / "k").write_bytes(b"diff")
    assert not files.download_file(url, tmp_path / "k", config=bucket.config, skip_unchanged=True).skipped


def test_a_selected_version_is_downloaded_and_another_one_is_refused(bucket, file, tmp_path):
    data = write(file, 17 * MIB)
    store = torchobj.Store(bucket.url, config=bucket.config)
    version = store.upload_file("k", file).version
    assert store.download_file("k", tmp_path / "k", version=version).version == version
    assert (tmp_path / "k").read_bytes() == data
    store.put("k", b"new")
    with pytest.raises(exceptions.ObjectChangedError):
        store.download_file("k", tmp_path / "k", version='"0"' if "s3" in bucket.url else "1")
    assert (tmp_path / "k").read_bytes() == data


def test_progress_is_reported_in_the_calling_thread_and_at_the_end(bucket, file, tmp_path):
    write(file, 17 * MIB)
    seen = []
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.upload_file("k", file, progress=lambda now: seen.append((threading.get_ident(), now)))
    assert seen[-1] == (threading.get_ident(), files.Progress(1, 1, 17 * MIB, 17 * MIB, 0))
    store.download_file("k", tmp_path / "k", progress=lambda now: seen.append((threading.get_ident(), now)))
    assert seen[-1] == (threading.get_ident(), files.Progress(1, 1, 17 * MIB, 17 * MIB, 0))
    store.download_file("k", tmp_path / "k", skip_unchanged=True, progress=lambda now: seen.append((0, now)))
    assert seen[-1][1] == files.Progress(1, 1, 17 * MIB, 17 * MIB, 1)
    assert {thread for thread, _ in seen} <= {threading.get_ident(), 0}


class StopError(Exception):
    pass


def stop(now):
    raise StopError


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_an_exception_of_progress_aborts_the_transfer(bucket, control, file, tmp_path, size):
    write(file, size)
    store = torchobj.Store(bucket.url, config=bucket.config)
    control.faults({"action": {"status": 503}})
    with pytest.raises(StopError):
        store.upload_file("k", file, progress=stop)
    with pytest.raises(StopError):
        store.download_file("k", tmp_path / "k", progress=stop)
    control.clear_faults()
    assert bucket.keys() == []
    assert os.listdir(tmp_path) == ["local"]


def test_an_interrupted_download_leaves_no_file_under_its_name(bucket, control, tmp_path):
    bucket.write("k", bytes(17 * MIB))
    store = torchobj.Store(bucket.url, config=bucket.config)
    (tmp_path / "k").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), interrupted(control, operation="GetObject"):
        store.download_file("k", tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == b"old"


def test_wrong_bytes_are_found_by_the_checksum_of_the_object(bucket, control, file, tmp_path):
    write(file, 17 * MIB)
    s3 = dataclasses.replace(bucket.config.s3, checksum="crc64nvme")
    store = torchobj.Store(bucket.url, config=dataclasses.replace(bucket.config, s3=s3))
    store.upload_file("k", file)
    control.faults({"operation": "GetObject", "key": "k", "action": {"corrupt_byte_at": 1000}})
    with pytest.raises(exceptions.IntegrityError, match="CRC"):
        store.download_file("k", tmp_path / "back")
    assert os.listdir(tmp_path) == ["local"]


def test_a_file_that_changes_during_its_upload_is_refused(bucket, control, file):
    write(file, 17 * MIB)

    def change(now):
        os.utime(file, ns=(0, 1))

    store = torchobj.Store(bucket.url, config=bucket.config)
    # The first part is answered after the file has changed.
    control.faults({"times": 1, "action": {"delay_first_byte_s": 2}})
    with pytest.raises(exceptions.ObjectChangedError, match="changed while it was uploaded"):
        store.upload_file("k", file, progress=change)
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_a_new_file_has_the_mode_of_the_umask_and_replaces_a_link_and_not_its_target(bucket, tmp_path):
    bucket.write("k", b"new")
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "link").symlink_to("other")
    torchobj.Store(bucket.url, config=bucket.config).download_file("k", tmp_path / "link")
    assert (tmp_path / "other").read_bytes() == b"other"
    found = (tmp_path / "link").lstat()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o666 & ~umask


class Bar:
    """The parts of a bar of tqdm that are used."""

    def __init__(self, total=None):
        self.n, self.total = 0, total

    def update(self, n=1):
        self.n += n


def test_progress_may_be_the_update_method_of_a_bar(bucket, file, tmp_path):
    write(file, size := 100_000)
    store = torchobj.Store(bucket.url, config=bucket.config)
    bar = Bar()
    store.upload_file("k", file, progress=bar.update)
    assert (bar.n, bar.total) == (size, size)
    store.download_file("k", tmp_path / "k", progress=bar.update)
    assert bar.n == 2 * size
    known = Bar(total=7)
    with file.open("rb") as stream:
        torchobj.files.upload_stream(stream, f"{bucket.url}/k", config=bucket.config, progress=known.update)
    assert (known.n, known.total) == (size, 7)


def test_tqdm_counts_bytes(bucket, file):
    tqdm = pytest.importorskip("tqdm")
    write(file, 100_000)
    with tqdm.tqdm(file=io.StringIO()) as bar:
        torchobj.Store(bucket.url, config=bucket.config).upload_file("k", file, progress=bar.update)
        assert bar.n == file.stat().st_size


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("fsync", OSError(errno.EINVAL, "the file system cannot")),
        ("fsync", OSError(errno.ENOTSUP, "the file system cannot")),
        ("open", PermissionError(errno.EACCES, "the folder cannot be read")),
    ],
    ids=["EINVAL", "ENOTSUP", "EACCES"],
)
def test_folders_are_created_where_their_names_cannot_be_made_durable(tmp_path, monkeypatch, function, error):
    def fail(*_, **__):
        raise error

    store = torchobj.Store(f"memory://{tmp_path.name}")
    store.put("k", b"x")
    monkeypatch.setattr(os, function, fail)
    files.download_file(f"{store.url}/k", tmp_path / "new" / "er" / "k")
    files.download(store.url, tmp_path / "tree" / "below")
    monkeypatch.undo()
    assert {path.read_bytes() for path in (tmp_path / "new" / "er" / "k", tmp_path / "tree" / "below" / "k")} == {b"x"}


def test_a_folder_that_cannot_be_made_durable_is_an_error(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "the disk failed")

    torchobj.Store(f"memory://{tmp_path.name}").put("k", b"x")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk failed"):
        files.download_file(f"memory://{tmp_path.name}/k", tmp_path / "new" / "k")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_bar_on_a_standard_error_that_is_closed_or_full_does_not_end_a_transfer(tmp_path, monkeypatch, is_full):
    (tmp_path / "file").write_bytes(b"12")
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full if is_full else None)
        assert files.upload_file(tmp_path / "file", f"memory://{tmp_path.name}/k", progress=True).size == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
