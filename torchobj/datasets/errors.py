"""What a dataset does about a sample that cannot be read or made."""

import logging
import os
from collections.abc import Callable
from typing import Any, Literal

from torchobj.exceptions import ConfigError

logger = logging.getLogger("torchobj")

#: Processes, by their ids, that have said that a sample was replaced: a forked worker says it for itself.
_said: set[int] = set()

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


def say_replaced(index: int, url: str, error: Exception) -> None:
    """Logs the first replacement of a sample in this process; in a DataLoader worker nothing else tells of it."""
    if os.getpid() not in _said:
        _said.add(os.getpid())
        logger.warning(
            "sample %d, %s, was replaced: %s: %s; others of this process are counted in failed_samples and not logged",
            index,
            url,
            type(error).__name__,
            error,
        )
