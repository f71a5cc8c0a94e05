"""Clients that read and write objects and files: `reads` and `transfers` measure them.

Each is configured for speed as its own documentation advises, or faster if trials on loopback found a better way; a
configuration that the documentation does not show is a client of its own. Every byte of every object ends in the
caller: a list of buffers for many objects, one contiguous buffer for one. Those of Google have no credentials.
"""

import asyncio
import io
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness.report import LIMIT
from benchmarks.harness.rivals.client import Client
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB

# Part size of a large object that is read in parallel ranges, as AWS advises.
_PART_BYTES = 8 << 20

# Concurrent requests over a network, for all clients. On loopback each client has the number that is fastest there.
_FAR_REQUESTS = 64

# Read by gcsfs when it is imported: zonal and hierarchical buckets would ask for the kind of the bucket by gRPC.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class BucketClient(Client):
    """A client of a bucket. One that cannot do something does not define it."""

    def __init__(self, location: Location) -> None:
        self._bucket = location.bucket
        super().__init__(location)

    def get(self, key: str, size: int) -> Any:
        """Returns the bytes of one object. Clients that need the size for a parallel read use `size`."""
        raise NotImplementedError

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        """Returns the bytes of each object, in order."""
        raise NotImplementedError

    def put(self, key: str, content: bytes) -> None:
        """Writes an object."""
        raise NotImplementedError

    def upload(self, path: str, key: str) -> None:
        """Writes an object with the content of a file."""
        raise NotImplementedError

    def download(self, key: str, path: str) -> None:
        """Writes a file with the content of an object."""
        raise NotImplementedError

    def upload_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Uploads files, given as pairs of a path and a key."""
        for path, key in pairs:
            self.upload(path, key)

    def download_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Downloads files, given as pairs of a path and a key."""
        for path, key in pairs:
            self.download(key, path)


class Torchobj(BucketClient):
    """torchobj with its default configuration: the methods of `Store`, and `torchobj.files`."""

    modules = ("torchobj", "torchobj.files")

    def open(self, location: Location) -> None:
        from torchobj import files

        self._files, self._store, self._config = files, location.store(), location.config()

    def get(self, key: str, size: int) -> Any:
        del size
        return self._store.get(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._store.get_many(keys)

    def put(self, key: str, content: bytes) -> None:
        self._store.put(key, content)

    def upload(self, path: str, key: str) -> None:
        self._files.upload_file(path, self._location.url(key), config=self._config)

    def download(self, key: str, path: str) -> None:
        self._files.download_file(self._location.url(key), path, config=self._config)

    def download_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        # Into mapped files, since `download_file` waits until a file is on the disk, which its rivals do not.
        for path, key in pairs:
            size = self._store.head(key).size
            self._store.get_many([key], into=[np.memmap(path, np.uint8, "w+", shape=size)])


class _Fsspec(BucketClient):
    """A file system of fsspec: `cat_file`, `cat`, `pipe_file`, `put` and `get`."""

    _files: Any

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}"

    def get(self, key: str, size: int) -> Any:
        del size
        return self._files.cat_file(self._path(key))

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        paths = [self._path(key) for key in keys]
        found = self._files.cat(paths)
        return [found[path] for path in paths]

    def put(self, key: str, content: bytes) -> None:
        self._files.pipe_file(self._path(key), content)

    def upload(self, path: str, key: str) -> None:
        self._files.put_file(path, self._path(key))

    def download(self, key: str, path: str) -> None:
        self._files.get_file(self._path(key), path)

    def upload_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._files.put([path for path, _ in pairs], [self._path(key) for _, key in pairs])

    def download_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._files.get([self._path(key) for _, key in pairs], [path for path, _ in pairs])


class TorchobjFsspec(_Fsspec):
    """`torchobj.fsspec`."""

    modules = ("torchobj.fsspec",)

    def open(self, location: Location) -> None:
        from torchobj.fsspec import ObjectFileSystem

        self._files = ObjectFileSystem(location.config())


class S3fs(_Fsspec):
    """s3fs with its defaults, on one event loop."""

    modules = ("s3fs",)

    def open(self, location: Location) -> None:
        import s3fs

        where = {"client_kwargs": {"endpoint_url": location.endpoint_url}, "max_concurrency": 10}
        self._files = s3fs.S3FileSystem(**where, config_kwargs={"max_pool_connections": 256})


class GcsFs(_Fsspec):
    """gcsfs with its defaults."""

    # The second is imported by its first upload.
    modules = ("gcsfs", "google.cloud.storage.asyncio.async_appendable_object_writer")

    def open(self, location: Location) -> None:
        import gcsfs

        where = {} if location.endpoint_url is None else {"token": "anon", "endpoint_url": location.endpoint_url}
        self._files = gcsfs.GCSFileSystem(**where)


class GcsFsByHand(GcsFs):
    """gcsfs's concurrent `cat_file`, which is experimental. 4 and 8 requests do not differ by more than the noise."""

    def get(self, key: str, size: int) -> Any:
        del size
        return self._files.cat_file(self._path(key), concurrency=4)


class Obstore(BucketClient):
    """obstore as documented: `get_async` and `bytes_async`, gathered; one object by `get`; `put` of a path, which
    uploads parts in parallel; a stream of one GET, written to a file.

    With torchobj's concurrency. 32 and 64, a pool of tasks instead of a semaphore, and all 256 at once were tried: all
    256 at once is the slowest, the others do not differ by more than the noise.
    """

    modules = ("obstore", "obstore.store")

    def open(self, location: Location) -> None:
        import obstore

        self._module, self._store = obstore, location.obstore()
        self._runner = asyncio.Runner()

    async def _gather(self, keys: Sequence[str]) -> Sequence[Any]:
        leave = asyncio.Semaphore(_FAR_REQUESTS)

        async def read(key: str) -> Any:
            async with leave:
                result = await self._module.get_async(self._store, key)
                return await result.bytes_async()

        return await asyncio.gather(*[read(key) for key in keys])

    def get(self, key: str, size: int) -> Any:
        del size
        return self._module.get(self._store, key).bytes()

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._runner.run(self._gather(keys))

    def put(self, key: str, content: bytes) -> None:
        self._module.put(self._store, key, content)

    def upload(self, path: str, key: str) -> None:
        self._module.put(self._store, key, Path(path))

    def download(self, key: str, path: str) -> None:
        with Path(path).open("wb") as file:
            file.writelines(self._module.get(self._store, key).stream(min_chunk_size=8 << 20))


class ObstoreByHand(Obstore):
    """obstore at its fastest in trials: its blocking calls in threads, and ranges of 8 MiB copied into one array.

    A blocking call polls its request in the calling thread; an async one pays for several wake-ups between threads.
    4 to 64 threads were tried: from 8 to 24 they do not differ by more than the noise, 64 are slower. (`get_ranges`
    merges ranges that touch into one request, so it reads no object in parallel.)
    """

    def open(self, location: Location) -> None:
        super().open(location)
        self._threads = ThreadPoolExecutor(12 if location.near else _FAR_REQUESTS)

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(lambda key: self._module.get(self._store, key).bytes(), keys))

    def get(self, key: str, size: int) -> Any:
        if size <= _PART_BYTES:
            return super().get(key, size)
        whole = np.empty(size, np.uint8)

        def read(start: int) -> None:
            end = min(start + _PART_BYTES, size)
            part = self._module.get_range(self._store, key, start=start, end=end)
            whole[start:end] = np.frombuffer(part, np.uint8)

        for _ in self._threads.map(read, range(0, size, _PART_BYTES)):
            pass
        return whole


class S3TorchConnector(BucketClient):
    """s3torchconnector: what `S3MapDataset.__getitem__` does with `transform=S3Reader.read`, in threads.

    Its reads release the GIL. 1, 4, 8, 16 and 32 threads were tried at 10 and 100 Gbit/s of target: 16 and 10 are the
    fastest at 4 KiB, and at 110 KiB no other is faster by more than the noise. The range-based reader is five times
    slower for small objects; for large ones `read` and its `readinto` are alike.
    """

    modules = ("s3torchconnector",)

    def open(self, location: Location) -> None:
        from s3torchconnector._s3client import S3Client

        self._client = S3Client(**location.s3torchconnector())
        self._threads = ThreadPoolExecutor(16 if location.near else _FAR_REQUESTS)

    def get(self, key: str, size: int = 0) -> Any:
        del size
        return self._client.get_object(self._bucket, key).read()

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(self.get, keys))


class Boto3GetObject(BucketClient):
    """boto3: `get_object` on one connection, or in threads.

    The GIL limits it: on loopback it is no faster with 32 threads than with 1.
    """

    modules = ("boto3", "s3transfer", "botocore.config")

    def open(self, location: Location) -> None:
        threads = 10 if location.near else _FAR_REQUESTS
        self._client = location.boto3(max_pool_connections=threads)
        self._threads = ThreadPoolExecutor(threads)

    def _body(self, key: str) -> Any:
        return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()

    def get(self, key: str, size: int) -> Any:
        del size
        return self._body(key)

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(self._body, keys))

    def download(self, key: str, path: str) -> None:
        self._client.download_file(self._bucket, key, path)


class Boto3(Boto3GetObject):
    """boto3, with one object by `download_fileobj` into a `BytesIO`: parallel ranges of 8 MiB."""

    def get(self, key: str, size: int) -> Any:
        del size
        file = io.BytesIO()
        self._client.download_fileobj(self._bucket, key, file)
        return file.getbuffer()


class Msc(BucketClient):
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

    def get(self, key: str, size: int) -> Any:
        del size
        return self._client.read(key)

    def put(self, key: str, content: bytes) -> None:
        self._client.write(key, content)

    def upload(self, path: str, key: str) -> None:
        self._client.upload_file(key, path)

    def download(self, key: str, path: str) -> None:
        self._client.download_file(key, path)


class TransferManager(BucketClient):
    """google-cloud-storage's `transfer_manager`: processes for large files, threads for many objects, as documented.

    An object is read into memory by `download_as_bytes`, as `transfer_manager` reads large ones to files only; it
    uploads files only.
    """

    modules = ("google.cloud.storage.transfer_manager", "google.auth.credentials")

    def open(self, location: Location) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
        from google.cloud.storage import transfer_manager

        where: dict[str, Any] = {}
        if location.endpoint_url is not None:
            where = {
                "project": "bench",
                "credentials": AnonymousCredentials(),
                "client_options": {"api_endpoint": location.endpoint_url},
            }
        self._manager = transfer_manager
        self._blob = storage.Client(**where).bucket(location.bucket).blob

    def get(self, key: str, size: int) -> Any:
        del size
        return self._blob(key).download_as_bytes()

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        files = [io.BytesIO() for _ in keys]
        pairs = [(self._blob(key), file) for key, file in zip(keys, files, strict=True)]
        self._manager.download_many(pairs, worker_type=self._manager.THREAD, raise_exception=True)
        return [file.getbuffer() for file in files]

    def upload(self, path: str, key: str) -> None:
        self._manager.upload_chunks_concurrently(path, self._blob(key))

    def download(self, key: str, path: str) -> None:
        self._manager.download_chunks_concurrently(self._blob(key), path)

    def upload_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        if len(pairs) == 1:
            super().upload_all(pairs)
        else:
            self._manager.upload_many([(path, self._blob(key)) for path, key in pairs], raise_exception=True)

    def download_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        if len(pairs) == 1:
            super().download_all(pairs)
        else:
            self._manager.download_many([(self._blob(key), path) for path, key in pairs], raise_exception=True)


class Limit(BucketClient):
    """`recv` of the body into one buffer of 1 MiB, on a connection of each thread: what the system itself
    needs. Nothing keeps the bytes.
    """

    def open(self, location: Location) -> None:
        self._netloc = urlsplit(location.endpoint_url).netloc
        self._local = threading.local()

    def get(self, key: str, size: int) -> None:
        if not hasattr(self._local, "socket"):
            host, _, port = self._netloc.partition(":")
            self._local.socket = socket.create_connection((host, int(port)), timeout=60.0)
            self._local.block = memoryview(bytearray(MIB))
        connection, block = self._local.socket, self._local.block
        connection.sendall(f"GET /{self._bucket}/{key} HTTP/1.1\r\nHost: {self._netloc}\r\n\r\n".encode())
        received = connection.recv_into(block)
        left = size + bytes(block[:received]).index(b"\r\n\r\n") + 4 - received
        while left > 0:
            received = connection.recv_into(block)
            if not received:
                raise ConnectionError(f"{key}: the server closed the connection")
            left -= received


CLIENTS: dict[str, type[BucketClient]] = {
    LIMIT: Limit,
    "torchobj": Torchobj,
    "torchobj fsspec": TorchobjFsspec,
    "obstore": Obstore,
    "obstore by hand": ObstoreByHand,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
    "boto3 get_object": Boto3GetObject,
    "MSC Rust": Msc,
    "s3fs": S3fs,
    "gcsfs": GcsFs,
    "gcsfs by hand": GcsFsByHand,
    "transfer_manager": TransferManager,
}
