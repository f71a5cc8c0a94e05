"""Clients that list a bucket, each in the forms in which its users list, and clients that read the metadata of every
object by HEAD: `list.py` and `scan.py` measure them with `timed`.
"""

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
_LIMIT_CONNECTIONS = 64


def _length(items: Iterable[Any]) -> int:
    return sum(1 for _ in items)


def _boto3_keys(client: Any, bucket: str) -> Iterator[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return (item["Key"] for page in pages for item in page.get("Contents", []))


def _torchobj_keys(location: Location) -> Iterator[str]:
    return (info.key for info in location.store().list())


def _s3fs(location: Location) -> Any:
    import s3fs

    return s3fs.S3FileSystem(client_kwargs={"endpoint_url": location.endpoint_url}, skip_instance_cache=True)


def _s3fs_keys(location: Location) -> Iterator[str]:
    skipped = len(location.bucket) + 1
    return (path[skipped:] for path in _s3fs(location).find(location.bucket, detail=True))


def _obstore_chunks(store: Any, **options: Any) -> Any:
    import obstore

    return obstore.list(store, **options)


def _obstore_keys(location: Location) -> Iterator[str]:
    chunks = _obstore_chunks(location.obstore(), chunk_size=1000)
    return (item["path"] for chunk in chunks for item in chunk)


def _kept(location: Location) -> int:
    import torchobj

    return len(torchobj.ObjectMapDataset(f"s3://{location.bucket}/", config=location.config()))


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
            while at < total:
                received = connection.recv_into(view[at:])
                if not received:
                    raise ConnectionError("the origin closed the connection")
                at += received
            found += 1
    return found


def _limit(location: Location, count: int) -> int:
    tokens = range(0, count, 1000)
    shares = [tokens[number::_LIMIT_CONNECTIONS] for number in range(min(_LIMIT_CONNECTIONS, len(tokens)))]
    with ThreadPoolExecutor(_LIMIT_CONNECTIONS) as pool:
        pages = sum(pool.map(lambda share: _fetched(location, share), shares))
    return min(pages * 1000, count)


@dataclass(frozen=True)
class Lister:
    """A form in which a client lists: the value in `LISTERS`."""

    modules: tuple[str, ...]
    """What its first use imports."""
    open: Callable[[Location], Any]
    """Makes the client."""
    count: Callable[[Any, str], int]
    """Lists all keys of a bucket by a client, and only counts them."""
    keys: Callable[[Location], Iterable[str]] = _torchobj_keys
    """Lists all keys, in any form of the same client."""

    def __call__(self, location: Location, **job: Any) -> "_Listing":
        return _Listing(self, location, **job)


@dataclass
class _Listing(Worker):
    """Counts the keys of a bucket. With `verify` it compares them, and is not to be measured."""

    lister: Lister
    location: Location
    count: int
    expected: str
    verify: bool

    def __post_init__(self) -> None:
        self._client = self.lister.open(self.location)

    def run(self) -> int:
        if not self.verify:
            self._found = self.lister.count(self._client, self.location.bucket)
            return self._found
        keys = list(self.lister.keys(self.location))
        self._digest, self._found = digest(keys), len(keys)
        return self._found

    def check(self) -> None:
        if self._found != self.count:
            raise AssertionError(f"{self._found} keys instead of {self.count}")
        if self.verify and self._digest != self.expected:
            raise AssertionError("the listed keys are others, or some are repeated")


_STORE, _OBSTORE = ("torchobj",), ("obstore", "obstore.store")

LISTERS = {
    # `for info in store.list()`
    "torchobj": Lister(_STORE, Location.store, lambda store, _: _length(store.list())),
    "torchobj unordered": Lister(_STORE, Location.store, lambda store, _: _length(store.list(ordered=False))),
    "torchobj pages": Lister(
        _STORE, Location.store, lambda store, _: sum(len(page.objects) for page in store.list().pages())
    ),
    "torchobj arrow": Lister(
        ("torchobj", "pyarrow"),
        Location.store,
        lambda store, _: sum(batch.num_rows for batch in store.list().to_arrow()),
    ),
    # It keeps the keys in a manifest.
    "torchobj dataset": Lister(
        ("torch", "torchobj", "torchobj.datasets.map"), lambda location: location, lambda location, _: _kept(location)
    ),
    # The paginator of `list_objects_v2`.
    "boto3": Lister(
        ("boto3", "botocore.config"),
        Location.boto3,
        lambda client, bucket: _length(_boto3_keys(client, bucket)),
        lambda location: _boto3_keys(location.boto3(), location.bucket),
    ),
    # `find` with details, as pyarrow calls it.
    "s3fs": Lister(("s3fs",), _s3fs, lambda files, bucket: len(files.find(bucket, detail=True)), _s3fs_keys),
    # With chunks of a page: its default of 50 keys is slower.
    "obstore": Lister(
        _OBSTORE,
        Location.obstore,
        lambda store, _: sum(map(len, _obstore_chunks(store, chunk_size=1000))),
        _obstore_keys,
    ),
    "obstore arrow": Lister(
        (*_OBSTORE, "arro3.core"),
        Location.obstore,
        lambda store, _: sum(batch.num_rows for batch in _obstore_chunks(store, chunk_size=10_000, return_arrow=True)),
        _obstore_keys,
    ),
}


class Limit(Worker):
    """What the origin and this machine allow: pages of known keys by 64 connections, whose bytes are not parsed."""

    def __init__(self, location: Location, count: int, expected: str, verify: bool) -> None:
        del expected, verify
        self._location, self._count = location, count

    def run(self) -> int:
        return _limit(self._location, self._count)


class Scanner(Worker):
    """Reads the metadata `label` of each object, and adds up the numbers in it."""

    def __init__(self, location: Location, count: int, labels: int | None) -> None:
        self._location, self._count, self._labels = location, count, labels
        self.found = (0, 0)
        self.open(location)

    def open(self, location: Location) -> None:
        """Makes the client."""
        raise NotImplementedError

    def labels(self) -> Iterator[str]:
        """The metadata `label` of every object."""
        raise NotImplementedError

    def run(self) -> int:
        number = total = 0
        for label in self.labels():
            number, total = number + 1, total + int(label)
        self.found = (number, total)
        return number

    def check(self) -> None:
        if self.found[0] != self._count or self._labels not in (None, self.found[1]):
            raise AssertionError(f"{self.found} instead of {self._count} objects, {self._labels}")


class TorchobjScan(Scanner):
    """`for info in store.scan()`."""

    modules = ("torchobj",)

    def open(self, location: Location) -> None:
        self._store = location.store()

    def labels(self) -> Iterator[str]:
        return (info.metadata["label"] for info in self._store.scan())


class TorchobjHead(TorchobjScan):
    """`Store.list`, and `Store.head` in 64 threads."""

    def labels(self) -> Iterator[str]:
        with ThreadPoolExecutor(64) as pool:
            keys = [info.key for info in self._store.list()]
            yield from (info.metadata["label"] for info in pool.map(self._store.head, keys))


class Boto3Head(Scanner):
    """A loop over the paginator, with `head_object` for each key: what users write first."""

    modules = ("boto3", "botocore.config")

    def open(self, location: Location) -> None:
        self._client = location.boto3(max_pool_connections=_THREADS)

    def _keys(self) -> Iterator[str]:
        return _boto3_keys(self._client, self._location.bucket)

    def _label(self, key: str) -> str:
        return _label_of(self._client, self._location.bucket, key)

    def labels(self) -> Iterator[str]:
        return map(self._label, self._keys())


class Boto3Threads(Boto3Head):
    """The same with a pool of threads."""

    def labels(self) -> Iterator[str]:
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from pool.map(self._label, self._keys())


class Boto3Processes(Boto3Head):
    """The same with a pool of processes, each of which has its client, and chunks of 100 keys."""

    def open(self, location: Location) -> None:
        # Processes are forked before the first client of this one.
        self._pool = multiprocessing.get_context("fork").Pool(_PROCESSES, _enter, (location,))
        super().open(location)

    def warm(self) -> None:
        self._pool.map(str, range(_PROCESSES))

    def labels(self) -> Iterator[str]:
        yield from self._pool.imap_unordered(_process_label, self._keys(), chunksize=100)
        # The CPU time of processes counts when they have ended.
        self._pool.close()
        self._pool.join()


_process: tuple[Any, str]
"""The client of a process of the pool, and the bucket."""


def _enter(location: Location) -> None:
    global _process  # noqa: PLW0603  state of a process of the pool
    _process = location.boto3(), location.bucket


def _label_of(client: Any, bucket: str, key: str) -> str:
    return str(client.head_object(Bucket=bucket, Key=key)["Metadata"]["label"])


def _process_label(key: str) -> str:
    return _label_of(*_process, key)


SCANNERS: dict[str, type[Scanner]] = {
    "torchobj": TorchobjScan,
    "torchobj head": TorchobjHead,
    "boto3": Boto3Head,
    "boto3 threads": Boto3Threads,
    "boto3 processes": Boto3Processes,
}
CLIENTS: dict[str, Any] = {f"list {name}": client for name, client in LISTERS.items()} | {f"list {LIMIT}": Limit}
CLIENTS |= {f"scan {name}": client for name, client in SCANNERS.items()}
