"""Buckets, objects and multipart uploads in memory. The operations enforce the rules of the API."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .attributes import Attributes
from .checksums import Checksum
from .encryption import Encryption
from .errors import S3Error

DEFAULT_REGION = "us-east-1"

T = TypeVar("T")


@dataclass(frozen=True)
class StoredObject:
    """A complete object; it is replaced, never changed, so that a response in progress keeps its content."""

    body: bytes
    etag: str
    modified_s: float
    attributes: Attributes
    encryption: Encryption
    checksum: Checksum


@dataclass(frozen=True)
class Part:
    """One uploaded part."""

    body: bytes
    etag: str
    modified_s: float
    checksum: Checksum | None


@dataclass
class Upload:
    """A multipart upload in progress; `algorithm` is None if the client requested no checksum."""

    key: str
    upload_id: str
    initiated_s: float
    attributes: Attributes
    encryption: Encryption
    algorithm: str | None
    checksum_type: str
    parts: dict[int, Part] = field(default_factory=dict)


class ObjectTable(Generic[T]):
    """A bucket's objects by key; keys are sorted by code point, which is the order of their UTF-8 bytes."""

    def __init__(self) -> None:
        self._objects: dict[str, T] = {}
        self._keys: list[str] = []

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: str) -> T | None:
        return self._objects.get(key)

    def put(self, key: str, stored: T) -> None:
        if key not in self._objects:
            insort(self._keys, key)
        self._objects[key] = stored

    def delete(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def position_of(self, key: str) -> int:
        """Returns the index of the first key that is not less than this one."""
        return bisect_left(self._keys, key)

    def key_at(self, position: int) -> str | None:
        return self._keys[position] if position < len(self._keys) else None

    def __getitem__(self, key: str) -> T:
        return self._objects[key]


@dataclass(frozen=True)
class Elsewhere:
    """The region and endpoint of a bucket that this server does not hold."""

    region: str
    endpoint: str


@dataclass
class Bucket:
    """A bucket and the flags that a test may set."""

    name: str
    created_s: float
    region: str = DEFAULT_REGION
    public: bool = False
    requester_pays: bool = False
    requires_sse_kms: bool = False
    # As on the S3 interface of GCS: a PUT or CompleteMultipartUpload ignores If-Match and If-None-Match.
    ignores_conditions: bool = False
    # As Ceph 16, which compares the quotes of an If-Match with an ETag that has none: such a PUT is answered with 412.
    refuses_if_match: bool = False
    # DeleteObjects is answered with 501.
    no_bulk_delete: bool = False
    # DeleteObjects needs Content-MD5, and knows no other checksum.
    needs_content_md5: bool = False
    # As MinIO: ListMultipartUploads with a prefix lists the uploads of the key that equals it.
    lists_uploads_of_keys: bool = False
    elsewhere: Elsewhere | None = None
    objects: ObjectTable[StoredObject] = field(default_factory=lambda: ObjectTable[StoredObject]())
    uploads: dict[str, Upload] = field(default_factory=dict)

    @property
    def home_region(self) -> str:
        """The region that x-amz-bucket-region names."""
        return self.elsewhere.region if self.elsewhere is not None else self.region

    def stored(self, key: str) -> StoredObject:
        stored = self.objects.get(key)
        if stored is None:
            raise S3Error("NoSuchKey", details={"Key": key})
        return stored

    def upload(self, key: str, upload_id: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise S3Error("NoSuchUpload", details={"UploadId": upload_id})
        return upload
