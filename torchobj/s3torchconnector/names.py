"""The names of s3torchconnector: also attributes of `torchobj`, such as `torchobj.S3Checkpoint`. Does not import torch.

`S3MapDataset` and `S3IterableDataset`, which are names of torchobj too, are in `datasets`.
"""

import math

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError, StoreError
from torchobj.reading.reader_constructor import SEQUENTIAL, ReaderConstructor
from torchobj.s3torchconnector.client_config import S3ClientConfig, connector_config
from torchobj.store.file_objects import ObjectWriter, open_reader
from torchobj.urls import parse_url

__all__ = ["S3Checkpoint", "S3ClientConfig", "S3Exception", "S3Reader", "S3ReaderConstructor", "S3Writer"]

#: The exception.
S3Exception = StoreError
#: The file for reading.
S3Reader = ObjectReader
#: The file for writing.
S3Writer = ObjectWriter

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
        return SEQUENTIAL

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


class S3Checkpoint:
    """Writes and reads checkpoints in S3.

    Args:
        region: Region of the bucket; detected if None.
        endpoint: URL of the store; AWS or the environment's if None.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        config: The same as `s3client_config`, by its name in torchobj.

    Example:
        ```python
        checkpoint = S3Checkpoint()
        with checkpoint.writer("s3://bucket/step-100.pt") as writer:
            torch.save(model.state_dict(), writer)
        with checkpoint.reader("s3://bucket/step-100.pt") as reader:
            state = torch.load(reader)
        ```
    """

    def __init__(
        self,
        region: str | None = None,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        *,
        config: StoreConfig | None = None,
    ) -> None:
        self.region, self.endpoint = region, endpoint
        self._config = connector_config(config, s3client_config, region, endpoint)

    def reader(self, s3_uri: str) -> ObjectReader:
        """Returns a file to read an object, for `torch.load`: large tensors are read in parallel into their own memory.

        Raises:
            ConfigError: The URL is not an `s3://` URL of an object.
        """
        return open_reader(str(parse_url(s3_uri, ("s3",))), self._config)

    def writer(self, s3_uri: str, *, overwrite: bool = True, if_version: str | None = None) -> ObjectWriter:
        """Returns a file to write an object, for `torch.save`: see `ObjectWriter`.

        Args:
            s3_uri: The URL of the object.
            overwrite, if_version: As for `ObjectWriter`.

        Raises:
            ConfigError: The URL is not an `s3://` URL of an object, or conditions exclude each other.
        """
        url = str(parse_url(s3_uri, ("s3",)))
        return ObjectWriter(url, config=self._config, overwrite=overwrite, if_version=if_version)
