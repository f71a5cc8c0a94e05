"""Clients that write and read objects and files with Python threads: `files.py` measures them with `timed`.

Each action is the call that the users of a client make. Downloaded files are deleted at once, so that they take the
memory of as many files as there are threads.
"""

import io
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.measure import Worker
from benchmarks.harness.report import LIMIT
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB, Family, check, check_file

ACTIONS = ("put", "get", "upload_file", "download_file")


class Mover(Worker):
    """Does `action` `calls` times with objects or files of `family`, in `threads` threads. Uploads are of the file `0`
    in `folder`; downloads go there.
    """

    def __init__(self, location: Location, action: str, family: Family, threads: int, calls: int, folder: str) -> None:
        self._action, self._family, self._threads, self._calls = action, family, threads, calls
        self._folder, self._last = folder, b""
        self._names = self._family.names()
        self.bucket = location.bucket
        self.open(location)

    def open(self, location: Location) -> None:
        """Makes the client."""
        raise NotImplementedError

    def put(self, key: str, content: bytes) -> None:
        """Writes an object."""
        raise NotImplementedError

    def get(self, key: str) -> Any:
        """Returns the bytes of an object."""
        raise NotImplementedError

    def upload_file(self, path: str, key: str) -> None:
        """Writes an object with the content of a file."""
        raise NotImplementedError

    def download_file(self, key: str, path: str) -> None:
        """Writes a file with the content of an object."""
        raise NotImplementedError

    def _call(self) -> Callable[[int], None]:
        size, count = self._family.size, self._family.count
        if self._action == "put":
            content = Path(self._folder, "0").read_bytes()
            return lambda number: self.put(f"put/{number}", content)
        if self._action == "get":

            def get(number: int) -> None:
                found = self.get(self._names[number % count])
                if number == self._calls - 1:
                    self._last = found

            return get
        if self._action == "upload_file":
            path = str(Path(self._folder, "0"))
            return lambda number: self.upload_file(path, f"up/{number}")

        def download(number: int) -> None:
            target = Path(self._folder, f"down-{os.getpid()}-{threading.get_ident()}")
            self.download_file(self._names[number % count], str(target))
            if target.stat().st_size != size:
                raise AssertionError(f"{target}: {target.stat().st_size} bytes instead of {size}")
            if number == self._calls - 1:
                # Of the warm-up as well, which the measurement replaces.
                target.rename(Path(self._folder, f"last-{os.getpid()}"))
            else:
                target.unlink()

        return download

    def warm(self) -> None:
        # Also a single thread is not the main one. There, `asyncio.run` of Python 3.11 formats the result of a task
        # when it restores the handler of SIGINT, for which MSC needs seconds.
        self._pool = ThreadPoolExecutor(self._threads)
        self._work = self._call()
        # One call of each thread: connections are opened, and memory that a client keeps is touched. The first read of
        # one large object is the measured one.
        if self._calls > 1:
            self._run(self._threads)

    def run(self) -> int:
        self._run(self._calls)
        return self._calls * self._family.size

    def _run(self, calls: int) -> None:
        for _ in self._pool.map(self._work, range(calls)):
            pass

    def check(self) -> None:
        number = (self._calls - 1) % self._family.count
        if self._action == "get":
            check(self._names[number], self._family.size, self._last)
        if self._action == "download_file":
            last = Path(self._folder, f"last-{os.getpid()}")
            try:
                check_file(self._names[number], last)
            finally:
                last.unlink()


class Torchobj(Mover):
    """`Store.put`, `Store.get`, `torchobj.files.upload_file`, `torchobj.files.download_file`."""

    modules = ("torchobj", "torchobj.files")

    def open(self, location: Location) -> None:
        from torchobj import files

        self._files, self._store, self._config = files, location.store(), location.config()

    def put(self, key: str, content: bytes) -> None:
        self._store.put(key, content)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def upload_file(self, path: str, key: str) -> None:
        self._files.upload_file(path, f"s3://{self.bucket}/{key}", config=self._config)

    def download_file(self, key: str, path: str) -> None:
        self._files.download_file(f"s3://{self.bucket}/{key}", path, config=self._config)


class TorchobjFsspec(Mover):
    """`torchobj.fsspec`: `pipe_file`, `cat_file`, `put_file`, `get_file`."""

    modules = ("torchobj.fsspec",)

    def open(self, location: Location) -> None:
        from torchobj.fsspec import ObjectFileSystem

        self._files: Any = ObjectFileSystem(location.config())

    def put(self, key: str, content: bytes) -> None:
        self._files.pipe_file(f"{self.bucket}/{key}", content)

    def get(self, key: str) -> Any:
        return self._files.cat_file(f"{self.bucket}/{key}")

    def upload_file(self, path: str, key: str) -> None:
        self._files.put_file(path, f"{self.bucket}/{key}")

    def download_file(self, key: str, path: str) -> None:
        self._files.get_file(f"{self.bucket}/{key}", path)


class S3fs(TorchobjFsspec):
    """s3fs with its defaults: `pipe_file`, `cat_file`, `put_file`, `get_file`, on one event loop."""

    modules = ("s3fs",)

    def open(self, location: Location) -> None:
        import s3fs

        where = {"client_kwargs": {"endpoint_url": location.endpoint_url}, "max_concurrency": 10}
        self._files = s3fs.S3FileSystem(**where, config_kwargs={"max_pool_connections": 256})


class Msc(Mover):
    """multi-storage-client with its Rust client and its defaults: `read`, `write`, `upload_file`, `download_file`."""

    modules = ("multistorageclient", "multistorageclient_rust", "multistorageclient.providers.s3")

    def open(self, location: Location) -> None:
        from multistorageclient import StorageClient, StorageClientConfig

        options = {
            "base_path": location.bucket,
            "endpoint_url": location.endpoint_url,
            "region_name": location.region or "us-east-1",
            "rust_client": {"allow_http": True},
            "max_pool_connections": 256,
        }
        credentials = {"access_key": location.access_key, "secret_key": location.secret_key}
        profile = {
            "storage_provider": {"type": "s3", "options": options},
            "credentials_provider": {"type": "S3Credentials", "options": credentials},
        }
        self._client = StorageClient(StorageClientConfig.from_dict({"profiles": {"lab": profile}}, profile="lab"))

    def put(self, key: str, content: bytes) -> None:
        self._client.write(key, content)

    def get(self, key: str) -> Any:
        return self._client.read(key)

    def upload_file(self, path: str, key: str) -> None:
        self._client.upload_file(key, path)

    def download_file(self, key: str, path: str) -> None:
        self._client.download_file(key, path)


class Limit(Mover):
    """`recv` of the body into one buffer of 1 MiB, on a connection of each thread: what the system itself
    needs. Nothing keeps the bytes.
    """

    def open(self, location: Location) -> None:
        self._netloc = urlsplit(location.endpoint_url).netloc
        self._local = threading.local()

    def get(self, key: str) -> bytes:
        if not hasattr(self._local, "socket"):
            host, _, port = self._netloc.partition(":")
            self._local.socket = socket.create_connection((host, int(port)))
            self._local.block = memoryview(bytearray(MIB))
        connection, block = self._local.socket, self._local.block
        connection.sendall(f"GET /{self.bucket}/{key} HTTP/1.1\r\nHost: {self._netloc}\r\n\r\n".encode())
        received = connection.recv_into(block)
        left = self._family.size + bytes(block[:received]).index(b"\r\n\r\n") + 4 - received
        while left > 0:
            left -= connection.recv_into(block)
        return b""

    def check(self) -> None:
        """It has no bytes."""


class Boto3Get(Mover):
    """boto3's `get_object`, one connection."""

    modules = ("boto3", "botocore.config", "s3transfer")

    def open(self, location: Location) -> None:
        self._client = location.boto3(max_pool_connections=64)

    def get(self, key: str) -> Any:
        return self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def download_file(self, key: str, path: str) -> None:
        self._client.download_file(self.bucket, key, path)


class Boto3Fileobj(Boto3Get):
    """boto3's `download_fileobj` into a `BytesIO`: parallel ranges of 8 MiB."""

    def get(self, key: str) -> Any:
        file = io.BytesIO()
        self._client.download_fileobj(self.bucket, key, file)
        return file.getbuffer()


CLIENTS: dict[str, Any] = {
    LIMIT: Limit,
    "torchobj": Torchobj,
    "torchobj fsspec": TorchobjFsspec,
    "MSC Rust": Msc,
    "s3fs": S3fs,
    "boto3 get_object": Boto3Get,
    "boto3 download_fileobj": Boto3Fileobj,
}
