"""The exceptions of torchobj. Each is also a builtin exception. Rust raises them by error kind.

Their text contains operation, URL, status, request id and attempts, because a DataLoader worker
only passes on the text.
"""

import io
from collections.abc import Sequence
from typing import Any

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CheckpointError",
    "ConfigError",
    "CredentialsError",
    "IntegrityError",
    "InvalidKeyError",
    "ManifestError",
    "ManifestMismatchError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "ParquetError",
    "PreconditionFailedError",
    "RangeError",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "TarError",
    "TarIndexError",
    "ThrottledError",
    "TorchobjError",
    "TransferError",
    "UnsupportedError",
]


class TorchobjError(Exception):
    """Base class of all exceptions of torchobj.

    The attributes are None if they do not apply, and after pickling.
    """

    url: str | None = None
    """URL of the object or bucket."""
    operation: str | None = None
    """The operation: `get`, `head`, `list`, `put`, `put part`, `commit` …"""
    status: int | None = None
    """HTTP status of the last response."""
    code: str | None = None
    """Error code of the store, such as `SlowDown`."""
    request_id: str | None = None
    """Request id of the last response, for the operators of the store."""
    attempts: int | None = None
    """Number of attempts."""


class ConfigError(TorchobjError, ValueError):
    """A setting, URL or argument is invalid. The message contains its name, its value and the allowed values."""


class StoreError(TorchobjError, OSError):
    """An operation on a store failed.

    `errno` is that of the system call that failed, such as `errno.ENOSPC` of a full disk; None if none did.
    """


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The object does not exist."""


class BucketNotFoundError(ObjectNotFoundError):
    """The bucket or folder does not exist."""


class AccessDeniedError(StoreError, PermissionError):
    """The permission is missing."""


class CredentialsError(AccessDeniedError):
    """No credentials were found, or the store rejects them."""


class ObjectChangedError(StoreError):
    """The object is no longer the version that was listed, or with which the read started."""


class PreconditionFailedError(StoreError, FileExistsError):
    """The condition of a write is not met: the object exists, or another writer has changed it."""


class RangeError(StoreError, ValueError):
    """The range starts after the end of the object."""


class InvalidKeyError(StoreError, ValueError):
    """The store cannot hold this key."""


class UnsupportedError(StoreError, io.UnsupportedOperation):
    """The store does not support the operation."""


class ThrottledError(StoreError):
    """The store throttled the request, also after the retries."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A timeout elapsed, also after the retries."""


class StoreConnectionError(StoreError, ConnectionError):
    """A connection failed or was interrupted, also after the retries."""


class IntegrityError(StoreError):
    """The bytes that were received or stored do not match their checksum."""


class TransferError(StoreError):
    """Some files of a tree were not transferred; the others were."""

    def __init__(self, message: str, failures: Sequence[tuple[str, Exception]] = (), result: Any = None) -> None:
        super().__init__(message)
        self.failures: list[tuple[str, Exception]] = list(failures)
        """Relative path and exception of each file that was not transferred."""
        self.result = result
        """The `torchobj.files.TreeTransfer` of the other files."""


class ParquetError(TorchobjError, ValueError):
    """A Parquet file is damaged, or has another schema than the files before it."""


class ManifestError(TorchobjError, ValueError):
    """A file is not a manifest of the format that this version of torchobj reads, or is damaged."""


class ManifestMismatchError(TorchobjError, RuntimeError):
    """The ranks of a job listed different sets of objects."""


class TarError(TorchobjError, ValueError):
    """A tar shard is damaged, ends in the middle, is not a tar, or contains something that is not supported."""

    offset: int | None = None
    """Where in the shard, in bytes: after decompression, unless the compressed bytes are damaged."""


class TarIndexError(TorchobjError, ValueError):
    """A file is not an index of tar shards that this version of torchobj reads, is damaged, or older than its shard."""


class CheckpointError(TorchobjError, RuntimeError):
    """A checkpoint was not saved, and nothing was committed; or it does not exist, is damaged or does not fit."""
