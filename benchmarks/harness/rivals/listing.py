"""Clients that list a bucket, each in the forms in which its users list, and clients that read the metadata of every
object by HEAD: `list.py` and `scan.py` measure them with `timed`.
"""

import functools
import multiprocessing
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.measure import Worker
from benchmarks.harness.report import LIMIT
from benchmarks.lab.keys import digest
from benchmarks.lab.location import Location

#: Threads of boto3 that read metadata. 16 to 64 do not differ by more than the noise: the GIL limits them.
_THREADS = 32
#: Processes of boto3, more than there are cores, because they wait. 4 to 16 were tried on 2 cores.
_PROCESSES = 8
_CONNECTIONS = 64


@dataclass
class Listing(Worker):
    """Lists the keys of a bucket, or reads the metadata `label` of each object, whose numbers are added up."""

    form: "Form"
    location: Location
    count: int
    """The number of objects."""
    expected: Any = None
    """The digest of the keys, or the sum of the labels, if it is compared."""
    verify: bool = False
    """Whether the keys are compared, which is not to be measured, instead of counted."""

    def __post_init__(self) -> None:
        self.client = self.form.open(self.location)

    def run(self) -> int:
        if self.verify:
            keys = list(self.form.keys(self.location))
            self.found: Any = len(keys), digest(keys)
        elif self.form.labels is not None:
            numbers = total = 0
            for label in self.form.labels(self):
                numbers, total = numbers + 1, total + int(label)
            self.found = numbers, total
        else:
            self.found = self.form.counted(self), None
        return int(self.found[0])

    def check(self) -> None:
        number, value = self.found
        if number != self.count or (None not in (value, self.expected) and value != self.expected):
            raise AssertionError(f"{self.found} instead of {self.count} objects, {self.expected}")


def _length(items: Iterable[Any]) -> int:
    return sum(1 for _ in items)


def _torchobj_keys(location: Location) -> Iterator[str]:
    return (info.key for info in location.store().list())


def _boto3_keys(client: Any, bucket: str) -> Iterator[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return (item["Key"] for page in pages for item in page.get("Contents", []))


def _s3fs(location: Location) -> Any:
    import s3fs

    return s3fs.S3FileSystem(client_kwargs={"endpoint_url": location.endpoint_url}, skip_instance_cache=True)


def _s3fs_keys(location: Location) -> Iterator[str]:
    skipped = len(location.bucket) + 1
    return (path[skipped:] for path in _s3fs(location).find(location.bucket, detail=True))


def _obstore_chunks(store: Any, chunk_size: int = 1000, **options: Any) -> Any:
    import obstore

    return obstore.list(store, chunk_size=chunk_size, **options)


def _obstore_keys(location: Location) -> Iterator[str]:
    return (item["path"] for chunk in _obstore_chunks(location.obstore()) for item in chunk)


def _kept(job: Listing) -> int:
    import torchobj

    return len(torchobj.ObjectMapDataset(job.location.url(""), config=job.location.config()))


def _fetched(location: Location, tokens: Iterable[int]) -> int:
    """Receives the pages that begin at these keys; returns their number."""
    address = urlsplit(location.endpoint_url or "")
    view, found = memoryview(bytearray(1 << 20)), 0
    with socket.create_connection((address.hostname, address.port), timeout=60.0) as connection:
        for token in tokens:
            target = f"/{location.bucket}?list-type=2&continuation-token={token}"
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            at = connection.recv_into(view)
            head, _, _ = bytes(view[: min(at, 2048)]).partition(b"\r\n\r\n")
            match = re.search(rb"Content-Length: (\d+)", head)
            total = len(head) + 4 + int(match[1] if match else 0)
            while at < total and (received := connection.recv_into(view[at:])):
                at += received
            found += at == total
    return found


def _limit(job: Listing) -> int:
    tokens = range(0, job.count, 1000)
    shares = [tokens[number::_CONNECTIONS] for number in range(min(_CONNECTIONS, len(tokens)))]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        pages = sum(pool.map(functools.partial(_fetched, job.location), shares))
    return min(pages * 1000, job.count)


def _heads(job: Listing) -> Iterator[str]:
    with ThreadPoolExecutor(64) as pool:
        keys = [info.key for info in job.client.list()]
        yield from (info.metadata["label"] for info in pool.map(job.client.head, keys))


def _label(client: Any, bucket: str, key: str) -> str:
    return str(client.head_object(Bucket=bucket, Key=key)["Metadata"]["label"])


def _boto3_heads(job: Listing, mapped: Callable[..., Iterable[str]] = map) -> Iterable[str]:
    bucket = job.location.bucket
    return mapped(functools.partial(_label, job.client, bucket), _boto3_keys(job.client, bucket))


def _boto3_heads_in_threads(job: Listing) -> Iterator[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from _boto3_heads(job, pool.map)


_process: tuple[Any, str]
"""The client of a process of the pool, and the bucket."""


def _enter(location: Location) -> None:
    global _process  # noqa: PLW0603  state of a process of the pool
    _process = location.boto3(), location.bucket


def _process_label(key: str) -> str:
    return _label(*_process, key)


def _processes(location: Location) -> Any:
    # They are forked before the first client of this one.
    pool = multiprocessing.get_context("fork").Pool(_PROCESSES, _enter, (location,))
    pool.map(str, range(_PROCESSES))
    return pool, location.boto3()


def _boto3_heads_in_processes(job: Listing) -> Iterator[str]:
    pool, client = job.client
    yield from pool.imap_unordered(_process_label, _boto3_keys(client, job.location.bucket), chunksize=100)
    # The CPU time of processes counts when they have ended.
    pool.close()
    pool.join()


@dataclass(frozen=True)
class Form:
    """A form in which a client lists, or reads metadata."""

    modules: tuple[str, ...]
    """What its first use imports."""
    open: Callable[[Location], Any]
    """Makes the client of a listing."""
    counted: Callable[[Listing], int] = lambda _: 0
    """Lists all keys, and only counts them."""
    keys: Callable[[Location], Iterable[str]] = _torchobj_keys
    """Lists all keys, in any form of this client."""
    labels: Callable[[Listing], Iterable[str]] | None = None
    """Returns the metadata `label` of every object."""

    def __call__(self, location: Location, **job: Any) -> Listing:
        return Listing(self, location, **job)


def _boto3(location: Location) -> Any:
    return location.boto3(max_pool_connections=_THREADS)


_STORE, _BOTO3, _OBSTORE = ("torchobj", "pyarrow"), ("boto3", "botocore.config"), ("obstore", "obstore.store")
_DATASET = ("torch", "torchobj", "torchobj.datasets.map")

LISTERS = {
    "torchobj": Form(_STORE, Location.store, lambda job: _length(job.client.list())),
    "torchobj unordered": Form(_STORE, Location.store, lambda job: _length(job.client.list(ordered=False))),
    "torchobj pages": Form(
        _STORE, Location.store, lambda job: sum(len(page.objects) for page in job.client.list().pages())
    ),
    "torchobj arrow": Form(
        _STORE, Location.store, lambda job: sum(batch.num_rows for batch in job.client.list().to_arrow())
    ),
    # It keeps the keys in a manifest.
    "torchobj dataset": Form(_DATASET, Location.config, _kept),
    LIMIT: Form((), lambda location: location, _limit),
    # The paginator of `list_objects_v2`.
    "boto3": Form(
        _BOTO3,
        _boto3,
        lambda job: _length(_boto3_keys(job.client, job.location.bucket)),
        lambda location: _boto3_keys(location.boto3(), location.bucket),
    ),
    # `find` with details, as pyarrow calls it.
    "s3fs": Form(("s3fs",), _s3fs, lambda job: len(job.client.find(job.location.bucket, detail=True)), _s3fs_keys),
    # With chunks of a page: its default of 50 keys is slower.
    "obstore": Form(_OBSTORE, Location.obstore, lambda job: sum(map(len, _obstore_chunks(job.client))), _obstore_keys),
    "obstore arrow": Form(
        (*_OBSTORE, "arro3.core"),
        Location.obstore,
        lambda job: sum(batch.num_rows for batch in _obstore_chunks(job.client, 10_000, return_arrow=True)),
        _obstore_keys,
    ),
}
SCANNERS = {
    "torchobj": Form(_STORE, Location.store, labels=lambda job: (info.metadata["label"] for info in job.client.scan())),
    # `Store.list`, and `Store.head` in 64 threads.
    "torchobj head": Form(_STORE, Location.store, labels=_heads),
    # A loop over the paginator, with `head_object` for each key: what users write first.
    "boto3": Form(_BOTO3, _boto3, labels=_boto3_heads),
    "boto3 threads": Form(_BOTO3, _boto3, labels=_boto3_heads_in_threads),
    # Each process has its client, and chunks of 100 keys.
    "boto3 processes": Form(_BOTO3, _processes, labels=_boto3_heads_in_processes),
}
CLIENTS = {f"list {name}": form for name, form in LISTERS.items()}
CLIENTS |= {f"scan {name}": form for name, form in SCANNERS.items()}
