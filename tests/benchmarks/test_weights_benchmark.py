"""The benchmark of weights runs; its origin limits what it sends and makes faults; and several ranks are measured."""

import contextlib
import http.client
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.harness import Clients, JobError
from benchmarks.harness.measure import Worker
from benchmarks.harness.ranks import in_ranks
from benchmarks.lab import origin
from benchmarks.lab.objects import MIB

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the origin is for Linux")


@pytest.fixture(scope="module")
def running():
    with origin.running() as found:
        client = found.memory.boto3()
        client.put_object(Bucket=found.memory.bucket, Key="large", Body=os.urandom(4 * MIB))
        client.put_object(Bucket=found.memory.bucket, Key="small", Body=b"small")
        yield found


def read(running, name, timeout_s=30.0):
    netloc = urlsplit(running.memory.endpoint_url).netloc
    with contextlib.closing(http.client.HTTPConnection(netloc, timeout=timeout_s)) as connection:
        connection.request("GET", f"/memory/{name}")
        return len(connection.getresponse().read())


def test_the_origin_limits_what_all_connections_receive(running):
    running.set(rate=40 * MIB)
    began_s = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(partial(read, running), ["large", "large"])) == [4 * MIB, 4 * MIB]
    # 0.2 s without what may be sent at once.
    assert time.monotonic() - began_s > 0.15


def test_the_origin_resets_every_nth_large_body(running):
    running.set(reset=2)
    before = origin.counters(running.memory)
    assert read(running, "large") == 4 * MIB
    assert read(running, "small") == 5
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        read(running, "large")
    assert read(running, "large") == 4 * MIB
    assert (origin.counters(running.memory) - before)["faults"] == 1
    running.set()
    assert [read(running, "large") for _ in range(3)] == [4 * MIB] * 3


class Allocating(Worker):
    """Allocates, and reads an object."""

    def __init__(self, running, size, client):
        assert client is None
        self._running, self._size = running, size

    def run(self):
        self._memory = bytearray(b"1") * self._size
        return read(self._running, "large")

    def check(self):
        if not self._size:
            raise AssertionError("nothing was allocated")


@pytest.fixture(scope="module")
def pool():
    with Clients("lab.objects", limit_s=60.0, lives=1) as found:
        yield found


def test_the_memory_and_the_requests_of_a_rank_are_measured(running, pool):
    running.set()
    location = running.memory
    found = pool.run("", partial(in_ranks, 1, location, location, MIB, partial(Allocating, running, 64 * MIB), None))
    assert found.items == 4 * MIB
    assert found.sent_share == 1.0
    assert found.requests == 1
    assert 64 * MIB <= found.grown_bytes < 100 * MIB


def test_a_rank_that_fails_ends_the_job_with_its_traceback(running, pool):
    running.set()
    location = running.memory
    with pytest.raises(JobError, match="AssertionError: nothing was allocated"):
        pool.run("", partial(in_ranks, 1, location, location, MIB, partial(Allocating, running, 0), None))


# The last of this origin, which sends the rest of the body later.
def test_the_origin_is_silent_in_the_middle_of_a_large_body(running):
    running.set(silence=1)
    with pytest.raises(TimeoutError):
        read(running, "large", timeout_s=0.1)
    assert read(running, "small", timeout_s=30.0) == 5
    assert (origin.counters(running.memory))["faults"] == 2


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_quick_run_of_the_benchmark_ends_with_its_verdicts():
    only = ["safetensors 64 MiB, 4", "1 rank, reset", "formats", "load MLPerf"]
    options = [option for words in only for option in ("--only", words)]
    command = [sys.executable, "benchmarks/weights.py", "--quick", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cases, verdicts = done.stdout.split("against the targets\n")
    assert "  torchobj is left out" not in cases
    assert "load MLPerf Storage" in cases
    assert (
        "  met     safetensors in 16 shards 32 MiB, 1 rank, reset in one body of 10: torchobj: right bytes" in verdicts
    )
