"""Devices, FIFOs, sockets and descriptors are written and never replaced; files without a size are read to their ends."""

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import torchobj
from torchobj import exceptions, files

MIB = 1 << 20
SIZES = [0, 5, 70_000, pytest.param(21 * MIB + 3, marks=pytest.mark.matrix)]


def data_of(size):
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


def written_by_put(url, data):
    base, _, name = url.rpartition("/")
    torchobj.Store(base).put(name, data)


def written_by_writer(url, data):
    with torchobj.open(url, "wb") as file:
        for start in range(0, len(data), MIB):
            file.write(data[start : start + MIB])


def written_by_stream(url, data):
    files.upload_stream([data[:3], data[3:]], url)


def written_by_upload(url, data):
    source = Path(url.removeprefix("file://")).parent / "source"
    source.write_bytes(data)
    files.upload_file(source, url)


def written_by_copy(url, data):
    source = Path(url.removeprefix("file://")).parent / "source"
    source.write_bytes(data)
    base, _, name = url.rpartition("/")
    torchobj.Store(base).copy(f"file://{source}", name)


def written_by_download(url, data):
    torchobj.Store("memory://special").put("k", data)
    files.download_file("memory://special/k", url.removeprefix("file://"))


WRITES = [
    written_by_put,
    written_by_writer,
    written_by_stream,
    written_by_upload,
    written_by_copy,
    written_by_download,
]


@contextlib.contextmanager
def read_meanwhile(path):
    """Reads a FIFO in a thread; yields the list that receives its bytes."""
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    yield found
    reader.join()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", WRITES)
def test_a_fifo_receives_the_bytes_and_stays(write, size, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    data = data_of(size)
    for name in ("fifo", "link"):
        with read_meanwhile(tmp_path / "fifo") as found:
            write(f"file://{tmp_path}/{name}", data)
        assert found == [data]
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert {*os.listdir(tmp_path)} <= {"fifo", "link", "source"}


@pytest.mark.parametrize("write", WRITES)
def test_a_device_is_written_and_stays(write, tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    write(f"file://{tmp_path}/null", b"bytes")
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    assert (tmp_path / "null").is_symlink()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(exceptions.StoreError, match="space") as error:
        write(f"file://{tmp_path}/full", b"bytes")
    assert error.value.errno == errno.ENOSPC and "get" not in error.value.operation
    if os.geteuid() == 0:
        os.mknod(tmp_path / "own", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        write(f"file://{tmp_path}/own", b"bytes")
        assert stat.S_ISCHR((tmp_path / "own").lstat().st_mode)


@pytest.mark.parametrize("write", WRITES)
def test_a_descriptor_is_written_at_its_position(write, tmp_path):
    with (tmp_path / "out").open("w+b", buffering=0) as out:
        out.write(b"before ")
        (tmp_path / "link").symlink_to(f"/dev/fd/{out.fileno()}")
        write(f"file://{tmp_path}/link", b"object ")
        out.write(b"after")
    assert (tmp_path / "out").read_bytes() == b"before object after"


@pytest.mark.parametrize("write", WRITES)
def test_a_socket_is_not_replaced(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(exceptions.InvalidKeyError, match="socket"):
            write(f"file://{tmp_path}/socket", b"bytes")
        assert stat.S_ISSOCK((tmp_path / "socket").lstat().st_mode)


def test_a_descriptor_that_is_a_socket_is_written(tmp_path):
    one, other = socket.socketpair()
    with one, other:
        torchobj.Store("file:///dev/fd").put(str(one.fileno()), b"bytes")
        assert other.recv(10) == b"bytes"


@pytest.mark.parametrize("condition", [{"overwrite": False}, {"if_version": "1-2-3"}])
def test_a_condition_is_refused(condition, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    store = torchobj.Store(f"file://{tmp_path}")
    with pytest.raises(exceptions.UnsupportedError, match="without a condition"):
        store.put("fifo", b"x", **condition)
    with (
        pytest.raises(exceptions.UnsupportedError, match="without a condition"),
        store.open("fifo", "wb", **condition) as file,
    ):
        file.write(b"x")
    with pytest.raises(exceptions.UnsupportedError, match="without a condition"):
        files.upload_stream([bytes(20 * MIB)], f"file://{tmp_path}/fifo", **condition)


def test_special_files_are_not_deleted(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "null").symlink_to("/dev/null")
    store = torchobj.Store(f"file://{tmp_path}")
    for name in ("fifo", "null"):
        with pytest.raises(exceptions.InvalidKeyError, match="neither replaced nor deleted"):
            store.delete(name)
        with pytest.raises(exceptions.InvalidKeyError, match="neither replaced nor deleted"):
            store.delete(name, if_version="1-2-3")
    assert {*os.listdir(tmp_path)} == {"fifo", "null"}


def test_a_link_to_a_regular_file_is_replaced(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    torchobj.Store(f"file://{tmp_path}").put("link", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()


def test_a_tree_follows_no_link_below_its_target_and_writes_no_special_file(tmp_path):
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for folder in (source / "link", source / "deep" / "er", target, outside):
        folder.mkdir(parents=True)
    for name in ("link/k", "deep/er/k", "fifo", "null", "file", "good"):
        (source / name).write_bytes(b"new")
    (target / "link").symlink_to(outside)
    (target / "deep").symlink_to(outside)
    (target / "null").symlink_to("/dev/null")
    (target / "file").symlink_to(outside / "file")
    os.mkfifo(target / "fifo")
    with pytest.raises(exceptions.TransferError) as error:
        files.upload(source, f"file://{target}")
    assert [name for name, _ in error.value.failures] == ["deep/er/k", "fifo", "link/k", "null"]
    assert os.listdir(outside) == []
    assert not (target / "file").is_symlink()
    assert (target / "good").read_bytes() == b"new"
    # The target itself may be behind a link.
    (tmp_path / "to target").symlink_to(target)
    assert files.upload(source, f"file://{tmp_path}/to target", glob="good").transferred == 1


def test_a_write_without_a_reader_is_interrupted(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    script = (
        "import _thread, sys, threading, torchobj\n"
        "threading.Timer(0.3, _thread.interrupt_main).start()\n"
        "try:\n"
        f"    torchobj.Store('file://{tmp_path}').put('fifo', b'x')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=150).returncode == 3
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/cpuinfo", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_a_file_without_a_size_is_read_to_its_end(path, tmp_path):
    if not Path(path).exists():
        pytest.skip(f"this system has no {path}")
    store = torchobj.Store(f"memory://{tmp_path.name}")
    done = files.upload_file(path, f"{store.url}/k", skip_unchanged=True)
    content = bytes(store.get("k"))
    assert content
    assert (done.size, done.skipped) == (len(content), False)
    folder, _, name = path.rpartition("/")
    local = torchobj.Store(f"file://{folder}")
    whole = Path(path).read_bytes()
    assert abs(local.head(name).size - len(whole)) < 100
    assert bytes(local.get(name)[:5]) == whole[:5]
    assert bytes(local.get_range(name, 1, 4)) == whole[1:4]
    assert local.open(name, "rb").read(5) == whole[:5]
    assert torchobj.Store(f"file://{tmp_path}").copy(f"file://{path}", "copy")
    assert (tmp_path / "copy").read_bytes()[:5] == whole[:5]


def test_files_without_a_size_in_a_tree_are_read_to_their_ends(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "status").symlink_to("/proc/self/status")
    (tmp_path / "proc" / "empty").write_bytes(b"")
    done = files.upload(tmp_path / "proc", f"memory://{tmp_path.name}/p", skip_unchanged=True)
    store = torchobj.Store(f"memory://{tmp_path.name}")
    assert bytes(store.get("p/status")).startswith(b"Name:")
    assert done.bytes == store.head("p/status").size
    assert store.head("p/empty").size == 0
    listed = {info.key: info.size for info in torchobj.Store(f"file://{tmp_path}/proc").list()}
    assert listed == {"empty": 0, "status": None}


@pytest.mark.parametrize("size", SIZES)
def test_a_fifo_is_uploaded_to_its_end(size, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    data, seen = data_of(size), []
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(data))
    writer.start()
    done = files.upload_file(tmp_path / "fifo", f"memory://{tmp_path.name}/k", progress=seen.append)
    writer.join()
    assert bytes(torchobj.Store(f"memory://{tmp_path.name}").get("k")) == data
    assert (done.size, seen[-1].bytes_done, seen[-1].bytes_total) == (size, size, size)


MODES = [0o600, 0o640, 0o400, 0o666, 0o755]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_a_replaced_file_keeps_its_permissions_and_others_follow_the_umask(write, mode, tmp_path):
    (tmp_path / "k").write_bytes(b"old")
    (tmp_path / "k").chmod(mode)
    write(f"file://{tmp_path}/k", b"new bytes")
    assert (tmp_path / "k").read_bytes() == b"new bytes"
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == mode
    (tmp_path / "plain").write_bytes(b"")
    write(f"file://{tmp_path}/new", b"new bytes")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_the_temporary_file_is_not_more_permissive_than_the_file_that_it_replaces(tmp_path):
    (tmp_path / "k").write_bytes(b"old")
    (tmp_path / "k").chmod(0o600)
    with torchobj.open(f"file://{tmp_path}/k", "wb") as file:
        file.write(bytes(20 * MIB))
        [temporary] = [name for name in os.listdir(tmp_path) if name.startswith(".torchobj-") and "key" not in name]
        assert stat.S_IMODE((tmp_path / temporary).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


@pytest.mark.parametrize("write", WRITES)
def test_a_name_may_have_255_bytes(write, tmp_path):
    write(f"file://{tmp_path}/{'n' * 255}", b"bytes")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"bytes"
