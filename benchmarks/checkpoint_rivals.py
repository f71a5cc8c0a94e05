"""Clients that save a state dict to S3 and load it, with one face. Leaves measuring to `checkpoint_measure`.

Each is used as its own documentation shows for checkpoints, with its defaults; all write what `torch.save` writes, and
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
from benchmarks.lab.place import Place


class Client(Protocol):
    """What is measured."""

    def save(self, state: Any, key: str) -> None:
        """Writes an object that holds the state."""

    def load(self, key: str) -> Any:
        """The state of an object."""


class Torchobj:
    """`torchobj.save` and `torchobj.load`, with its defaults: every record's checksum is written, and verified."""

    modules = ("torchobj", "torchobj.checkpoint")

    def __init__(self, place: Place) -> None:
        import torchobj

        self._module, self._bucket = torchobj, place.bucket
        self._where = {"region": place.region, "endpoint_url": place.endpoint_url}

    def save(self, state: Any, key: str) -> None:
        self._module.save(state, f"s3://{self._bucket}/{key}", **self._where)

    def load(self, key: str) -> Any:
        return self._module.load(f"s3://{self._bucket}/{key}", map_location="cpu", **self._where)


class S3TorchConnector:
    """s3torchconnector's `S3Checkpoint`, whose writer and reader are files to torch."""

    modules = ("s3torchconnector",)

    def __init__(self, place: Place) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        config = S3ClientConfig(force_path_style=place.endpoint_url is not None)
        region = place.region or "us-east-1"
        self._checkpoint = S3Checkpoint(region, endpoint=place.endpoint_url, s3client_config=config)
        self._bucket = place.bucket

    def save(self, state: Any, key: str) -> None:
        with self._checkpoint.writer(f"s3://{self._bucket}/{key}") as writer:
            torch.save(state, writer)

    def load(self, key: str) -> Any:
        with self._checkpoint.reader(f"s3://{self._bucket}/{key}") as reader:
            return torch.load(reader, map_location="cpu", weights_only=True)


class S3Fs:
    """s3fs, as fsspec's files are used with torch."""

    packages = True
    modules = ("s3fs",)

    def __init__(self, place: Place) -> None:
        import s3fs

        self._files = s3fs.S3FileSystem(endpoint_url=place.endpoint_url)
        self._bucket = place.bucket

    def save(self, state: Any, key: str) -> None:
        with self._files.open(f"{self._bucket}/{key}", "wb") as file:
            torch.save(state, file)

    def load(self, key: str) -> Any:
        with self._files.open(f"{self._bucket}/{key}", "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)


class MultiStorageClient:
    """multi-storage-client's `torch.save` and `torch.load`, which read and write by boto3 unless told otherwise."""

    packages = True
    modules = ("multistorageclient", "multistorageclient.contrib.torch", "boto3")
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: Place) -> None:
        options = {
            "base_path": place.bucket,
            "endpoint_url": place.endpoint_url,
            "region_name": place.region,
            **self.options,
        }
        profile = {"storage_provider": {"type": "s3", "options": options}}
        from multistorageclient.contrib import torch as adapted

        # It wants a file of YAML, which JSON is; this one ends with the process.
        file = os.memfd_create("config")
        os.write(file, json.dumps({"profiles": {"bench": profile}}).encode())
        os.environ["MSC_CONFIG"] = f"/proc/self/fd/{file}"
        self._adapted = adapted

    def save(self, state: Any, key: str) -> None:
        self._adapted.save(state, f"msc://bench/{key}")

    def load(self, key: str) -> Any:
        return self._adapted.load(f"msc://bench/{key}", map_location="cpu", weights_only=True)


class MultiStorageClientInRust(MultiStorageClient):
    """The same by its client in Rust: faster to save, and not measured loading."""

    options: ClassVar[dict[str, Any]] = {"rust_client": {"allow_http": True}}


class Boto3:
    """boto3 with a `BytesIO` between it and torch, which is the stock one: what others wrote is judged by it."""

    modules = ("boto3", "s3transfer", "botocore.config")

    def __init__(self, place: Place) -> None:
        self._client = boto_client(place)
        self._bucket = place.bucket

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
    """Whether a client is one of those that `packages` installs."""
    return hasattr(CLIENTS[name], "packages")


def load(name: str) -> Callable[[Place], Client]:
    """The class of a client, with everything imported that its first use would import."""
    client = CLIENTS[name]
    if needs_packages(name):
        packages.enter()
    for module in client.modules:
        importlib.import_module(module)
    made: Callable[[Place], Client] = client
    return made
