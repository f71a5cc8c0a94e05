"""Clients that list a bucket and read the metadata of every object by HEAD: `scan.py` measures them with `timed`."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.settings import store_config

#: Threads of boto3. 16 to 64 do not differ by more than the noise: the GIL limits them.
_THREADS = 32
#: Processes of boto3, more than there are cores, because they wait. 4 to 16 were tried on 2 cores.
_PROCESSES = 8


class Scanner:
    """Reads the metadata `label` of each object, and adds up the numbers in it."""

    modules: tuple[str, ...] = ()

    def __init__(self, location: Location, count: int, labels: int | None) -> None:
        self._location, self._count, self._labels = location, count, labels
        self._found = (0, 0)
        self.open(location)

    def open(self, location: Location) -> None:
        """Makes the client."""
        raise NotImplementedError

    def labels(self) -> Iterator[str]:
        """The metadata `label` of every object."""
        raise NotImplementedError

    def warm(self) -> None:
        """A scan opens its connections in the time that it takes."""

    def run(self) -> int:
        number = total = 0
        for label in self.labels():
            number, total = number + 1, total + int(label)
        self._found = (number, total)
        return number

    def check(self) -> None:
        if self._found[0] != self._count or self._labels not in (None, self._found[1]):
            raise AssertionError(f"{self._found} instead of {self._count} objects, {self._labels}")


class Torchobj(Scanner):
    """`for info in store.scan()`."""

    modules = ("torchobj",)

    def open(self, location: Location) -> None:
        import torchobj

        self._store = torchobj.Store(f"s3://{location.bucket}", config=store_config(location))

    def labels(self) -> Iterator[str]:
        return (info.metadata["label"] for info in self._store.scan())


class TorchobjHead(Torchobj):
    """`Store.list`, and `Store.head` in 64 threads."""

    def labels(self) -> Iterator[str]:
        with ThreadPoolExecutor(64) as pool:
            yield from (info.metadata["label"] for info in pool.map(self._store.head, self._keys()))

    def _keys(self) -> Sequence[str]:
        return [info.key for info in self._store.list()]


class Boto3(Scanner):
    """A loop over the paginator, with `head_object` for each key: what users write first."""

    modules = ("boto3", "botocore.config")

    def open(self, location: Location) -> None:
        self._client = boto_client(location, max_pool_connections=_THREADS)

    def _keys(self) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._location.bucket)
        return (item["Key"] for page in pages for item in page.get("Contents", []))

    def _label(self, key: str) -> str:
        return str(self._client.head_object(Bucket=self._location.bucket, Key=key)["Metadata"]["label"])

    def labels(self) -> Iterator[str]:
        return map(self._label, self._keys())


class Boto3Threads(Boto3):
    """The same with a pool of threads."""

    def labels(self) -> Iterator[str]:
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from pool.map(self._label, self._keys())


class Boto3Processes(Boto3):
    """The same with a pool of processes, each of which has its client, and chunks of 100 keys."""

    def open(self, location: Location) -> None:
        # Processes are forked before the first client of this one.
        self._pool = multiprocessing.get_context("fork").Pool(_PROCESSES, _enter, (location,))
        super().open(location)

    def warm(self) -> None:
        self._pool.map(str, range(_PROCESSES))

    def labels(self) -> Iterator[str]:
        yield from self._pool.imap_unordered(_label, self._keys(), chunksize=100)
        # The CPU time of processes counts when they have ended.
        self._pool.close()
        self._pool.join()


_process_label: Any = None


def _enter(location: Location) -> None:
    global _process_label  # noqa: PLW0603  state of a process of the pool
    client = boto_client(location)
    _process_label = partial(_label_of, client, location.bucket)


def _label_of(client: Any, bucket: str, key: str) -> str:
    return str(client.head_object(Bucket=bucket, Key=key)["Metadata"]["label"])


def _label(key: str) -> str:
    return str(_process_label(key))


CLIENTS: dict[str, Any] = {
    "torchobj": Torchobj,
    "torchobj head": TorchobjHead,
    "boto3": Boto3,
    "boto3 threads": Boto3Threads,
    "boto3 processes": Boto3Processes,
}
