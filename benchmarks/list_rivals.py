"""Clients that list a bucket, each in the forms in which its users list: `list.py` measures them with `timed`."""

import hashlib
import re
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.settings import obstore_store, store_config


def digest(keys: Iterable[str]) -> str:
    """A digest of the set of keys, and of their number."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


class Lister:
    """Counts the keys of a bucket. With `verify` it compares them, and is not to be measured."""

    modules: tuple[str, ...] = ()

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

    def warm(self) -> None:
        """Lists nothing: a listing opens its connections in the time that it takes."""

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
        import torchobj

        self._store = torchobj.Store(f"s3://{location.bucket}", config=store_config(location))

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
        self._config = store_config(location)

    def _dataset(self) -> Any:
        import torchobj

        return torchobj.ObjectMapDataset(f"s3://{self._location.bucket}/", config=self._config)

    def count(self) -> int:
        self._kept = self._dataset()
        return len(self._kept)

    def keys(self) -> Iterator[str]:
        return (info.key for info in Torchobj(self._location, 0, "", False)._store.list())


class Boto3(Lister):
    """The paginator of `list_objects_v2`."""

    modules = ("boto3", "botocore.config")

    def open(self, location: Location) -> None:
        self._client = boto_client(location)

    def keys(self) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._location.bucket)
        return (item["Key"] for page in pages for item in page.get("Contents", []))


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
        self._store = obstore_store(location)

    def keys(self) -> Iterator[str]:
        import obstore

        return (item["path"] for chunk in obstore.list(self._store, chunk_size=1000) for item in chunk)

    def count(self) -> int:
        import obstore

        return sum(len(chunk) for chunk in obstore.list(self._store, chunk_size=1000))


class ObstoreArrow(Obstore):
    """`obstore.list(return_arrow=True)`."""

    modules = ("obstore", "obstore.store", "arro3.core")

    def count(self) -> int:
        import obstore

        return sum(batch.num_rows for batch in obstore.list(self._store, chunk_size=10_000, return_arrow=True))


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


CLIENTS: dict[str, Any] = {
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
