"""Handles samples that cannot be read or built."""

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torchobj.exceptions import ConfigError

logger = logging.getLogger("torchobj")

#: Process ids that have logged a failed sample. A forked worker inherits the entry of its parent and logs its own.
_logged: set[int] = set()

#: Called with index, URL and exception; returns the sample to use.
Handler = Callable[[int, str, Exception], Any]
OnError = Literal["raise", "replace"] | Handler
OnIterableError = Literal["raise", "skip"] | Handler

#: Maximum number of samples that are tried, including the failed one.
_MAX_TRIES = 16


def check_map_on_error(on_error: Any) -> None:
    """Checks `on_error` of a map-style dataset.

    Raises:
        ConfigError: It is invalid; `skip` would lead to batches of different sizes.
    """
    if on_error == "skip":
        raise ConfigError(
            "on_error='skip': is for iterable datasets, because batches of a map-style dataset would become smaller; "
            "use 'replace'"
        )
    _check_choice(on_error, "replace")


def check_iterable_on_error(on_error: Any, *, even: bool) -> None:
    """Checks `on_error` of an iterable dataset; `even` if all ranks must yield the same number of samples.

    Raises:
        ConfigError: It is invalid.
    """
    if on_error == "replace":
        raise ConfigError("on_error='replace': is for map-style datasets, which can read any other sample; use 'skip'")
    _check_choice(on_error, "skip")
    if on_error == "skip" and even:
        raise ConfigError(
            "on_error='skip': cannot be combined with uneven, because a rank that skips a sample would yield fewer "
            "samples than the others; use a callable that returns a replacement"
        )


def _check_choice(on_error: Any, choice: str) -> None:
    if on_error not in ("raise", choice) and not callable(on_error):
        raise ConfigError(
            f"on_error={on_error!r}: must be 'raise', {choice!r} or a callable (index, url, error) -> sample"
        )


def neighbours(position: int, length: int) -> Iterator[int]:
    """The samples to try in place of `position`, in order, of a dataset of `length`."""
    return ((position + step) % length for step in range(1, min(_MAX_TRIES, length)))


def add_sample_note(error: BaseException, what: str, url: str, index: int) -> None:
    """Adds a note to an exception that names the sample."""
    error.add_note(f"{what} of sample {index}, {url}")


def log_failed_sample(index: int, url: str, error: Exception, action: str = "replaced") -> None:
    """Logs the first failed sample of this process. Failures in DataLoader workers are not reported elsewhere."""
    if os.getpid() not in _logged:
        _logged.add(os.getpid())
        logger.warning(
            "sample %d, %s, was %s: %s: %s; further failures in this process are only counted, in failed_samples",
            index,
            url,
            action,
            type(error).__name__,
            error,
        )
