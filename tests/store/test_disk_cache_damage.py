"""The disk cache while processes are killed and files are damaged: right bytes, and never too many."""

import contextlib
import fcntl
import os
import pickle
import random
import time
from pathlib import Path

import pytest

import torchobj
from tests.support import warm_python
from tests.support.disk_caches import COUNT, body, disk_bytes, options, written
from torchobj import _torchobj

#: Reads all objects in random order, again and again, until it is killed.
READER = """
import pickle, random, sys, torchobj
config = pickle.loads(bytes.fromhex(sys.argv[2]))
dataset = torchobj.ObjectMapDataset(sys.argv[1], transform=bytes, config=config)
print("ready", flush=True)
while True:
    for number in random.sample(range(len(dataset)), len(dataset)):
        assert dataset[number] == open(f"{sys.argv[3]}/{number:02}", "rb").read()
    assert torchobj.metrics()["torchobj.cache_damaged"] == 0
"""


def _sampled(cache, max_bytes, choose):
    """Compares the count with the files at one moment, and returns their size. Makes some of them expire, and deletes others,
    so that readers write.
    """
    with open(cache / "v1" / "usage", "rb") as usage:
        # Files are reserved, published and deleted under this lock.
        fcntl.flock(usage, fcntl.LOCK_EX)
        used = int.from_bytes(usage.read(8), "little")
        found = sum(map(disk_bytes, cache.rglob("*")))
        assert found <= used <= max_bytes
        for file in cache.glob("v1/??/*"):
            if choose.random() < 0.1:
                os.utime(file, (1e9, 1e9))
    files = _torchobj.CacheFiles(cache)
    for _ in files:
        if choose.random() < 0.3:
            files.remove()
    return found


def _killed_readers(bucket, tmp_path, kills):
    """Kills readers at random moments while others read; their bytes are right, and so is the space that they use."""
    cache, right, max_bytes, choose = tmp_path / "cache", tmp_path / "right", 1 << 20, random.Random(5)
    right.mkdir()
    for number in range(COUNT):
        # 2 MiB in all.
        content = body(number) * 3
        (right / f"{number:02}").write_bytes(content)
        bucket.write(f"large/{number:02}", content)
    small = bucket.config.replaced(cache=options(cache, max_bytes=max_bytes))
    arguments = ["-c", READER, f"{bucket.url}/large/", pickle.dumps(small).hex(), str(right)]
    most = 0
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(kills):
            while len(running) < min(3, kills - number):
                running.append(warm_python.Process(arguments))
                stack.callback(running[-1].kill)
                assert running[-1].stdout.readline() == "ready\n", running[-1].errors()
            # The newest ones write: those that once found no space wait for a second.
            process = running.pop(choose.randrange(len(running)))
            until_s = time.monotonic() + choose.random() * 0.05
            while time.monotonic() < until_s:
                most = max(most, _sampled(cache, max_bytes, choose))
            assert process.poll() is None, process.errors()
            with process:
                process.kill()
                process.wait(30)
    files = _torchobj.CacheFiles(cache, verify=True)
    files.correct()
    sizes = [size for _, size, _, intact in files if intact]
    assert sum(sizes) == files.used_bytes() and most > 0 and files.others() == []
    assert len(sizes) == len(list(cache.glob("v1/??/*"))) and list((cache / "v1" / "writing").iterdir()) == []


def test_killed_processes_leave_only_right_files(bucket, tmp_path):
    _killed_readers(bucket, tmp_path, 24)


@pytest.mark.matrix
def test_a_thousand_killed_processes_leave_only_right_files(bucket, tmp_path):
    _killed_readers(bucket, tmp_path, 1000)


def _flip(file, other, choose):
    content = bytearray(file.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    file.write_bytes(content)


def _swap(file, other, choose):
    file.rename(file.with_name("swap"))
    other.rename(file)
    file.with_name("swap").rename(other)


def _replace(make):
    def replace(file, other, choose):
        file.unlink()
        make(file)

    return replace


#: What happens to a file of the cache, or to two.
DAMAGES = [
    _flip,
    _swap,
    lambda file, other, choose: os.truncate(file, choose.randrange(file.stat().st_size)),
    lambda file, other, choose: os.truncate(file, file.stat().st_size + choose.randrange(1, 9000)),
    lambda file, other, choose: file.write_bytes(other.read_bytes()),
    lambda file, other, choose: file.write_bytes(bytes(file.stat().st_size)),
    lambda file, other, choose: other.rename(file),
    _replace(lambda file: None),
    _replace(lambda file: file.symlink_to("/etc/hostname")),
    _replace(os.mkfifo),
    _replace(Path.mkdir),
]


def _damaged_files(bucket, tmp_path, rounds):
    """Damages a file of the cache, reads all objects, and again."""
    cache, numbers, choose = tmp_path / "cache", range(40, 52), random.Random(7)
    config = bucket.config.replaced(cache=options(cache))
    for number in numbers:
        bucket.write(f"some/{number:02}", body(number) * 6)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/some/", transform=bytes, config=config)
    right = [body(number) * 6 for number in numbers]
    assert [dataset[at] for at in range(12)] == right
    for damage in range(rounds):
        written()
        files = sorted(cache.glob("v1/??/*"))
        assert len(files) == 12
        file, other = choose.sample(files, 2)
        DAMAGES[damage % len(DAMAGES)](file, other, choose)
        for at in choose.sample(range(12), 12):
            assert dataset[at] == right[at]
        written()
        if file.is_dir():
            # It is not of the cache, and no file takes its place.
            file.rmdir()
        for at in range(12):
            assert dataset[at] == right[at]
    written()
    files = _torchobj.CacheFiles(cache, verify=True)
    files.correct()
    assert all(intact for _, _, _, intact in files) and files.others() == []
    assert files.used_bytes() == sum(map(disk_bytes, cache.rglob("*")))


def test_damaged_files_never_change_what_is_read(bucket, tmp_path):
    _damaged_files(bucket, tmp_path, 3 * len(DAMAGES))


@pytest.mark.matrix
def test_a_thousand_damaged_files_never_change_what_is_read(bucket, tmp_path):
    _damaged_files(bucket, tmp_path, 1000)
