"""Takes one measurement of bytes that move: a client uploads or downloads objects or files. `rivals.objects` has the
clients.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness.measure import Timed, Worker, timed
from benchmarks.harness.rivals import objects
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, Family, check, check_file

#: The figures of files, or of one state dict.
FIGURES = {"MB/s": ("mb_per_s", 0), "CPU-s per GB": ("cpu_s_per_gb", 2), "s": ("wall_s", 2)}


@dataclass
class Files(Worker):
    """Uploads files, or their content from memory, or downloads them and compares their content."""

    make: type[objects.Client]
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

    make: type[objects.Client]
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
