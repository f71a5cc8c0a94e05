"""What a dataset does about a sample that cannot be read or made."""

from collections.abc import Callable
from typing import Any, Literal

from torchobj.exceptions import ConfigError

#: Called with index, URL and exception; returns the sample to use.
Handler = Callable[[int, str, Exception], Any]
OnError = Literal["raise", "replace"] | Handler

#: So many neighbours are tried for a sample that is to be replaced.
REPLACEMENTS = 16


def check_on_error(on_error: Any) -> None:
    """Refuses what is no policy for a dataset with a length.

    Raises:
        ConfigError: As said; `skip` would make batches of different sizes.
    """
    if on_error == "skip":
        raise ConfigError(
            "on_error='skip': is for iterable datasets, batches of a map-style one would shrink; use 'replace'"
        )
    if on_error not in ("raise", "replace") and not callable(on_error):
        raise ConfigError(
            f"on_error={on_error!r}: must be 'raise', 'replace' or a callable (index, url, error) -> sample"
        )


def note(error: BaseException, what: str, url: str, index: int) -> None:
    """Adds to an exception, in its traceback, which sample it is about."""
    error.add_note(f"{what} of sample {index}, {url}")
