"""Calls the `credential_provider` of a configuration, for the task in Rust that renews credentials.

Each call runs on a daemon thread of its own, so that a provider that blocks delays neither other requests nor the exit
of the process. The returned credentials are passed to Rust, and are not stored, logged or shown here.
"""

import dataclasses
import inspect
import itertools
import logging
import os
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NotRequired, Protocol, TypedDict

from torchobj.exceptions import ConfigError

logger = logging.getLogger("torchobj")


class S3Credentials(TypedDict):
    """The return value of a `credential_provider` of S3, in the form of obstore's providers."""

    access_key_id: str
    secret_access_key: str
    token: NotRequired[str | None]
    """The session token of temporary credentials."""
    expires_at: datetime | None
    """Time of expiry, with a time zone; None: the credentials do not expire."""


class S3CredentialProvider(Protocol):
    """A callable that returns credentials of S3, or an awaitable of them."""

    def __call__(self) -> S3Credentials | Awaitable[S3Credentials]:
        """Returns credentials that are currently valid."""


class GCSCredentials(TypedDict):
    """The return value of a `credential_provider` of Google Cloud Storage, in the form of obstore's providers."""

    token: str
    """An OAuth 2.0 access token."""
    expires_at: datetime | None
    """Time of expiry, with a time zone; None: the token does not expire."""


class GCSCredentialProvider(Protocol):
    """A callable that returns credentials of Google Cloud Storage, or an awaitable of them."""

    def __call__(self) -> GCSCredentials | Awaitable[GCSCredentials]:
        """Returns credentials that are currently valid."""


class Answer(Protocol):
    """Receives the result of one call: the native `CredentialAnswer`."""

    def credentials(
        self,
        access_key_id: str | None,
        secret_access_key: str | None,
        token: str | None,
        expires_at: float | None,
    ) -> None:
        """Receives the returned credentials; `expires_at` in seconds since 1970."""

    def error(self, message: str) -> None:
        """Receives the error message of a failed call."""


_NAMES = ("access_key_id", "secret_access_key", "token")

_numbers = itertools.count(1)


class _CallGuard:
    """Allows threads to be started until the process exits."""

    def __init__(self) -> None:
        self.lock, self.is_closed = threading.Lock(), False


_call_guard = _CallGuard()


def _reset_in_child() -> None:
    # A thread that does not exist in the child may have held the lock at the time of the fork.
    global _call_guard  # noqa: PLW0603  state of the process
    _call_guard = _CallGuard()


os.register_at_fork(after_in_child=_reset_in_child)


def close() -> None:
    """Prevents further calls, because the interpreter is about to exit."""
    with _call_guard.lock:
        _call_guard.is_closed = True


@dataclasses.dataclass(frozen=True, repr=False)
class StaticCredentials:
    """A provider that returns the same keys of S3, which do not expire. Its repr omits them."""

    access_key_id: str
    secret_access_key: str
    token: str | None

    def __call__(self) -> S3Credentials:
        """Returns the keys."""
        return {**dataclasses.asdict(self), "expires_at": None}  # type: ignore[typeddict-item]  # its fields


class CredentialSource:
    """A provider, as passed to Rust; `number` identifies it in this process."""

    def __init__(self, provider: Callable[[], Any]) -> None:
        self._provider, self.number = provider, next(_numbers)

    def start(self, answer: Answer) -> None:
        """Starts a call, which passes its result to `answer`."""
        with _call_guard.lock:
            if _call_guard.is_closed:
                answer.error("credential_provider is not called while the process exits")
                return
            name = "torchobj-credentials"
            threading.Thread(target=self._run, args=(answer,), name=name, daemon=True).start()

    def _run(self, answer: Answer) -> None:
        try:
            returned = self._provider()
            if inspect.isawaitable(returned):
                import asyncio  # noqa: PLC0415  slow to import, and rarely needed

                returned = asyncio.run(_result_of(returned))
            answer.credentials(*_checked(returned))
        except _InvalidCredentialsError as error:
            answer.error(f"credential_provider {error}")
        except BaseException as error:  # noqa: BLE001  also SystemExit: the waiting request raises it
            # As text, because a log handler that shows local variables would show secrets of the provider.
            logger.debug("credential_provider raised\n%s", traceback.format_exc())
            answer.error(f"credential_provider raised {_shown(error)}")


#: By provider, or by id() if it is not hashable. Kept until the process exits, as clients are.
_sources: dict[Any, CredentialSource] = {}


def source_of(provider: Callable[[], Any]) -> CredentialSource:
    """The source of a provider. Equal providers have the same source, and share connections and credentials."""
    source = CredentialSource(provider)
    try:
        return _sources.setdefault(provider, source)
    except TypeError:
        return _sources.setdefault(id(provider), source)


def check_picklable(provider: Callable[[], Any]) -> None:
    """Raises a `ConfigError` unless the provider can be pickled."""
    try:
        pickle.dumps(provider)
    except Exception as error:
        raise ConfigError(
            f"credential_provider={type(provider)}: cannot be pickled for another process: {_shown(error)}: pass a "
            "function of a module, or an instance of a class of a module whose __call__ creates what cannot be pickled"
        ) from error


class _InvalidCredentialsError(Exception):
    """The return value of a provider is not credentials."""


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _checked(returned: Any) -> tuple[str | None, str | None, str | None, float | None]:
    """The fields of the return value of a provider. Messages contain no values."""
    if not isinstance(returned, Mapping):
        raise _InvalidCredentialsError(f"returned {type(returned)}: must be a dict{_names_of_others(dir(returned))}")
    if "access_key_id" not in returned and (others := _names_of_others(returned)):
        raise _InvalidCredentialsError(f"returned other names{others}")
    for name in _NAMES:
        if not isinstance(returned.get(name), str | None):
            raise _InvalidCredentialsError(f"returned {name!r} as {type(returned[name])}: must be a str")
    if "expires_at" not in returned:
        raise _InvalidCredentialsError(
            "returned no 'expires_at': must be a datetime, or None if the credentials do not expire"
        )
    expires = returned["expires_at"]
    if not isinstance(expires, datetime | None):
        raise _InvalidCredentialsError(f"returned 'expires_at' as {type(expires)}: must be a datetime, or None")
    if expires is not None and expires.tzinfo is None:
        raise _InvalidCredentialsError(
            "returned 'expires_at' without a time zone; use for example datetime.now(timezone.utc)"
        )
    access_key_id, secret_access_key, token = (returned.get(name) for name in _NAMES)
    return access_key_id, secret_access_key, token, None if expires is None else expires.timestamp()


#: Names of botocore, boto3 and STS, by ours.
_OTHER_NAMES = {
    "access_key_id": ("access_key", "aws_access_key_id", "AccessKeyId", "key"),
    "secret_access_key": ("secret_key", "aws_secret_access_key", "SecretAccessKey", "secret"),
    "token": ("session_token", "aws_session_token", "SessionToken"),
    "expires_at": ("expiry_time", "Expiration", "expiration"),
}


def _names_of_others(names: Iterable[str]) -> str:
    """The end of a message that maps names of botocore to those of a provider; empty if there are none."""
    found = {name: other for name, others in _OTHER_NAMES.items() for other in others if other in names}
    if "access_key_id" not in found:
        return ""
    found = {"expires_at": "the time of expiry or None", **found}
    return f": {', '.join(f'{name!r} for {found[name]}' for name in _OTHER_NAMES if name in found)}"


def _shown(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  its own __str__ raised
        return type(error).__name__
