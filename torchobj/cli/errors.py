"""Describes errors on one line, with the next step. Prints nothing."""

import re

from torchobj import exceptions
from torchobj.cli.output import escaped

__all__ = ["CommandError", "described", "next_step"]


class CommandError(Exception):
    """A command cannot do what it was called for; the message names the object and the next step."""


#: What to do next, by the type of the error. The first match counts.
_NEXT_STEPS: tuple[tuple[type[Exception], str | None], ...] = (
    # Its message has the endpoint and the next step.
    (exceptions.BucketNotFoundError, None),
    (exceptions.ObjectNotFoundError, "`torchobj ls` shows the keys of a prefix"),
    (exceptions.CredentialsError, "`torchobj doctor URL` shows where credentials are looked for"),
    (exceptions.AccessDeniedError, "`torchobj doctor URL` shows which credentials are used and what they allow"),
    (exceptions.StoreConnectionError, "`torchobj doctor URL` tests the endpoint"),
    (exceptions.StoreTimeoutError, "`torchobj doctor URL` tests the endpoint"),
    (exceptions.ThrottledError, "try again later"),
    (exceptions.PreconditionFailedError, "the object exists, or another writer has replaced it"),
)

#: How the library names the option of the command line.
_OPTION = re.compile(r"(S3|GCS)Options\(anonymous=True\)")


def next_step(error: BaseException) -> str | None:
    """What to do about an error; None if its message says it."""
    step = next((step for kind, step in _NEXT_STEPS if isinstance(error, kind)), None)
    url = getattr(error, "url", None) or "URL"
    # A listing of buckets has none.
    return step if step is None or url.endswith("://") else step.replace("doctor URL", f"doctor {url}")


def described(error: BaseException) -> str:
    """The message of an error on one line, without control characters."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, exceptions.TorchobjError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, (exceptions.TorchobjError, CommandError, OSError)):
        text = f"unexpected {type(error).__name__}: {text}; --log-level debug shows where"
    text = _OPTION.sub("--no-sign-request", text)
    step = next_step(error)
    return escaped(" ".join(text.splitlines()) if step is None else f"{' '.join(text.splitlines())}; {step}")
