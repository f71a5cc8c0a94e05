"""What happens to samples that cannot be read or built."""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Self

from torchobj._torchobj import Buffer
from torchobj.exceptions import ConfigError
from torchobj.warn_once import PROCESS, warn_once
from torchobj.workers.shared_values import SharedCounter

#: Called with index, URL and exception; returns the sample to use.
Handler = Callable[[int, str, Exception], Any]
OnError = Literal["raise", "replace"] | Handler
OnIterableError = Literal["raise", "skip"] | Handler

#: Maximum number of samples that are tried, including the failed one.
_MAX_TRIES = 16

#: In place of a sample that is skipped.
SKIPPED = object()


class Failure(NamedTuple):
    """A sample that could not be read or built."""

    sample: int
    """Its index."""
    url: str
    """The URL of its object."""
    error: Exception

    @classmethod
    def noted(cls, index: int, url: str, error: Exception, what: str) -> Self:
        """A failure whose exception has a note that names the sample."""
        add_sample_note(error, what, url, index)
        is_attribute = isinstance(error, AttributeError) and isinstance(error.obj, Buffer)
        # "not Buffer", as in the errors of json, and not another class whose name has this word in it.
        if is_attribute or (isinstance(error, TypeError) and re.search(r"\bBuffer\b", str(error))):
            # webdataset has bytes in its place.
            error.add_note("A Buffer is not bytes: pass bytes(buffer), or buffer.decode() where text is expected.")
        return cls(index, url, error)


def stopped(error: Exception) -> Exception:
    """The exception to raise for one of the user: as in generators, a `StopIteration` would end the pass."""
    if not isinstance(error, StopIteration):
        return error
    raised = RuntimeError("a transform or handler of samples raised StopIteration")
    raised.__cause__ = error
    return raised


class FailurePolicy:
    """Returns samples in place of those that failed, and counts these, in this process and its DataLoader workers.

    Args:
        on_error: The argument of a dataset.
        counts_raised: Whether failures that are raised are counted too, because the pass can continue.
    """

    def __init__(self, on_error: OnError | OnIterableError, *, counts_raised: bool = True) -> None:
        self.on_error, self._counts_raised = on_error, counts_raised
        self._failed = SharedCounter()

    @classmethod
    def of_map_style(cls, on_error: Any) -> "FailurePolicy":
        """The policy of a map-style dataset.

        Raises:
            ConfigError: `on_error` is invalid; `skip` would lead to batches of different sizes.
        """
        if on_error == "skip":
            raise ConfigError(
                "on_error='skip': is for iterable datasets, because batches of a map-style dataset would become "
                "smaller; use 'replace'"
            )
        _check_choice(on_error, "replace")
        return cls(on_error, counts_raised=False)

    def check_iterable(self, *, even: bool) -> None:
        """Checks `on_error` of an iterable dataset; `even` if all ranks must yield the same number of samples.

        Raises:
            ConfigError: It is invalid.
        """
        if self.on_error == "replace":
            raise ConfigError(
                "on_error='replace': is for map-style datasets, which can read any other sample; use 'skip'"
            )
        _check_choice(self.on_error, "skip")
        if self.on_error == "skip" and even:
            raise ConfigError(
                "on_error='skip': cannot be combined with uneven, because a rank that skips a sample would yield fewer "
                "samples than the others; use a callable that returns a replacement"
            )

    def replaced(self, on_error: OnIterableError) -> "FailurePolicy":
        """The policy with another `on_error`, which counts with this one."""
        policy = copy.copy(self)
        policy.on_error = on_error
        return policy

    @property
    def count(self) -> int:
        """Number of samples that failed so far."""
        return self._failed.total()

    def sample(self, failure: Failure, others: Iterable[Any | Failure] = ()) -> Any:
        """A sample in place of one that failed, or `SKIPPED` without a replacement.

        Args:
            failure: Why there is no sample.
            others: The samples, or their failures, that `replace` tries in this order.

        Raises:
            Exception: That of the failure, or of the user's callable.
        """
        if self._counts_raised or self.on_error != "raise":
            self._failed.add()
        action = "replaced"
        if self.on_error == "raise":
            raise stopped(failure.error)
        if self.on_error == "skip":
            sample, action = SKIPPED, "skipped"
        elif self.on_error == "replace":
            sample = next((other for other in others if not isinstance(other, Failure)), failure)
            if sample is failure:
                raise stopped(failure.error)
        else:
            try:
                sample = self.on_error(*failure)
            except StopIteration as error:
                raise stopped(error) from error
        _log(failure, action)
        return sample


def _check_choice(on_error: Any, choice: str) -> None:
    if on_error not in ("raise", choice) and not callable(on_error):
        raise ConfigError(
            f"on_error={on_error!r}: must be 'raise', {choice!r} or a callable (index, url, error) -> sample"
        )


def neighbours(position: int, length: int) -> Iterable[int]:
    """The samples to try in place of `position`, in order, of a dataset of `length`."""
    return ((position + step) % length for step in range(1, min(_MAX_TRIES, length)))


def add_sample_note(error: BaseException, what: str, url: str, index: int) -> None:
    """Adds a note to an exception that names the sample."""
    error.add_note(f"{what} of sample {index}, {url}")


def _log(failure: Failure, action: str) -> None:
    """Logs the first failed sample of this process. Failures in DataLoader workers are not reported elsewhere."""
    warn_once(
        PROCESS,
        "sample %d, %s, was %s: %s: %s; further failures in this process are only counted, in failed_samples",
        failure.sample,
        failure.url,
        action,
        type(failure.error).__name__,
        failure.error,
        key="failed sample",
    )
