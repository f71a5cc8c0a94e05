"""Credential providers of keys and tokens that are passed as options of a file system. They are never pickled.

A pickle refers to them. The process that created them, and children that it forks, find them again. Another process,
such as a spawned worker, takes the same keys from its environment; without them, its first request raises an error.
"""

import dataclasses
import hashlib
import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchobj.config.credentials import GCSCredentials, S3Credentials
from torchobj.exceptions import CredentialsError

__all__ = ["GoogleCredentials", "GoogleFile", "GoogleToken", "PassedKeys"]

_SCOPES = ["https://www.googleapis.com/auth/devstorage.full_control"]

#: Providers that were pickled, by their names. Kept until the process exits, as clients are.
_pickled: dict[str, Any] = {}


class _NotPickled:
    """Base class: equal secrets make equal providers; pickles contain a name, and nothing of the secret."""

    #: What a pickle contains of the secret, to recognise it in another process.
    _mark = ""

    def __init__(self, secret: Any) -> None:
        self._secret, self._name = secret, uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> Any:
        return self._name if self._secret is None else self._secret

    def __reduce__(self) -> tuple[Any, ...]:
        _pickled.setdefault(self._name, self)
        return _restored, (type(self), self._name, self._mark)


def _restored(kind: type[_NotPickled], name: str, mark: str) -> _NotPickled:
    if name not in _pickled:
        provider = kind(None)
        provider._name, provider._mark = name, mark
        _pickled[name] = provider
    found: _NotPickled = _pickled[name]
    return found


def _digest(access_key_id: str) -> str:
    return hashlib.sha256(access_key_id.encode()).hexdigest()[:16]


class PassedKeys(_NotPickled):
    """Keys of S3.

    Args:
        secret: Access key id, secret access key and session token, or None.
    """

    def __init__(self, secret: tuple[str, str, str | None] | None) -> None:
        super().__init__(secret)
        if secret is not None:
            self._mark = _digest(secret[0])

    def __call__(self) -> S3Credentials:
        """Returns the keys, or in a process without them those of the environment, if they have the same id."""
        keys = self._secret
        if keys is None:
            names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
            keys = tuple(os.environ.get(name) for name in names)
            if not keys[0] or not keys[1] or _digest(keys[0]) != self._mark:
                found = "others" if keys[0] and keys[1] else "none"
                raise CredentialsError(
                    "the key and secret that were passed to the file system are not pickled for other processes, and "
                    f"the environment of process {os.getpid()} contains {found}: set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY to them before the process starts, or pass profile=... or a "
                    "StoreConfig with a credential_provider instead"
                )
        return {"access_key_id": keys[0], "secret_access_key": keys[1], "token": keys[2], "expires_at": None}


class GoogleToken(_NotPickled):
    """An access token of Google Cloud Storage."""

    def __call__(self) -> GCSCredentials:
        """Returns the token."""
        _check_present(self._secret)
        return {"token": self._secret, "expires_at": None}


class GoogleCredentials(_NotPickled):
    """Credentials of the package google-auth, or the content of a JSON file of credentials.

    Args:
        secret: A `google.auth.credentials.Credentials`, the content as a JSON text, or None.
    """

    _loaded: Any = None

    def __call__(self) -> GCSCredentials:
        """Returns a valid token."""
        _check_present(self._secret)
        if self._loaded is None:
            self._loaded = _from_json(self._secret) if isinstance(self._secret, str) else self._secret
        return _token_of(self._loaded)

    def _key(self) -> Any:
        # Credentials change when they are renewed.
        return self._secret if isinstance(self._secret, str) else self._name


@dataclasses.dataclass(frozen=True)
class GoogleFile:
    """Credentials in a JSON file, of a service account or a user. The file is read for each token."""

    path: str

    def __call__(self) -> GCSCredentials:
        """Returns a valid token."""
        return _token_of(_from_json(Path(self.path).read_text()))


def _from_json(text: str) -> Any:
    info = json.loads(text)
    if info.get("type") == "service_account":
        from google.oauth2 import service_account  # noqa: PLC0415  an optional package

        return service_account.Credentials.from_service_account_info(info, scopes=_SCOPES)  # type: ignore[no-untyped-call]
    from google import auth  # noqa: PLC0415  an optional package

    return auth.load_credentials_from_dict(info, scopes=_SCOPES)[0]  # type: ignore[no-untyped-call]


def _token_of(credentials: Any) -> GCSCredentials:
    if not credentials.valid:
        from google.auth.transport.requests import Request  # noqa: PLC0415  an optional package

        credentials.refresh(Request())
    expiry: datetime | None = credentials.expiry
    return {"token": credentials.token, "expires_at": None if expiry is None else expiry.replace(tzinfo=UTC)}


def _check_present(secret: object) -> None:
    if secret is None:
        raise CredentialsError(
            "the token that was passed to the file system is not pickled for other processes: pass the path of a JSON "
            "file as token=..., a StoreConfig with a credential_provider, or use Application Default Credentials"
        )
