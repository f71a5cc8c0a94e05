"""Which reader a dataset gives to its transform, by the names of s3torchconnector."""

import dataclasses
import math

from torchobj.exceptions import ConfigError

__all__ = ["ReaderConstructor", "S3ReaderConstructor"]

#: What s3torchconnector 1.5 buffers (`RangedS3Reader`).
_RANGE_BUFFER_BYTES = 8 << 20

#: Gaps up to this are read through (`DCPOptimizedS3Reader`).
_DCP_GAP_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class ReaderConstructor:
    """A kind of reader."""

    name: str
    """`sequential`, `range_based` or `dcp_optimized`."""
    jump_bytes: int | None = None
    """What is fetched after a jump, in bytes."""
    ahead_bytes: int | None = None
    """How far ahead of a position that moves on is fetched, in bytes."""

    @property
    def whole(self) -> bool:
        """Whether the object is read whole, before the transform sees it."""
        return self.name == "sequential"


class S3ReaderConstructor:
    """The kinds of reader."""

    @staticmethod
    def sequential() -> ReaderConstructor:
        """The object is read whole, together with the others of its batch. For objects that are read to their end."""
        return ReaderConstructor("sequential")

    @staticmethod
    def range_based(buffer_size: int | None = None) -> ReaderConstructor:
        """Only what is read is fetched, `buffer_size` bytes at a time (8 MiB by default; 0: exactly what is read)."""
        size = _RANGE_BUFFER_BYTES if buffer_size is None else buffer_size
        if size < 0:
            raise ConfigError(f"buffer_size={buffer_size!r}: must be 0 or more")
        return ReaderConstructor("range_based", size, 0)

    @staticmethod
    def dcp_optimized(max_gap_size: float = _DCP_GAP_BYTES) -> ReaderConstructor:
        """For reads in rising order with gaps, as of a distributed checkpoint: fetches ahead up to `max_gap_size`."""
        if math.isnan(max_gap_size) or max_gap_size < 0:
            raise ConfigError(f"max_gap_size={max_gap_size!r}: must be 0 or more")
        return ReaderConstructor("dcp_optimized", None, int(min(max_gap_size, _DCP_GAP_BYTES)))

    @staticmethod
    def default() -> ReaderConstructor:
        """`sequential()`"""
        return S3ReaderConstructor.sequential()

    @staticmethod
    def get_reader_type_string(constructor: ReaderConstructor | None) -> str:
        """`sequential`, `range_based`, `dcp_optimized` or `unknown`."""
        if constructor is None:
            return "sequential"
        return constructor.name if isinstance(constructor, ReaderConstructor) else "unknown"
