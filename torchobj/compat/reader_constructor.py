"""`S3ReaderConstructor`, with the names of s3torchconnector. Does not import torch."""

import math

from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.exceptions import ConfigError

__all__ = ["S3ReaderConstructor"]

#: Buffer size of s3torchconnector 1.5 (`RangedS3Reader`).
_RANGE_BUFFER_BYTES = 8 << 20

#: Maximum gap that is read instead of skipped (`DCPOptimizedS3Reader`).
_DCP_GAP_BYTES = 32 << 20


class S3ReaderConstructor:
    """Creates the `reader_constructor` argument of datasets: the kind of reader that the transform receives.

    Example:
        >>> import torchobj
        >>> _ = torchobj.Store("memory://ranges").put("a", bytes(100))
        >>> dataset = torchobj.ObjectMapDataset.from_prefix(
        ...     "memory://ranges/",
        ...     reader_constructor=torchobj.S3ReaderConstructor.range_based(),
        ...     transform=lambda reader: (reader.seek(90), len(reader.read())),
        ... )
        >>> dataset[0]
        (90, 10)
    """

    @staticmethod
    def sequential() -> ReaderConstructor:
        """The whole object is read, concurrently with the other objects of its batch. The default."""
        return ReaderConstructor("sequential")

    @staticmethod
    def range_based(buffer_size: int | None = None) -> ReaderConstructor:
        """Only the ranges that are read are fetched.

        Args:
            buffer_size: Number of bytes per request. None: 8 MiB. 0: exactly the bytes that are read.

        Raises:
            ConfigError: `buffer_size` is negative.
        """
        size = _RANGE_BUFFER_BYTES if buffer_size is None else buffer_size
        if size < 0:
            raise ConfigError(f"buffer_size={buffer_size!r}: must be 0 or more")
        return ReaderConstructor("range_based", size, 0)

    @staticmethod
    def dcp_optimized(max_gap_size: float = _DCP_GAP_BYTES) -> ReaderConstructor:
        """For reads in ascending order with gaps, as in distributed checkpoints.

        Args:
            max_gap_size: Maximum number of bytes that are fetched ahead, and of a gap that is read instead of skipped;
                at most 32 MiB.

        Raises:
            ConfigError: `max_gap_size` is negative or not a number.
        """
        if math.isnan(max_gap_size) or max_gap_size < 0:
            raise ConfigError(f"max_gap_size={max_gap_size!r}: must be 0 or more")
        return ReaderConstructor("dcp_optimized", None, int(min(max_gap_size, _DCP_GAP_BYTES)))

    @staticmethod
    def default() -> ReaderConstructor:
        """The same as `sequential()`."""
        return S3ReaderConstructor.sequential()

    @staticmethod
    def get_reader_type_string(constructor: ReaderConstructor | None) -> str:
        """Returns the name of a kind of reader: `sequential`, `range_based`, `dcp_optimized` or `unknown`.

        Args:
            constructor: The kind of reader; None is `sequential`.
        """
        if constructor is None:
            return "sequential"
        return constructor.name if isinstance(constructor, ReaderConstructor) else "unknown"
