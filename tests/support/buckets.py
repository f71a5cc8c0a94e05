"""Buckets of the test servers with one interface for all providers. A client of the provider reads and writes them."""

from typing import Any, NamedTuple, Protocol, cast

import torchobj
import torchobj.fsspec
from tests.servers import boto_client, gcs_client, launch
from tests.strict.control import Control
from tests.support.credential_providers import FixedToken
from torchobj import GCSOptions, S3Options, StoreConfig

#: Prefix of the parts of uploads to GCS.
PARTS = ".torchobj-parts/"


class AnyBucket(Protocol):
    """What `Bucket` and `GcsBucket` have in common."""

    name: str
    config: StoreConfig
    server: launch.Server

    @property
    def url(self) -> str: ...
    @property
    def map_dataset(self) -> Any: ...
    @property
    def iterable_dataset(self) -> Any: ...
    @property
    def files(self) -> torchobj.fsspec.ObjectFileSystem: ...
    def body(self, key: str) -> bytes: ...
    def keys(self) -> list[str]: ...
    def uploads(self) -> list[Any]: ...
    def write(self, key: str, data: bytes) -> None: ...
    def remove(self, key: str) -> None: ...
    def version(self, key: str) -> str: ...
    def headers(self, key: str) -> tuple[str, str, str]: ...


class Bucket(NamedTuple):
    """A bucket of an S3 server."""

    name: str
    config: StoreConfig
    server: launch.Server
    boto: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def map_dataset(self) -> Any:
        """The map-style dataset of the provider."""
        return torchobj.S3MapDataset

    @property
    def iterable_dataset(self) -> Any:
        """The iterable dataset of the provider."""
        return torchobj.S3IterableDataset

    @property
    def files(self) -> torchobj.fsspec.ObjectFileSystem:
        """The file system of the provider for fsspec."""
        return torchobj.fsspec.ObjectFileSystem(self.config)

    def body(self, key: str) -> bytes:
        """Returns an object's content, read by boto3."""
        return cast("bytes", self.boto.get_object(Bucket=self.name, Key=key)["Body"].read())

    def keys(self) -> list[str]:
        return [item["Key"] for item in self.boto.list_objects_v2(Bucket=self.name).get("Contents", [])]

    def uploads(self) -> list[Any]:
        return list(self.boto.list_multipart_uploads(Bucket=self.name).get("Uploads", []))

    def write(self, key: str, data: bytes) -> None:
        self.boto.put_object(Bucket=self.name, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self.boto.delete_object(Bucket=self.name, Key=key)

    def version(self, key: str) -> str:
        return str(self.boto.head_object(Bucket=self.name, Key=key)["ETag"])

    def headers(self, key: str) -> tuple[str, str, str]:
        """Returns the type, Cache-Control and language of an object."""
        head = self.boto.head_object(Bucket=self.name, Key=key)
        return head["ContentType"], head["CacheControl"], head["ContentLanguage"]


class GcsBucket(NamedTuple):
    """A bucket of a server of Google Cloud Storage."""

    name: str
    config: StoreConfig
    server: launch.Server
    official: Any

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    @property
    def map_dataset(self) -> Any:
        """The map-style dataset of the provider."""
        return torchobj.ObjectMapDataset

    @property
    def iterable_dataset(self) -> Any:
        """The iterable dataset of the provider."""
        return torchobj.ObjectIterableDataset

    @property
    def files(self) -> torchobj.fsspec.ObjectFileSystem:
        """The file system of the provider for fsspec."""
        return torchobj.fsspec.GCSFileSystem(self.config)

    def body(self, key: str) -> bytes:
        """Returns an object's content, read by google-cloud-storage."""
        return cast("bytes", self.official.blob(key).download_as_bytes())

    def _names(self) -> list[str]:
        return [blob.name for blob in self.official.list_blobs()]

    def keys(self) -> list[str]:
        """Returns the keys of all objects, except for parts of uploads."""
        return [name for name in self._names() if not name.startswith(PARTS)]

    def uploads(self) -> list[str]:
        """Returns the keys of parts of uploads."""
        return [name for name in self._names() if name.startswith(PARTS)]

    def write(self, key: str, data: bytes) -> None:
        self.official.blob(key).upload_from_string(data, "application/octet-stream")

    def remove(self, key: str) -> None:
        self.official.blob(key).delete()

    def version(self, key: str) -> str:
        return str(self.official.get_blob(key).generation)

    def headers(self, key: str) -> tuple[str, str, str]:
        """Returns the type, Cache-Control and language of an object."""
        blob = self.official.get_blob(key)
        return blob.content_type, blob.cache_control, blob.content_language


def new_s3_bucket(name: str, profile: str, server: launch.Server) -> Bucket:
    """Creates a bucket; its configuration has the credentials of a profile."""
    boto = boto_client.shared_client(server)
    if not _created_by_control(name, server):
        boto.create_bucket(Bucket=name)
    return Bucket(name, StoreConfig(s3=S3Options(endpoint_url=server.endpoint, profile=profile)), server, boto)


def new_gcs_bucket(name: str, server: launch.Server, **options: Any) -> GcsBucket:
    """Creates a bucket; its configuration has the server's token, or no credentials if the server checks none.

    options: other fields of `GCSOptions`.
    """
    client = gcs_client.shared_client(server)
    if not _created_by_control(name, server):
        client.create_bucket(name)
    access = {"credential_provider": FixedToken(server.token)} if server.token else {"anonymous": True}
    gcs = GCSOptions(endpoint_url=server.endpoint, **access | options)
    return GcsBucket(name, StoreConfig(gcs=gcs), server, client.bucket(name))


def _created_by_control(name: str, server: launch.Server) -> bool:
    """Creates a bucket by the control API of a strict server, for which a request of the official clients takes longer."""
    if server.control is None:
        return False
    Control(server.control).bucket(name)
    return True
