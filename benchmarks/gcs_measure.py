"""Takes one measurement of a client of Google Cloud Storage: it reads objects, as in `measure`, or transfers files.
`gcs_rivals` has the clients. `python -m benchmarks.gcs_measure CLIENT` is a client's fork server.
"""

import dataclasses
import functools
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.fork_server import ForkServer, serve
from benchmarks.gcs_rivals import Mover, load
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, Family, check
from benchmarks.timed import all_cpu_s

_LIMIT_S = 300.0


@dataclass(frozen=True)
class Move:
    """A client uploads files, or their content from memory, or downloads them and the content is compared."""

    action: str
    """"up", "put" or "down"."""
    location: Location
    pairs: Sequence[tuple[str, str]]
    """A path and a key for each file; keys are names of `lab.objects` if they are downloaded."""
    payload_bytes: int
    warm: tuple[str, str]
    """Another pair, transferred once before the measurement."""
    counted: bool = False
    """A location of `lab.origin`."""


def _check(path: str, key: str) -> None:
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            check(key, size, content)


def move(make: Callable[[Location], Mover], job: Move) -> dict[str, Any]:
    """Transfers files in this process. CPU time includes that of the processes it starts."""
    job.location.enter()
    client = make(job.location)
    if job.action == "put":
        contents = {path: Path(path).read_bytes() for path, _ in [job.warm, *job.pairs]}

    def transfer(pairs: Sequence[tuple[str, str]]) -> None:
        if job.action == "up":
            client.upload(pairs)
        elif job.action == "down":
            client.download(pairs)
        else:
            for path, key in pairs:
                client.put(contents[path], key)

    transfer([job.warm])
    measure.touch(min(job.payload_bytes, 2 * GIB) * 5 // 4)
    gc.collect()
    kinds = origin.kinds(job.location) if job.counted else None
    started_s, started_cpu_s = time.perf_counter(), all_cpu_s()
    transfer(job.pairs)
    wall_s, cpu_s = time.perf_counter() - started_s, all_cpu_s() - started_cpu_s
    found = None if kinds is None else origin.kinds(job.location) - kinds
    if job.action == "down":
        for path, key in job.pairs:
            _check(path, key)
            Path(path).unlink()
    return {"payload_bytes": job.payload_bytes, "wall_s": wall_s, "cpu_s": cpu_s, "kinds": dict(found or {})}


def _work(classes: tuple[Any, Any], fields: dict[str, Any]) -> dict[str, Any]:
    reader, mover = classes
    location = Location(**fields.pop("location"))
    if "family" in fields:
        job = measure.Job(location, Family(**fields.pop("family")), **fields)
        return dataclasses.asdict(measure.measure(reader, job))
    return move(mover, Move(location=location, **fields))


class Clients:
    """Runs jobs on a fork server per client. They raise RuntimeError if the client fails or its bytes are wrong."""

    def __init__(self) -> None:
        self._fork_servers: dict[str, ForkServer] = {}

    def _run(self, client: str, job: Any) -> dict[str, Any]:
        if client not in self._fork_servers:
            self._fork_servers[client] = ForkServer("benchmarks.gcs_measure", client)
        return self._fork_servers[client].run(dataclasses.asdict(job), _LIMIT_S)

    def read(self, client: str, job: measure.Job) -> measure.Measured:
        """Reads objects."""
        return measure.Measured(**self._run(client, job))

    def move(self, client: str, job: Move) -> dict[str, Any]:
        """Transfers files; returns the fields of `gcs_report.Moved`."""
        return self._run(client, job)

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
