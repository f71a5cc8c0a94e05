"""Clients that read objects, and that upload and download files: `reads` and `gcs.py` measure them.

Each is configured for speed as its own documentation advises, or faster if trials on loopback found a better way; a
configuration that the documentation does not show is a client of its own. Every byte of every object ends in the
caller: a list of buffers for many objects, one contiguous buffer for one. Those of Google have no credentials. A list
of one file is transferred in parallel parts where the client has them.
"""

import asyncio
import contextlib
import io
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.lab.location import Location

# Part size of a large object that is read in parallel ranges, as AWS advises.
_PART_BYTES = 8 << 20

# Concurrent requests over a network, for all clients. On loopback each client has the number that is fastest there.
_FAR_REQUESTS = 64

# Read by gcsfs when it is imported: zonal and hierarchical buckets would ask for the kind of the bucket by gRPC.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class Reader(Protocol):
    """A client that reads objects."""

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        """Returns the bytes of each object, in order."""

    def one(self, key: str, size: int) -> Any:
        """Returns the bytes of one object. Clients that need the size for a parallel read use `size`."""


class Mover(Protocol):
    """A client that transfers files. Pairs are a path and a key."""

    def put(self, content: bytes, key: str) -> None:
        """Writes an object. A client that cannot read from memory raises NotImplementedError."""

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Writes an object per file."""

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Writes a file per object."""


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[mmap.mmap]:
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


class Torchobj:
    """torchobj with its default configuration: `Store.get_many`, and `Store.get` without the size; `Store.put`, also of
    a mapped file, and `Store.get_many` into a mapped file.
    """

    modules = ("torchobj",)

    def __init__(self, location: Location) -> None:
        self._store = location.store()

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._store.get_many(keys)

    def one(self, key: str, size: int) -> Any:
        del size
        return self._store.get(key)

    def put(self, content: bytes, key: str) -> None:
        self._store.put(key, content)

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            with _mapped(path) as content:
                self._store.put(key, content)

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            size = self._store.head(key).size
            self._store.get_many([key], into=[np.memmap(path, np.uint8, "w+", shape=size)])


class Obstore:
    """obstore as documented: `get_async` and `bytes_async`, gathered; one object by `get`; `put` of a path, which
    uploads parts in parallel; a stream of one GET, written to a file.

    With torchobj's concurrency. 32 and 64, a pool of tasks instead of a semaphore, and all 256 at once were tried: all
    256 at once is the slowest, the others do not differ by more than the noise.
    """

    modules = ("obstore", "obstore.store")

    def __init__(self, location: Location) -> None:
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

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._runner.run(self._gather(keys))

    def one(self, key: str, size: int) -> Any:
        del size
        return self._module.get(self._store, key).bytes()

    def put(self, content: bytes, key: str) -> None:
        self._module.put(self._store, key, content)

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            self._module.put(self._store, key, Path(path))

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            with Path(path).open("wb") as file:
                file.writelines(self._module.get(self._store, key).stream(min_chunk_size=8 << 20))


class ObstoreByHand:
    """obstore at its fastest in trials: its blocking calls in threads, and ranges of 8 MiB copied into one array.

    A blocking call polls its request in the calling thread; an async one pays for several wake-ups between threads.
    4 to 64 threads were tried: from 8 to 24 they do not differ by more than the noise, 64 are slower. (`get_ranges`
    merges ranges that touch into one request, so it reads no object in parallel.)
    """

    modules = ("obstore", "obstore.store")

    def __init__(self, location: Location) -> None:
        import obstore

        self._module, self._store = obstore, location.obstore()
        self._threads = ThreadPoolExecutor(12 if location.near else _FAR_REQUESTS)

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(lambda key: self._module.get(self._store, key).bytes(), keys))

    def one(self, key: str, size: int) -> Any:
        if size <= _PART_BYTES:
            return self._module.get(self._store, key).bytes()
        whole = np.empty(size, np.uint8)

        def read(start: int) -> None:
            end = min(start + _PART_BYTES, size)
            part = self._module.get_range(self._store, key, start=start, end=end)
            whole[start:end] = np.frombuffer(part, np.uint8)

        for _ in self._threads.map(read, range(0, size, _PART_BYTES)):
            pass
        return whole


class _ByThreads:
    """A client whose `_read` of one object is called in threads."""

    _threads: ThreadPoolExecutor

    def _read(self, key: str) -> bytes:
        raise NotImplementedError

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(self._read, keys))

    def one(self, key: str, size: int) -> Any:
        del size
        return self._read(key)


class S3TorchConnector(_ByThreads):
    """s3torchconnector: what `S3MapDataset.__getitem__` does with `transform=S3Reader.read`, in threads.

    Its reads release the GIL. 1, 4, 8, 16 and 32 threads were tried at 10 and 100 Gbit/s of target: 16 and 10 are the
    fastest at 4 KiB, and at 110 KiB no other is faster by more than the noise. The range-based reader is five times
    slower for small objects; for large ones `read` and its `readinto` are alike.
    """

    modules = ("s3torchconnector",)

    def __init__(self, location: Location) -> None:
        from s3torchconnector._s3client import S3Client

        self._client, self._bucket = S3Client(**location.s3torchconnector()), location.bucket
        self._threads = ThreadPoolExecutor(16 if location.near else _FAR_REQUESTS)

    def _read(self, key: str) -> bytes:
        content: bytes = self._client.get_object(self._bucket, key).read()
        return content


class Boto3(_ByThreads):
    """boto3: `get_object` in threads, and `download_fileobj` into a `BytesIO` with its defaults.

    The GIL limits it: on loopback it is no faster with 32 threads than with 1.
    """

    modules = ("boto3", "s3transfer", "botocore.config")

    def __init__(self, location: Location) -> None:
        threads = 10 if location.near else _FAR_REQUESTS
        self._client, self._bucket = location.boto3(max_pool_connections=threads), location.bucket
        self._threads = ThreadPoolExecutor(threads)

    def _read(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        return content

    def one(self, key: str, size: int) -> Any:
        del size
        file = io.BytesIO()
        self._client.download_fileobj(self._bucket, key, file)
        return file.getbuffer()


class GcsFs:
    """gcsfs: `cat` of many objects, `cat_file` of one, `put` and `get` of files, with their defaults."""

    # The second is imported by its first upload.
    modules = ("gcsfs", "google.cloud.storage.asyncio.async_appendable_object_writer")

    def __init__(self, location: Location) -> None:
        import gcsfs

        where = {} if location.endpoint_url is None else {"token": "anon", "endpoint_url": location.endpoint_url}
        self._files, self._bucket = gcsfs.GCSFileSystem(**where), location.bucket

    def _paths(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._bucket}/{key}" for key in keys]

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        paths = self._paths(keys)
        found = self._files.cat(paths)
        return [found[path] for path in paths]

    def one(self, key: str, size: int) -> Any:
        del size
        return self._files.cat_file(f"{self._bucket}/{key}")

    def put(self, content: bytes, key: str) -> None:
        self._files.pipe_file(f"{self._bucket}/{key}", content)

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        paths, keys = zip(*pairs, strict=True)
        self._files.put(list(paths), self._paths(keys))

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        paths, keys = zip(*pairs, strict=True)
        self._files.get(self._paths(keys), list(paths))


class GcsFsByHand(GcsFs):
    """gcsfs's concurrent `cat_file`, which is experimental. 4 and 8 requests do not differ by more than the noise."""

    def one(self, key: str, size: int) -> Any:
        del size
        return self._files.cat_file(f"{self._bucket}/{key}", concurrency=4)


class TransferManager:
    """google-cloud-storage's `transfer_manager`: processes for large files, threads for many objects, as documented.

    An object is read into memory by `download_as_bytes`, as `transfer_manager` reads large ones to files only.
    """

    modules = ("google.cloud.storage.transfer_manager", "google.auth.credentials")

    def __init__(self, location: Location) -> None:
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
        self._bucket = storage.Client(**where).bucket(location.bucket)

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        files = [io.BytesIO() for _ in keys]
        pairs = [(self._bucket.blob(key), file) for key, file in zip(keys, files, strict=True)]
        self._manager.download_many(pairs, worker_type=self._manager.THREAD, raise_exception=True)
        return [file.getbuffer() for file in files]

    def one(self, key: str, size: int) -> Any:
        del size
        return self._bucket.blob(key).download_as_bytes()

    def put(self, content: bytes, key: str) -> None:
        raise NotImplementedError("upload_chunks_concurrently takes files only")

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        if len(pairs) == 1:
            ((path, key),) = pairs
            self._manager.upload_chunks_concurrently(path, self._bucket.blob(key))
            return
        blobs = [(path, self._bucket.blob(key)) for path, key in pairs]
        self._manager.upload_many(blobs, raise_exception=True)

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        if len(pairs) == 1:
            ((path, key),) = pairs
            self._manager.download_chunks_concurrently(self._bucket.blob(key), path)
            return
        blobs = [(self._bucket.blob(key), path) for path, key in pairs]
        self._manager.download_many(blobs, raise_exception=True)


S3_CLIENTS: dict[str, Any] = {
    "torchobj": Torchobj,
    "obstore": Obstore,
    "obstore by hand": ObstoreByHand,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
}
CLIENTS: dict[str, Any] = S3_CLIENTS | {
    "gcsfs": GcsFs,
    "gcsfs by hand": GcsFsByHand,
    "transfer_manager": TransferManager,
}
