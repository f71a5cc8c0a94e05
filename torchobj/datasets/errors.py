"""What a dataset does about a sample that cannot be read or made."""

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torchobj.exceptions import ConfigError

logger = logging.getLogger("torchobj")

#: Processes, by their ids, that have said that a sample failed: a forked worker says it for itself.
_said: set[int] = set()

#: Called with index, URL and exception; returns the sample to use.
Handler = Callable[[int, str, Exception], Any]
OnError = Literal["raise", "replace"] | Handler
OnErrorInARow = Literal["raise", "skip"] | Handler

#: So many samples are tried at most, the one that is to be replaced included.
_REPLACEMENTS = 16


def check_on_error(on_error: Any) -> None:
    """Refuses what is no policy for a dataset with a length.

    Raises:
        ConfigError: As said; `skip` would make batches of different sizes.
    """
    if on_error == "skip":
        raise ConfigError(
            "on_error='skip': is for iterable datasets, batches of a map-style one would shrink; use 'replace'"
        )
    _check_word(on_error, "replace")


def check_on_error_in_a_row(on_error: Any, *, even: bool) -> None:
    """Refuses what is no policy for an iterable dataset; `even` for one whose ranks are to yield equally many samples.

    Raises:
        ConfigError: As said.
    """
    if on_error == "replace":
        raise ConfigError(
            "on_error='replace': is for map-style datasets, an iterable one has nothing to go on without; use 'skip'"
        )
    _check_word(on_error, "skip")
    if on_error == "skip" and even:
        raise ConfigError(
            "on_error='skip' with uneven: what one rank skips the others do not, and they would wait for it; "
            "use a callable that returns a sample in its place"
        )


def _check_word(on_error: Any, word: str) -> None:
    if on_error not in ("raise", word) and not callable(on_error):
        raise ConfigError(
            f"on_error={on_error!r}: must be 'raise', {word!r} or a callable (index, url, error) -> sample"
        )


def neighbours(position: int, length: int) -> Iterator[int]:
    """The samples to try in place of `position`, in order, of a dataset of `length`."""
    return ((position + step) % length for step in range(1, min(_REPLACEMENTS, length)))


def note(error: BaseException, what: str, url: str, index: int) -> None:
    """Adds to an exception, in its traceback, which sample it is about."""
    error.add_note(f"{what} of sample {index}, {url}")


def say_failed(index: int, url: str, error: Exception, become: str = "replaced") -> None:
    """Logs the first sample that failed in this process; in a DataLoader worker nothing else tells of it."""
    if os.getpid() not in _said:
        _said.add(os.getpid())
        logger.warning(
            "sample %d, %s, was %s: %s: %s; others of this process are counted in failed_samples and not logged",
            index,
            url,
            become,
            type(error).__name__,
            error,
        )
