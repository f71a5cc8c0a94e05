"""Divides samples into tar shards of limited size. `tar_writer` writes each of them. Does not import torch."""

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.shards import index_file
from torchobj.shards.index_file import TarShard
from torchobj.shards.tar_writer import TarWriter, check_shard_url

__all__ = ["ShardWriter", "check_shard_limits", "check_shard_pattern", "shard_url"]

#: The number of a shard in a pattern: `{shard}` or `{shard:06d}`.
_NUMBER = re.compile(r"\{shard(?::(0?\d*)d?)?\}")


def shard_url(pattern: str, number: int) -> str:
    """The URL of a shard.

    Example:
        >>> shard_url("s3://b/train-%06d.tar", 3), shard_url("s3://b/{shard:04d}.tar", 3)
        ('s3://b/train-000003.tar', 's3://b/0003.tar')
    """
    if _NUMBER.search(pattern):
        return _NUMBER.sub(lambda found: format(number, f"{found[1] or ''}d"), pattern)
    return pattern % number


def check_shard_pattern(pattern: str) -> None:
    """Checks the pattern of the URLs of shards.

    Raises:
        ConfigError: It has no number, or its URLs do not name uncompressed objects.
    """
    check("pattern", pattern, "a URL such as s3://bucket/train-%06d.tar", ok=isinstance(pattern, str))
    try:
        first, second = shard_url(pattern, 0), shard_url(pattern, 1)
    except (TypeError, ValueError):
        first = second = pattern
    advice = "a URL with one number, such as s3://bucket/train-%06d.tar; a percent sign in it is written %%"
    check("pattern", pattern, advice, ok=first != second)
    check_shard_url(first)


def check_shard_limits(maxcount: int, maxsize: float) -> None:
    """Checks the maximum number of samples and of bytes of a shard.

    Raises:
        ConfigError: One of them is not positive.
    """
    is_count = isinstance(maxcount, int) and not isinstance(maxcount, bool) and maxcount > 0
    check("maxcount", maxcount, "a number of samples, 1 or more", ok=is_count)
    is_size = isinstance(maxsize, (int, float)) and not isinstance(maxsize, bool) and maxsize > 0
    check("maxsize", maxsize, "a number of bytes, more than 0", ok=is_size)


class ShardWriter:
    """Writes samples to tar shards in the format of webdataset, and the index of each shard beside it.

    A shard is created when it is full or the writer is closed, and appears whole; its index `<url>.index.parquet`
    follows. The members are sent while they are written, without a local file. An exception in a `with` block discards
    the open shard; the full ones stay. Equal samples give equal shards. Not thread-safe.

    The fields `jpg` and `png` take an image that is encoded already, such as the bytes of a file, or an image of
    Pillow, which is encoded. Arrays and tensors of pixels are not encoded: convert them with `PIL.Image.fromarray`.

    Args:
        pattern: URL of the shards with a place for their number: `s3://bucket/train-%06d.tar`, or
            `s3://bucket/train-{shard:06d}.tar`; also of `gs://`, `file:///` and `memory://`.
        maxcount: Maximum number of samples of a shard.
        maxsize: A shard ends with the sample whose fields reach this number of bytes together with those before.
        start_shard: Number of the first shard.
        index: Whether to write indexes, which needs pyarrow: `pip install torchobj[manifest]`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Replace the configuration's.

    Raises:
        ConfigError: The pattern has no number, a limit is not positive, or pyarrow is not installed.

    Example:
        >>> with ShardWriter("memory://shard-writer/train-%06d.tar", maxcount=2, index=False) as writer:
        ...     for number in range(5):
        ...         writer.write({"__key__": f"{number:04d}", "cls": number, "json": {"square": number**2}})
        >>> [shard.name for shard in writer.shards]
        ['memory://shard-writer/train-000000.tar', 'memory://shard-writer/train-000001.tar', \
'memory://shard-writer/train-000002.tar']
    """

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        *,
        start_shard: int = 0,
        index: bool = True,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        check_shard_pattern(pattern)
        check_shard_limits(maxcount, maxsize)
        is_number = isinstance(start_shard, int) and not isinstance(start_shard, bool) and start_shard >= 0
        check("start_shard", start_shard, "a number, 0 or more", ok=is_number)
        if index:
            index_file.check_installed()
        self.pattern, self.maxcount, self.maxsize = pattern, maxcount, maxsize
        self._has_index = index
        self._config = store_config(config, region, endpoint_url, url=pattern)
        self._tar: TarWriter | None = None
        self._is_closed = False
        self._shards: list[TarShard] = []
        self.shard = start_shard
        """Number of the next shard."""
        self.total = 0
        """Number of samples that were written to all shards."""
        self.count = 0
        """Number of samples in the open shard."""
        self.size = 0
        """Bytes of the fields in the open shard."""

    @property
    def shards(self) -> list[TarShard]:
        """URL, size and version of each shard that was created."""
        return list(self._shards)

    def __repr__(self) -> str:
        return f"<torchobj.ShardWriter {self.pattern}, {len(self._shards)} shards, {self.total} samples>"

    def write(self, sample: Mapping[str, Any]) -> None:
        """Writes a sample, to the next shard if this one is full.

        Args:
            sample: As for `TarWriter.write`.

        Raises:
            ConfigError, TypeError: As for `TarWriter.write`. The sample is not written.
            StoreError: This or the full shard could not be written.
            ValueError: The writer is closed.
        """
        if self._is_closed:
            raise ValueError(f"{self.pattern}: write to a closed writer")
        if self._tar is not None and (self.count >= self.maxcount or self.size >= self.maxsize):
            self.next_stream()
        if self._tar is None:
            self._tar = TarWriter(shard_url(self.pattern, self.shard), index=self._has_index, config=self._config)
            self.shard += 1
        self.size += self._tar.write(sample)
        self.count += 1
        self.total += 1

    def next_stream(self) -> None:
        """Creates the open shard, if there is one. The next sample begins another."""
        tar, self._tar = self._tar, None
        self.count = self.size = 0
        if tar is None:
            return
        if tar.count == 0:
            # Its first sample could not be encoded.
            tar.abort()
            self.shard -= 1
            return
        shard = tar.close()
        if shard is not None:
            self._shards.append(shard)

    def close(self) -> None:
        """Creates the last shard. A second call does nothing. No shard is created without samples.

        Raises:
            StoreError: The shard or its index could not be written.
        """
        self._is_closed = True
        self.next_stream()

    def abort(self) -> None:
        """Discards the open shard and closes the writer. Shards that were created stay."""
        tar, self._tar, self._is_closed = self._tar, None, True
        if tar is not None:
            tar.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self.abort()
