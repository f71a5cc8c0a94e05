"""Clients that save a state dict to S3 and load it, with one interface. `states` measures them.

Each is used with its defaults, as its own documentation shows for checkpoints; all write what `torch.save` writes, and
load to the CPU with `weights_only=True`.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from benchmarks.harness.rivals.client import Client
from benchmarks.lab.location import Location


class CheckpointClient(Client):
    """A client to measure. By default torch writes and reads its files."""

    def file(self, key: str, mode: str) -> Any:
        """Returns a context manager of a file, whose mode is `wb` or `rb`."""
        raise NotImplementedError

    def save(self, state: Any, key: str) -> None:
        """Writes an object that holds the state."""
        with self.file(key, "wb") as file:
            torch.save(state, file)

    def load(self, key: str) -> Any:
        """Returns the state of an object."""
        with self.file(key, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)


class Torchobj(CheckpointClient):
    """`torchobj.save` and `torchobj.load` with their defaults: checksums of all records are written and verified."""

    modules = ("torchobj", "torchobj.checkpoint")

    def open(self, location: Location) -> None:
        import torchobj

        self._module, self._config = torchobj, location.config()

    def save(self, state: Any, key: str) -> None:
        self._module.save(state, self._location.url(key), config=self._config)

    def load(self, key: str) -> Any:
        return self._module.load(self._location.url(key), map_location="cpu", config=self._config)


class S3TorchConnector(CheckpointClient):
    """s3torchconnector's `S3Checkpoint`, whose writer and reader torch uses as files."""

    modules = ("s3torchconnector",)

    def open(self, location: Location) -> None:
        from s3torchconnector import S3Checkpoint

        self._checkpoint = S3Checkpoint(**location.s3torchconnector())

    def file(self, key: str, mode: str) -> Any:
        url = self._location.url(key)
        return self._checkpoint.writer(url) if mode == "wb" else self._checkpoint.reader(url)


class S3Fs(CheckpointClient):
    """s3fs, with fsspec's files passed to torch."""

    modules = ("s3fs",)

    def open(self, location: Location) -> None:
        import s3fs

        self._files = s3fs.S3FileSystem(endpoint_url=location.endpoint_url)

    def file(self, key: str, mode: str) -> Any:
        return self._files.open(f"{self._location.bucket}/{key}", mode)


class MultiStorageClient(CheckpointClient):
    """multi-storage-client's `torch.save` and `torch.load`, which use boto3 by default."""

    modules = ("multistorageclient", "multistorageclient.contrib.torch", "boto3")
    options: ClassVar[dict[str, Any]] = {}

    def open(self, location: Location) -> None:
        from multistorageclient.contrib import torch as adapted

        where = {"base_path": location.bucket, "endpoint_url": location.endpoint_url, "region_name": location.region}
        profile = {"storage_provider": {"type": "s3", "options": {**where, **self.options}}}
        # It requires a YAML file, and JSON is YAML; the file is deleted at the end of the process.
        file = os.memfd_create("config")
        os.write(file, json.dumps({"profiles": {"bench": profile}}).encode())
        os.environ["MSC_CONFIG"] = f"/proc/self/fd/{file}"
        self._adapted = adapted

    def save(self, state: Any, key: str) -> None:
        self._adapted.save(state, f"msc://bench/{key}")

    def load(self, key: str) -> Any:
        return self._adapted.load(f"msc://bench/{key}", map_location="cpu", weights_only=True)


class MultiStorageClientInRust(MultiStorageClient):
    """Like `MultiStorageClient`, with its Rust client, which saves faster; loading is not measured."""

    options: ClassVar[dict[str, Any]] = {"rust_client": {"allow_http": True}}


class Boto3(CheckpointClient):
    """boto3 with a `BytesIO` between it and the stock torch: the reference for what others wrote."""

    modules = ("boto3", "s3transfer", "botocore.config")

    def open(self, location: Location) -> None:
        self._client = location.boto3()

    @contextlib.contextmanager
    def file(self, key: str, mode: str) -> Iterator[io.BytesIO]:
        file = io.BytesIO()
        if mode == "rb":
            self._client.download_fileobj(self._location.bucket, key, file)
            file.seek(0)
        yield file
        if mode == "wb":
            file.seek(0)
            self._client.upload_fileobj(file, self._location.bucket, key)


CLIENTS: dict[str, type[CheckpointClient]] = {
    "torchobj": Torchobj,
    "s3torchconnector": S3TorchConnector,
    "s3fs": S3Fs,
    "multi-storage-client": MultiStorageClient,
    "multi-storage-client in Rust": MultiStorageClientInRust,
    "boto3": Boto3,
}
