"""Clients of Google Cloud Storage: those of `rivals`, gcsfs and google-cloud-storage read objects; all of them upload
and download files. `gcs_measure` measures them.

Each is configured as its own documentation advises for speed, and without credentials. A list of one file is
transferred in parallel parts where the client has them.
"""

import contextlib
import importlib
import io
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import rivals
from benchmarks.lab.location import Location
from benchmarks.lab.settings import obstore_store, store_config


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
    """torchobj with its default configuration: `Store.put` of a mapped file, `Store.get_many` into a mapped file."""

    def __init__(self, location: Location) -> None:
        import torchobj

        self._store = torchobj.Store(f"{location.scheme}://{location.bucket}", config=store_config(location))

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
    """obstore's `put` of a path, which uploads parts in parallel, and a stream of one GET written to a file."""

    def __init__(self, location: Location) -> None:
        import obstore

        self._module, self._store = obstore, obstore_store(location)

    def put(self, content: bytes, key: str) -> None:
        self._module.put(self._store, key, content)

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            self._module.put(self._store, key, Path(path))

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        for path, key in pairs:
            with Path(path).open("wb") as file:
                file.writelines(self._module.get(self._store, key).stream(min_chunk_size=8 << 20))


class GcsFs:
    """gcsfs: `cat` of many objects, `cat_file` of one, `put` and `get` of files, with their defaults.

    Without the support of zonal and hierarchical buckets, which would ask for the kind of the bucket by gRPC.
    """

    # The second is imported by its first upload.
    modules = ("gcsfs", "google.cloud.storage.asyncio.async_appendable_object_writer")

    def __init__(self, location: Location) -> None:
        import gcsfs

        where = {} if location.endpoint_url is None else {"token": "anon", "endpoint_url": location.endpoint_url}
        self._files = gcsfs.GCSFileSystem(**where)
        self._bucket = location.bucket

    def many(self, keys: Sequence[str]) -> Sequence[Any]:
        paths = [f"{self._bucket}/{key}" for key in keys]
        found = self._files.cat(paths)
        return [found[path] for path in paths]

    def one(self, key: str, size: int) -> Any:
        del size
        return self._files.cat_file(f"{self._bucket}/{key}")

    def put(self, content: bytes, key: str) -> None:
        self._files.pipe_file(f"{self._bucket}/{key}", content)

    def upload(self, pairs: Sequence[tuple[str, str]]) -> None:
        paths, keys = zip(*pairs, strict=True)
        self._files.put(list(paths), [f"{self._bucket}/{key}" for key in keys])

    def download(self, pairs: Sequence[tuple[str, str]]) -> None:
        paths, keys = zip(*pairs, strict=True)
        self._files.get([f"{self._bucket}/{key}" for key in keys], list(paths))


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


READERS: dict[str, Any] = {
    **{name: rivals.CLIENTS[name] for name in ("torchobj", "obstore", "obstore by hand")},
    "gcsfs": GcsFs,
    "gcsfs by hand": GcsFsByHand,
    "transfer_manager": TransferManager,
}
MOVERS: dict[str, Any] = {
    "torchobj": Torchobj,
    "obstore": Obstore,
    "gcsfs": GcsFs,
    "transfer_manager": TransferManager,
}


def load(name: str) -> tuple[Callable[[Location], Any], Callable[[Location], Any] | None]:
    """Returns a client's classes that read and that move files, with every import done that its first use would do."""
    # Read by gcsfs when it is imported.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    reader, mover = READERS[name], MOVERS.get(name)
    for module in reader.modules:
        importlib.import_module(module)
    return reader, mover
