"""Every exception of torchobj. Each is also the builtin that people already catch. Raised from Rust by kind.

Their text names operation, URL, status, request id and attempts: a DataLoader worker carries nothing but the text.
"""

import io

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CheckpointError",
    "ConfigError",
    "CredentialsError",
    "IntegrityError",
    "InvalidKeyError",
    "ManifestMismatchError",
    "ObjectChangedError",
    "ObjectNotFoundError",
    "PreconditionFailedError",
    "RangeError",
    "StoreConnectionError",
    "StoreError",
    "StoreTimeoutError",
    "ThrottledError",
    "TorchobjError",
    "UnsupportedError",
]


class TorchobjError(Exception):
    """Anything that torchobj raises itself.

    The attributes are None where there is nothing to say, and after a journey through a pickle.
    """

    url: str | None = None
    """On which object or bucket."""
    operation: str | None = None
    """What was being done: `get`, `head`, `list`, `put`, `put part`, `commit` …"""
    status: int | None = None
    """HTTP status of the last answer."""
    code: str | None = None
    """The store's own error code, as `SlowDown`."""
    request_id: str | None = None
    """The id by which the store's operators find the request."""
    attempts: int | None = None
    """How often it was tried."""


class ConfigError(TorchobjError, ValueError):
    """A setting, a URL or an argument is wrong. Names it, its value and what is allowed."""


class StoreError(TorchobjError, OSError):
    """An operation of a store failed."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """No such object."""


class BucketNotFoundError(ObjectNotFoundError):
    """No such bucket or folder."""


class AccessDeniedError(StoreError, PermissionError):
    """The permission is missing."""


class CredentialsError(AccessDeniedError):
    """No credentials were found, or the store does not take them."""


class ObjectChangedError(StoreError):
    """The object is no longer the version that was listed or that the read began with."""


class PreconditionFailedError(StoreError, FileExistsError):
    """The condition of a write does not hold: the object exists, or another writer was first."""


class RangeError(StoreError, ValueError):
    """The range begins behind the end of the object."""


class InvalidKeyError(StoreError, ValueError):
    """The store cannot hold this key."""


class UnsupportedError(StoreError, io.UnsupportedOperation):
    """The store cannot do this."""


class ThrottledError(StoreError):
    """The store asked for fewer requests, and went on asking after the retries."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Nothing came for too long, and went on not coming after the retries."""


class StoreConnectionError(StoreError, ConnectionError):
    """No connection could be made, or it broke, and went on breaking after the retries."""


class IntegrityError(StoreError):
    """Bytes arrived, and are not what was sent."""


class ManifestMismatchError(TorchobjError, RuntimeError):
    """The ranks of a job listed different sets of objects."""


class CheckpointError(TorchobjError, RuntimeError):
    """A checkpoint was not made, and nothing was committed; or there is none, or none that fits."""
