"""Clients that save a state dict to S3 and load it, with one interface. `checkpoint_measure` measures them.

Each is used with its defaults, as its own documentation shows for checkpoints; all write what `torch.save` writes, and
load to the CPU with `weights_only=True`.
"""

import importlib
import io
import json
import os
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from benchmarks.lab import packages
from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.settings import store_config


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

        self._module, self._location, self._config = torchobj, location, store_config(location)

    def save(self, state: Any, key: str) -> None:
        self._module.save(state, self._location.url(key), config=self._config)

    def load(self, key: str) -> Any:
        return self._module.load(self._location.url(key), map_location="cpu", config=self._config)


class S3TorchConnector:
    """s3torchconnector's `S3Checkpoint`, whose writer and reader torch uses as files."""

    modules = ("s3torchconnector",)

    def __init__(self, location: Location) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        config = S3ClientConfig(force_path_style=location.endpoint_url is not None)
        region = location.region or "us-east-1"
        self._checkpoint = S3Checkpoint(region, endpoint=location.endpoint_url, s3client_config=config)
        self._bucket = location.bucket

    def save(self, state: Any, key: str) -> None:
        with self._checkpoint.writer(f"s3://{self._bucket}/{key}") as writer:
            torch.save(state, writer)

    def load(self, key: str) -> Any:
        with self._checkpoint.reader(f"s3://{self._bucket}/{key}") as reader:
            return torch.load(reader, map_location="cpu", weights_only=True)


class S3Fs:
    """s3fs, with fsspec's files passed to torch."""

    packages = True
    modules = ("s3fs",)

    def __init__(self, location: Location) -> None:
        import s3fs

        self._files = s3fs.S3FileSystem(endpoint_url=location.endpoint_url)
        self._bucket = location.bucket

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
        self._client = boto_client(location)
        self._bucket = location.bucket

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


def load(name: str) -> Callable[[Location], Client]:
    """Returns a client's class, with every import done that its first use would do."""
    client = CLIENTS[name]
    if needs_packages(name):
        packages.enter()
    for module in client.modules:
        importlib.import_module(module)
    made: Callable[[Location], Client] = client
    return made
