"""What map-style and iterable datasets have in common: a listing, a transform, a kind of reader, and samples that fail.

The order of samples, and what is done about one that failed, are left to them.
"""

import operator
from collections.abc import Callable, Sized
from typing import Any, Protocol

from typing_extensions import TypeVar

from torchobj._torchobj import Manifest, ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets import handover, ragged  # noqa: F401  teach multiprocessing and default_collate what to do with readers
from torchobj.datasets.errors import note
from torchobj.datasets.listing import Listing
from torchobj.datasets.readers import ReaderConstructor
from torchobj.datasets.shared import Tally

Transform = Callable[[ObjectReader], Any]

#: What the samples of a dataset are, for type checkers.
Sample_co = TypeVar("Sample_co", covariant=True, default=Any)


def identity(reader: ObjectReader) -> ObjectReader:
    """The transform of who gives none."""
    return reader


def position_of(index: Any, samples: Sized) -> int:
    """Where sample `index` stands, from 0 on; a negative one counts from the end.

    Raises:
        TypeError: It is no integer.
        IndexError: There is no such sample.
    """
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"index {index!r}: must be an int") from None
    length = len(samples)
    if not -length <= number < length:
        raise IndexError(f"index {number} of {length} samples")
    return number % length


class Named(Protocol):
    """What knows the URLs of objects by their numbers."""

    def url(self, index: int) -> str:
        """The URL of object `index`."""


class OverObjects:
    """A dataset over the objects of a listing."""

    _listing: Listing
    _config: StoreConfig
    _transform: Transform
    _reader_constructor: ReaderConstructor
    _failed: Tally

    def _set_up_reading(
        self,
        listing: Listing,
        config: StoreConfig,
        transform: Transform | None,
        reader_constructor: ReaderConstructor | None,
    ) -> None:
        self._listing, self._config, self._transform = listing, config, transform or identity
        self._reader_constructor = reader_constructor or ReaderConstructor("sequential")
        self._failed = Tally()

    @property
    def manifest(self) -> Manifest:
        """The objects, listed at the first use: before the loop, in the parent, it is once for all workers."""
        return self._listing.manifest()

    @property
    def failed_samples(self) -> int:
        """How many samples could not be read or made so far, in this process and its DataLoader workers."""
        return self._failed.total()

    @property
    def region(self) -> str | None:
        """The region that was given."""
        return self._config.s3.region

    @property
    def endpoint(self) -> str | None:
        """The endpoint that was given."""
        return self._config.s3.endpoint_url

    def _made(self, names: Named, index: int, reader: ObjectReader | Exception) -> Any:
        """The sample of a reader.

        Raises:
            Exception: What is in the reader's place; or the transform's, with a note of what it is about.
        """
        if isinstance(reader, Exception):
            raise reader
        try:
            return self._transform(reader)
        except Exception as error:
            note(error, "in the transform", names.url(index), index)
            raise
