"""S3 clients with one interface: read many small objects at once, read one large object. `measure` measures them.

Each is configured for speed as its own documentation advises, or faster if trials on loopback found a better way; a
configuration that the documentation does not show is a client of its own. Every byte of every object ends in the
caller: a list of buffers for many objects, one contiguous buffer for one.
"""

import asyncio
import importlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.settings import obstore_store, store_config

# Part size of a large object that is read in parallel ranges, as AWS advises.
_PART_BYTES = 8 << 20

# Concurrent requests over a network, for all clients. On loopback each client has the number that is fastest there.
_FAR_REQUESTS = 64


class Client(Protocol):
    """A client to measure."""

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        """Returns the bytes of each object, in order."""

    def one(self, key: str, size: int) -> Any:
        """Returns the bytes of one object. Clients that need the size for a parallel read use `size`."""


class Torchobj:
    """torchobj with its default configuration: `Store.get_many`, and `Store.get` without the size."""

    modules = ("torchobj",)

    def __init__(self, location: Location) -> None:
        import torchobj

        self._store = torchobj.Store(f"{location.scheme}://{location.bucket}", config=store_config(location))

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._store.get_many(keys)

    def one(self, key: str, size: int) -> Any:
        del size
        return self._store.get(key)


class Obstore:
    """obstore as documented: `get_async` and `bytes_async`, gathered; one object by `get`.

    With torchobj's concurrency. 32 and 64, a pool of tasks instead of a semaphore, and all 256 at once were tried: all
    256 at once is the slowest, the others do not differ by more than the noise.
    """

    modules = ("obstore", "obstore.store")

    def __init__(self, location: Location) -> None:
        import obstore

        self._module, self._store = obstore, obstore_store(location)
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


class ObstoreByHand:
    """obstore at its fastest in trials: its blocking calls in threads, and ranges of 8 MiB copied into one array.

    A blocking call polls its request in the calling thread; an async one pays for several wake-ups between threads.
    4 to 64 threads were tried: from 8 to 24 they do not differ by more than the noise, 64 are slower. (`get_ranges`
    merges ranges that touch into one request, so it reads no object in parallel.)
    """

    modules = ("obstore", "obstore.store")

    def __init__(self, location: Location) -> None:
        import obstore

        self._module, self._store = obstore, obstore_store(location)
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


class S3TorchConnector:
    """s3torchconnector: what `S3MapDataset.__getitem__` does with `transform=S3Reader.read`, in threads.

    Its reads release the GIL. 1, 4, 8, 16 and 32 threads were tried at 10 and 100 Gbit/s of target: 16 and 10 are the
    fastest at 4 KiB, and at 110 KiB no other is faster by more than the noise. The range-based reader is five times
    slower for small objects; for large ones `read` and its `readinto` are alike.
    """

    modules = ("s3torchconnector",)

    def __init__(self, location: Location) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=location.endpoint_url is not None)
        self._client = S3Client(location.region or "us-east-1", endpoint=location.endpoint_url, s3client_config=config)
        self._bucket = location.bucket
        self._threads = ThreadPoolExecutor(16 if location.near else _FAR_REQUESTS)

    def _read(self, key: str) -> bytes:
        content: bytes = self._client.get_object(self._bucket, key).read()
        return content

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(self._read, keys))

    def one(self, key: str, size: int) -> Any:
        del size
        return self._read(key)


class Boto3:
    """boto3: `get_object` in threads, and `download_fileobj` into a `BytesIO` with its defaults.

    The GIL limits it: on loopback it is no faster with 32 threads than with 1.
    """

    modules = ("boto3", "s3transfer", "botocore.config")

    def __init__(self, location: Location) -> None:
        threads = 10 if location.near else _FAR_REQUESTS
        self._bucket = location.bucket
        self._threads = ThreadPoolExecutor(threads)
        self._client = boto_client(location, max_pool_connections=threads)

    def _read(self, key: str) -> bytes:
        content: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        return content

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._threads.map(self._read, keys))

    def one(self, key: str, size: int) -> Any:
        del size
        file = io.BytesIO()
        self._client.download_fileobj(self._bucket, key, file)
        return file.getbuffer()


CLIENTS: dict[str, Any] = {
    "torchobj": Torchobj,
    "obstore": Obstore,
    "obstore by hand": ObstoreByHand,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
}


def load(name: str) -> Callable[[Location], Client]:
    """Returns a client's class, with every import done that its first use would do."""
    client = CLIENTS[name]
    for module in client.modules:
        importlib.import_module(module)
    made: Callable[[Location], Client] = client
    return made
