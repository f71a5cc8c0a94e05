"""Takes one measurement of a client of `rivals.objects`: it reads many objects at a time or one, or moves files."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Stopwatch, Timed, Worker, timed, touch
from benchmarks.harness.rivals import objects
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, KIB, MIB, Family, check, check_file

_SMALL = Family(4 * KIB, 1)
#: The figures of many objects per call, and of one.
MANY = {"objects/s": ("rate", 0), "CPU µs an object": ("cpu_us", 1)}
ONE = {"MB/s": ("mb_per_s", 0), "CPU-s per GB": ("cpu_s_per_gb", 3)}
#: The figures of files, or of one state dict.
FIGURES = {"MB/s": ("mb_per_s", 0), "CPU-s per GB": ("cpu_s_per_gb", 2), "s": ("wall_s", 2)}


def read(
    location: Location, family: Family, batch: int, min_s: float, make: Callable[[Location], objects.BucketClient]
) -> Timed:
    """Reads `batch` objects of `family` per call, or a single object if 0, repeatedly for at least `min_s`. Compares
    every byte of the last call after the clock has stopped.

    The items are objects, or bytes of a single object, where memory is that of the first call only.
    """
    location.enter()
    client, names, size, width = make(location), family.names(), family.size, batch or 1

    def call(group: Sequence[str]) -> Sequence[Any]:
        keys = [location.key(name) for name in group]
        return client.get_many(keys) if batch else [client.get(keys[0], size)]

    groups = itertools.cycle([names[at : at + width] for at in range(0, len(names) - width + 1, width)])
    # Warms up connections, credentials and threads for later calls. A large object is first read in the measurement.
    if batch:
        call(next(groups))
    else:
        client.get(location.key(_SMALL.names()[0]), _SMALL.size)
    # As much as the client with the largest need uses.
    touch(max(32 * MIB, size * width) * 5 // 2)
    grown_bytes: int | None = None
    contents: Sequence[Any] = ()
    with Stopwatch() as watch:
        started_s = time.perf_counter()
        for number, group in enumerate(groups, 1):  # noqa: B007  the last is that of `contents`
            # Free the batch before the next call, as a loop over batches does.
            contents = ()
            contents = call(group)
            if grown_bytes is None or batch:
                grown_bytes = watch.grown()
            if time.perf_counter() - started_s >= min_s:
                break
    for name, found in zip(group, contents, strict=True):
        check(name, size, found)
    return Timed(watch.wall_s, watch.cpu_s, grown_bytes, number * (batch or size))


@dataclass
class Files(Worker):
    """Uploads files, or their content from memory, or downloads them and compares their content."""

    make: type[objects.BucketClient]
    location: Location
    action: str
    """"up", "put" or "down"."""
    pairs: Sequence[tuple[str, str]]
    """A path and a key for each file; keys are names of `lab.objects` if they are downloaded."""
    first: tuple[str, str]
    """Another pair, transferred once before the measurement."""
    payload_bytes: int

    def __post_init__(self) -> None:
        self._client = self.make(self.location)
        paths = [path for path, _ in (self.first, *self.pairs)] if self.action == "put" else []
        self._contents = {path: Path(path).read_bytes() for path in paths}

    def _transfer(self, pairs: Sequence[tuple[str, str]]) -> None:
        if self.action == "up":
            self._client.upload_all(pairs)
        elif self.action == "down":
            self._client.download_all(pairs)
        else:
            for path, key in pairs:
                self._client.put(key, self._contents[path])

    def warm(self) -> None:
        self._transfer([self.first])

    def run(self) -> int:
        self._transfer(self.pairs)
        return self.payload_bytes

    def check(self) -> None:
        for path, key in self.pairs if self.action == "down" else ():
            check_file(key, path)
            Path(path).unlink()


def moving(
    action: str, location: Location, pairs: Sequence[tuple[str, str]], first: tuple[str, str], payload_bytes: int
) -> Callable[..., Timed]:
    """Returns the job of a transfer."""
    job = {"action": action, "pairs": pairs, "first": first, "payload_bytes": payload_bytes}
    return partial(timed, location, job, min(payload_bytes, 2 * GIB) * 5 // 4, worker=Files)


@dataclass
class Threads(Worker):
    """Does `action` `calls` times with objects or files of `family`, in `threads` threads. Uploads are of the file `0`
    in `folder`; downloads go there, and are deleted at once, so that they take the memory of as many files as there are
    threads.
    """

    make: type[objects.BucketClient]
    location: Location
    action: str
    family: Family
    threads: int
    calls: int
    folder: Path

    def __post_init__(self) -> None:
        self._client = self.make(self.location)
        methods = {"put": self._put, "get": self._get, "upload": self._upload, "download": self._download}
        self._call = methods[self.action]
        self._content = (self.folder / "0").read_bytes() if self.action == "put" else b""
        self._names, self._last = self.family.names(), b""
        self._last_file = self.folder / f"last-{os.getpid()}"

    def _put(self, number: int) -> None:
        self._client.put(f"put/{number}", self._content)

    def _get(self, number: int) -> None:
        found = self._client.get(self._name(number), self.family.size)
        if number == self.calls - 1:
            self._last = found

    def _upload(self, number: int) -> None:
        self._client.upload(str(self.folder / "0"), f"up/{number}")

    def _download(self, number: int) -> None:
        target = self.folder / f"down-{os.getpid()}-{threading.get_ident()}"
        self._client.download(self._name(number), str(target))
        if target.stat().st_size != self.family.size:
            raise AssertionError(f"{target}: {target.stat().st_size} bytes instead of {self.family.size}")
        if number == self.calls - 1:
            # Of the warm-up as well, which the measurement replaces.
            target.rename(self._last_file)
        else:
            target.unlink()

    def _name(self, number: int) -> str:
        return self._names[number % self.family.count]

    def warm(self) -> None:
        # Also a single thread is not the main one. There, `asyncio.run` of Python 3.11 formats the result of a task
        # when it restores the handler of SIGINT, for which MSC needs seconds.
        self._pool = ThreadPoolExecutor(self.threads)
        # One call of each thread: connections are opened, and memory that a client keeps is touched. The first read of
        # one large object is the measured one.
        if self.calls > 1:
            list(self._pool.map(self._call, range(self.threads)))

    def run(self) -> int:
        list(self._pool.map(self._call, range(self.calls)))
        return self.calls * self.family.size

    def check(self) -> None:
        # The bare limit keeps no bytes.
        if self.action == "get" and self._last is not None:
            check(self._name(self.calls - 1), self.family.size, self._last)
        if self.action == "download":
            check_file(self._name(self.calls - 1), self._last_file)
            self._last_file.unlink()
