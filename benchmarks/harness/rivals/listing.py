"""Clients that list a bucket, each in the forms in which its users list, and clients that read the metadata of every
object by HEAD: `list.py` and `scan.py` measure them with `timed`.
"""

import multiprocessing
import re
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

from benchmarks.harness.measure import Worker
from benchmarks.lab.keys import digest
from benchmarks.lab.location import Location

#: Threads of boto3 that read metadata. 16 to 64 do not differ by more than the noise: the GIL limits them.
_THREADS = 32
#: Processes of boto3, more than there are cores, because they wait. 4 to 16 were tried on 2 cores.
_PROCESSES = 8


def _boto3_keys(client: Any, bucket: str) -> Iterator[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return (item["Key"] for page in pages for item in page.get("Contents", []))


class Lister(Worker):
    """Counts the keys of a bucket. With `verify` it compares them, and is not to be measured."""

    def __init__(self, location: Location, count: int, expected: str, verify: bool) -> None:
        self._location, self._count, self._expected, self._verify = location, count, expected, verify
        self._found, self._digest = 0, ""
        self.open(location)

    def open(self, location: Location) -> None:
        """Makes the client."""
        raise NotImplementedError

    def keys(self) -> Iterator[str]:
        """Lists all keys in the form of this client."""
        raise NotImplementedError

    def count(self) -> int:
        """Lists all keys, and only counts them."""
        return sum(1 for _ in self.keys())

    def run(self) -> int:
        if self._verify:
            keys = list(self.keys())
            self._digest, self._found = digest(keys), len(keys)
        else:
            self._found = self.count()
        return self._found

    def check(self) -> None:
        if self._found != self._count:
            raise AssertionError(f"{self._found} keys instead of {self._count}")
        if self._verify and self._digest != self._expected:
            raise AssertionError("the listed keys are others, or some are repeated")


class Torchobj(Lister):
    """`for info in store.list()`."""

    modules = ("torchobj",)

    def open(self, location: Location) -> None:
        self._store = location.store()

    def keys(self) -> Iterator[str]:
        return (info.key for info in self._store.list())

    def count(self) -> int:
        return sum(1 for _ in self._store.list())


class TorchobjPages(Torchobj):
    """`for page in store.list().pages()`."""

    def count(self) -> int:
        return sum(len(page.objects) for page in self._store.list().pages())


class TorchobjUnordered(Torchobj):
    """`for info in store.list(ordered=False)`."""

    def count(self) -> int:
        return sum(1 for _ in self._store.list(ordered=False))


class TorchobjArrow(Torchobj):
    """`for batch in store.list().to_arrow()`."""

    modules = ("torchobj", "pyarrow")

    def count(self) -> int:
        return sum(batch.num_rows for batch in self._store.list().to_arrow())


class TorchobjDataset(Lister):
    """`ObjectMapDataset`, which keeps the keys in a manifest, of which only the number is compared."""

    modules = ("torch", "torchobj", "torchobj.datasets.map")

    def open(self, location: Location) -> None:
        self._config = location.config()

    def count(self) -> int:
        import torchobj

        self._kept = torchobj.ObjectMapDataset(f"s3://{self._location.bucket}/", config=self._config)
        return len(self._kept)

    def keys(self) -> Iterator[str]:
        return Torchobj(self._location, 0, "", False).keys()


class Boto3(Lister):
    """The paginator of `list_objects_v2`."""

    modules = ("boto3", "botocore.config")

    def open(self, location: Location) -> None:
        self._client = location.boto3()

    def keys(self) -> Iterator[str]:
        return _boto3_keys(self._client, self._location.bucket)


class S3fs(Lister):
    """`find` with details, as pyarrow calls it."""

    modules = ("s3fs",)

    def open(self, location: Location) -> None:
        import s3fs

        self._files = s3fs.S3FileSystem(client_kwargs={"endpoint_url": location.endpoint_url}, skip_instance_cache=True)

    def keys(self) -> Iterator[str]:
        skipped = len(self._location.bucket) + 1
        return (path[skipped:] for path in self._files.find(self._location.bucket, detail=True))


class Obstore(Lister):
    """`obstore.list` with chunks of a page. Its default of 50 keys is slower."""

    modules = ("obstore", "obstore.store")

    def open(self, location: Location) -> None:
        import obstore

        self._list, self._store = obstore.list, location.obstore()

    def keys(self) -> Iterator[str]:
        return (item["path"] for chunk in self._list(self._store, chunk_size=1000) for item in chunk)

    def count(self) -> int:
        return sum(len(chunk) for chunk in self._list(self._store, chunk_size=1000))


class ObstoreArrow(Obstore):
    """`obstore.list(return_arrow=True)`."""

    modules = ("obstore", "obstore.store", "arro3.core")

    def count(self) -> int:
        return sum(batch.num_rows for batch in self._list(self._store, chunk_size=10_000, return_arrow=True))


class BareLimit(Lister):
    """What the origin and this machine allow: pages of known keys by 64 connections, whose bytes are not parsed."""

    _CONNECTIONS = 64

    def open(self, location: Location) -> None:
        self._address = (urlsplit(location.endpoint_url or "").hostname, urlsplit(location.endpoint_url or "").port)

    def _fetch(self, tokens: Iterable[int]) -> int:
        received = bytearray(1 << 20)
        view, found = memoryview(received), 0
        with socket.create_connection(self._address) as connection:
            for token in tokens:
                target = f"/{self._location.bucket}?list-type=2&continuation-token={quote(str(token))}"
                connection.sendall(f"GET {target} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
                at = connection.recv_into(view)
                head, _, _ = bytes(view[: min(at, 2048)]).partition(b"\r\n\r\n")
                match = re.search(rb"Content-Length: (\d+)", head)
                total = len(head) + 4 + int(match[1] if match else 0)
                while at < total:
                    at += connection.recv_into(view[at:])
                found += 1
        return found

    def count(self) -> int:
        tokens = range(0, self._count, 1000)
        with ThreadPoolExecutor(self._CONNECTIONS) as pool:
            shares = [tokens[number :: self._CONNECTIONS] for number in range(self._CONNECTIONS)]
            pages = sum(pool.map(self._fetch, [share for share in shares if share]))
        return min(pages * 1000, self._count)

    def keys(self) -> Iterator[str]:
        return Torchobj(self._location, 0, "", False).keys()


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


LISTERS: dict[str, Any] = {
    "torchobj": Torchobj,
    "torchobj unordered": TorchobjUnordered,
    "torchobj pages": TorchobjPages,
    "torchobj arrow": TorchobjArrow,
    "torchobj dataset": TorchobjDataset,
    "bare limit": BareLimit,
    "boto3": Boto3,
    "s3fs": S3fs,
    "obstore": Obstore,
    "obstore arrow": ObstoreArrow,
}
SCANNERS: dict[str, Any] = {
    "torchobj": TorchobjScan,
    "torchobj head": TorchobjHead,
    "boto3": Boto3Head,
    "boto3 threads": Boto3Threads,
    "boto3 processes": Boto3Processes,
}
CLIENTS = {f"list {name}": client for name, client in LISTERS.items()}
CLIENTS |= {f"scan {name}": client for name, client in SCANNERS.items()}
