"""Clients that save a state dict to S3 and load it, with one interface. `transfers` measures them.

Each is used with its defaults, as its own documentation shows for checkpoints; all write what `torch.save` writes, and
load to the CPU with `weights_only=True`.
"""

import io
import json
import os
from typing import Any, ClassVar, Protocol

import torch

from benchmarks.lab.location import Location


class Client(Protocol):
    """A client to measure."""

    def save(self, state: Any, key: str) -> None:
        """Writes an object that holds the state."""

    def load(self, key: str) -> Any:
        """Returns the state of an object."""


class Torchobj:
    """`torchobj.save` and `torchobj.load` with their defaults: checksums of all records are written and verified."""

    modules = ("torchobj", "torchobj.checkpoint")

    def __init__(self, location: Location) -> None:
        import torchobj

        self._module, self._location, self._config = torchobj, location, location.config()

    def save(self, state: Any, key: str) -> None:
        self._module.save(state, self._location.url(key), config=self._config)

    def load(self, key: str) -> Any:
        return self._module.load(self._location.url(key), map_location="cpu", config=self._config)


class S3TorchConnector:
    """s3torchconnector's `S3Checkpoint`, whose writer and reader torch uses as files."""

    modules = ("s3torchconnector",)

    def __init__(self, location: Location) -> None:
        from s3torchconnector import S3Checkpoint

        self._checkpoint, self._location = S3Checkpoint(**location.s3torchconnector()), location

    def save(self, state: Any, key: str) -> None:
        with self._checkpoint.writer(self._location.url(key)) as writer:
            torch.save(state, writer)

    def load(self, key: str) -> Any:
        with self._checkpoint.reader(self._location.url(key)) as reader:
            return torch.load(reader, map_location="cpu", weights_only=True)


class S3Fs:
    """s3fs, with fsspec's files passed to torch."""

    packages = True
    modules = ("s3fs",)

    def __init__(self, location: Location) -> None:
        import s3fs

        self._files, self._bucket = s3fs.S3FileSystem(endpoint_url=location.endpoint_url), location.bucket

    def save(self, state: Any, key: str) -> None:
        with self._files.open(f"{self._bucket}/{key}", "wb") as file:
            torch.save(state, file)

    def load(self, key: str) -> Any:
        with self._files.open(f"{self._bucket}/{key}", "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)


class MultiStorageClient:
    """multi-storage-client's `torch.save` and `torch.load`, which use boto3 by default."""

    packages = True
    modules = ("multistorageclient", "multistorageclient.contrib.torch", "boto3")
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, location: Location) -> None:
        options = {
            "base_path": location.bucket,
            "endpoint_url": location.endpoint_url,
            "region_name": location.region,
            **self.options,
        }
        profile = {"storage_provider": {"type": "s3", "options": options}}
        from multistorageclient.contrib import torch as adapted

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


class Boto3:
    """boto3 with a `BytesIO` between it and the stock torch: the reference for what others wrote."""

    modules = ("boto3", "s3transfer", "botocore.config")

    def __init__(self, location: Location) -> None:
        self._client, self._bucket = location.boto3(), location.bucket

    def save(self, state: Any, key: str) -> None:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        self._client.upload_fileobj(file, self._bucket, key)

    def load(self, key: str) -> Any:
        file = io.BytesIO()
        self._client.download_fileobj(self._bucket, key, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


CLIENTS: dict[str, Any] = {
    "torchobj": Torchobj,
    "s3torchconnector": S3TorchConnector,
    "s3fs": S3Fs,
    "multi-storage-client": MultiStorageClient,
    "multi-storage-client in Rust": MultiStorageClientInRust,
    "boto3": Boto3,
}


def needs_packages(name: str) -> bool:
    """Returns whether `packages` installs this client."""
    return hasattr(CLIENTS[name], "packages")
