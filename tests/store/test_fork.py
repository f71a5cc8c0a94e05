"""Forks while reads are in flight: parent and child continue, and the child holds none of its parent's connections."""

import dataclasses
import functools
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

import torchobj
from tests.support.forking import in_child
from tests.support.interrupting import interrupted
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.datasets.listing import PrefixListing

pytestmark = pytest.mark.providers("s3", "gs")


def sockets_of(pid):
    """Returns the inode numbers of a process's sockets."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return {link for link in links if link.startswith("socket:")}


def tcp_inodes():
    """Returns the inode numbers of TCP sockets in `/proc/net/tcp`."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {f"socket:[{line.split()[9]}]" for line in lines}


@pytest.fixture
def store(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(32):
        store.put(f"k{number}", f"body {number}".encode() * 100)
    return store


KEYS = [f"k{number}" for number in range(32)]
BODIES = [f"body {number}".encode() * 100 for number in range(32)]


def test_a_child_reads_after_its_parent_and_the_parent_after_the_child(store):
    assert store.get_many(KEYS) == BODIES
    assert in_child(lambda: store.get_many(KEYS) == BODIES) == "True"
    assert store.get_many(KEYS) == BODIES
    assert in_child(lambda: in_child(lambda: store.get("k1") == BODIES[1])) == "'True'"


def test_a_child_continues_to_read_a_file_that_its_parent_opened(bucket, store):
    body = bytes(range(256)) * (12 << 12)
    store.put("large", body)
    with torchobj.open(f"{bucket.url}/large", config=bucket.config) as file:
        assert file.read(3 << 20) == body[: 3 << 20]
        assert in_child(lambda: (file.tell(), file.read() == body[3 << 20 :])) == repr((3 << 20, True))
        assert file.read() == body[3 << 20 :]


def test_a_child_cannot_use_its_parents_writer_or_listing(bucket, store):
    pages = iter(store.list().pages())
    next(pages)
    with torchobj.open(f"{bucket.url}/written", "wb", config=bucket.config) as file:
        file.write(b"by the ")

        def write():
            file.write(b"child")

        assert "this writer belongs to the parent" in in_child(write)
        assert "this listing belongs to the parent" in in_child(lambda: next(pages))

        def drop():
            nonlocal file, pages
            del file, pages
            return store.get("k1") == BODIES[1]

        assert in_child(drop) == "True"
        file.write(b"parent")
    assert bucket.body("written") == b"by the parent"


def test_a_child_does_not_close_a_file_that_reuses_the_number_of_its_parents_socket(bucket, store):
    file = torchobj.open(f"{bucket.url}/k1", config=bucket.config)
    file.read(4)

    def child():
        # Low numbers: those of the parent's sockets that were closed.
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
        assert file.read() == BODIES[1][4:]
        file.close()
        return all(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in opened)

    assert in_child(child) == "True"


def test_a_child_holds_none_of_its_parents_connections(store):
    """Runs in its own process, where every TCP socket is torchobj's."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        parent, child, right = pool.apply_async(compare_sockets_of_parent_and_child, (store,)).get(90)
    assert parent > 0, "the parent keeps connections"
    assert (child, right) == ("set()", "True")


def compare_sockets_of_parent_and_child(store):
    assert store.get_many(KEYS) == BODIES
    ours = sockets_of(os.getpid()) & tcp_inodes()
    child = in_child(lambda: sockets_of(os.getpid()) & tcp_inodes())
    return len(ours), child, in_child(lambda: store.get_many(KEYS) == BODIES)


def fork_while_reading(store, forks):
    stop = threading.Event()
    errors = []

    def read():
        while not stop.is_set():
            try:
                assert store.get_many(KEYS) == BODIES
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for number in range(forks):
            if number % 10 == 0:
                assert in_child(lambda: store.get_many(KEYS[:4]) == BODIES[:4]) == "True"
            else:
                assert in_child(lambda: sockets_of(os.getpid()) & tcp_inodes()) == "set()"
    finally:
        stop.set()
        for reader in readers:
            reader.join(150)
    return errors, [reader.is_alive() for reader in readers]


@pytest.mark.parametrize("forks", [15, pytest.param(200, marks=pytest.mark.matrix)])
def test_forks_while_reads_are_in_flight_never_hang(store, forks):
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply_async(fork_while_reading, (store, forks)).get(100) == ([], [False, False])


def first_request(store, delay_s):
    """Forks while two threads make this process's first requests, and reads in the child."""
    readers = [threading.Thread(target=store.get_many, args=(KEYS[:8],), daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    # The delay selects another moment of the first request each time; nothing waits for it.
    time.sleep(delay_s)
    return in_child(lambda: store.get_many(KEYS[:4]) == BODIES[:4])


def fork_within_first_requests(store, moments):
    """Each attempt runs in a new process: a child of this one, which itself makes no request."""
    return {in_child(functools.partial(first_request, store, number * 5e-3 / moments)) for number in range(moments)}


@pytest.mark.parametrize("moments", [6, pytest.param(50, marks=pytest.mark.matrix)])
def test_a_child_that_is_forked_within_its_parents_first_request_reads(store, moments):
    """A fork never sees half of what the first request sets up for the process, libraries included."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply_async(fork_within_first_requests, (store, moments)).get(100) == {repr("True")}


def test_a_child_can_drop_buffers_of_the_parent(store):
    buffers = store.get_many(KEYS) + [torchobj.Buffer(bytes(1 << 20)) for _ in range(20)]

    def drop():
        buffers.clear()
        return store.get_many(KEYS) == BODIES

    assert in_child(drop) == "True"
    assert [bytes(buffer) for buffer in buffers[:32]] == BODIES


def test_a_child_does_not_end_a_writer_of_the_parent(store, bucket):
    file = torchobj.open(f"{bucket.url}/big", "wb", config=bucket.config)
    file.write(bytes(9 << 20))
    assert in_child(lambda: store.get("k1") == BODIES[1]) == "True"
    file.write(bytes(9 << 20))
    file.close()
    assert store.head("big").size == 18 << 20


def read_two(store):
    return [bytes(data) for data in store.get_many(KEYS[:2])]


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_store_can_be_passed_to_other_processes(store, context):
    assert store.get("k0") == BODIES[0]
    with multiprocessing.get_context(context).Pool(1) as pool:
        assert pool.apply_async(read_two, (store,)).get(90) == BODIES[:2]


def test_ctrl_c_interrupts_any_blocking_call_at_once(bucket, control):
    patient = dataclasses.replace(bucket.config, first_byte_timeout_s=100.0)
    store = torchobj.Store(bucket.url, config=patient)
    store.put("k", b"x")
    file = torchobj.open(f"{bucket.url}/w", "wb", config=patient)
    calls = {
        "get": lambda: store.get("k"),
        "get_many": lambda: store.get_many(["k"] * 10, into=[bytearray(10) for _ in range(10)]),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("p", bytes(100)),
        "head": lambda: store.head("k"),
        "length": lambda: len(bucket.map_dataset(bucket.url, config=patient)),
        "close": file.close,
        "read": lambda: torchobj.open(f"{bucket.url}/k", config=patient).read(),
    }
    for name, call in calls.items():
        print(name)
        with interrupted(control), pytest.raises(KeyboardInterrupt):
            call()
    assert store.get("k") == b"x"
    assert file.closed


def test_a_child_lists_a_dataset_that_another_thread_is_listing_at_the_fork(bucket, store, monkeypatch):
    lists, began, go = PrefixListing._load, threading.Event(), threading.Event()

    def blocking_listing(self):
        began.set()
        go.wait()
        return lists(self)

    monkeypatch.setattr(PrefixListing, "_load", blocking_listing)
    dataset = bucket.map_dataset(f"{bucket.url}/", config=bucket.config)
    thread = threading.Thread(target=len, args=(dataset,))
    thread.start()
    assert began.wait(30)

    def count():
        go.set()
        return len(dataset)

    try:
        assert in_child(count) == str(len(KEYS))
    finally:
        go.set()
        thread.join(150)
    assert len(dataset) == len(KEYS)
