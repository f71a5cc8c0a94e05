"""`TarWriter` writes samples to one tar shard, with an index beside it; `ShardWriter` divides them into such shards.

`members` encodes samples, `ObjectWriter` sends the bytes, `index_file` writes the index. Does not import torch.
"""

import re
from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, Self

from torchobj.config import StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError
from torchobj.shards import index_file
from torchobj.shards.index_file import TarShard
from torchobj.shards.members import end_of_archive, header, members_of, padding
from torchobj.shards.shard_urls import compression
from torchobj.store.file_objects import ObjectWriter, ends_silently, log_abort
from torchobj.urls import parse_object_url

__all__ = [
    "ShardWriter",
    "TarWriter",
    "check_shard_limits",
    "check_shard_pattern",
    "check_start_shard",
    "shard_url",
]

#: Members up to this size are copied into one write with their header.
_JOINED_BYTES = 64 << 10

#: The number of a shard in a pattern: `{shard}` or `{shard:06d}`.
_NUMBER = re.compile(r"\{shard(?::(0?\d*)d?)?\}")


def _check_shard_url(url: str) -> None:
    """Checks the URL of a shard that is to be written.

    Raises:
        ConfigError: It does not name an uncompressed object.
    """
    parse_object_url(url)
    if compression(url) is not None:
        raise ConfigError(
            f"url={url!r}: must end in .tar: shards are written uncompressed, so that ranges of them can be read"
        )


class _Writer:
    """A writer whose block ends with `close`, or with `abort` after an exception."""

    def close(self) -> TarShard | None:
        """Creates what was written."""
        raise NotImplementedError

    def abort(self) -> None:
        """Discards what was written."""
        raise NotImplementedError

    def _unfinished(self) -> str | None:
        """Returns the URL of the shard that is being written; None if no shard is open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
            return
        if (url := self._unfinished()) is not None and ends_silently(exc):
            log_abort(url, exc)
        self.abort()


class TarWriter(_Writer):
    """Writes samples to one tar shard, and its index to `<url>.index.parquet`.

    `close()`, or the end of a `with` block, creates the shard if nothing failed before, and then its index. After an
    exception in the block there is no shard, and a previous one is unchanged. The members are sent while they are
    written, without a local file. Equal samples give equal bytes. Not thread-safe.

    Args:
        url: `s3://bucket/train.tar`, `gs://…`, `file:///…` or `memory://…`.
        index: Whether to write the index, which needs pyarrow: `pip install torchobj[manifest]`. `TarIndex` builds that
            of a shard without one.
        config: Settings of the store.
        source: A text that the index keeps, such as a digest of what was packed.

    Raises:
        ConfigError: The URL names no uncompressed object; or pyarrow is not installed.

    Example:
        >>> import io, tarfile, torchobj
        >>> with TarWriter("memory://tar-writer/one.tar", index=False) as writer:
        ...     writer.write({"__key__": "0001", "cls": 3, "txt": "three"})
        6
        >>> tarfile.open(fileobj=io.BytesIO(torchobj.open("memory://tar-writer/one.tar").read())).getnames()
        ['0001.cls', '0001.txt']
    """

    def __init__(
        self,
        url: str,
        *,
        index: bool = True,
        config: StoreConfig | None = None,
        source: str | None = None,
    ) -> None:
        self._file: ObjectWriter | None = None
        self._failed: BaseException | None = None
        _check_shard_url(url)
        if index:
            index_file.check_installed()
        self._config = config
        self._has_index, self._source = index, source
        self._size = 0
        self._keys: dict[str, None] = {}
        self._names: tuple[list[str], list[str]] = ([], [])
        self._ranges = (array("q"), array("q"), array("q"), array("q"))
        self._file = ObjectWriter(url, config=self._config)
        self._url, self._key = self._file.url, self._file.key

    @property
    def url(self) -> str:
        """URL of the shard."""
        return self._url

    @property
    def count(self) -> int:
        """Number of samples that were written."""
        return len(self._keys)

    @property
    def size(self) -> int:
        """Size of the shard so far in bytes, with headers; of a closed one that of the object."""
        return self._size

    @property
    def closed(self) -> bool:
        """Whether the writer was closed or aborted."""
        return self._file is None

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        return f"<torchobj.shards.TarWriter {self._url}, {self.count} samples, {self._size} bytes{state}>"

    def write(self, sample: Mapping[str, Any]) -> int:
        """Writes a sample.

        A sample that cannot be encoded writes nothing, and others may follow.

        Args:
            sample: `__key__`, and for each field such as `jpg` or `seg.png` its value. Bytes-like objects, `Buffer`s
                and rows of uint8 are written as they are, a str in UTF-8. Integers in `cls`, `id`, `index` and `count`
                become decimal text, values in `json` JSON, arrays in `npy`, dicts of them in `npz`, values in `pt` and
                `pth` the output of `torch.save`, images of Pillow in `jpg`, `png`, `ppm` and `tiff` these formats. If
                the field ends in `.gz`, values that are not bytes are compressed as well. Fields that begin with an
                underscore are omitted.

        Returns:
            Number of bytes of the fields.

        Raises:
            ConfigError: The sample has no key or no fields; its key is in the shard already, or has a dot after its
                last slash, where readers would divide it.
            TypeError: A value has no encoding in its field; the message names field and type.
            StoreError: A part of the shard could not be written.
            ValueError: The writer is closed.
        """
        key, members = members_of(sample)
        check("__key__", key, f"another one: it is in {self._url} already", ok=key not in self._keys)
        return self._write_parts(key, ((field, memoryview(data).nbytes, (data,)) for field, data in members))

    def _write_parts(self, key: str, members: Iterable[tuple[str, int, Iterable[Any]]]) -> int:
        """Writes a sample whose names are checked, given field, size and the parts of the bytes of each member."""
        if self._file is None:
            raise ValueError(f"{self._url}: write to a closed shard")
        if self._failed is not None:
            raise self._failed
        begin, count, total = self._size, 0, 0
        try:
            for field, size, parts in members:
                self._write_member(self._file, key, field, size, parts)
                count, total = count + 1, total + size
        except BaseException as error:
            # A part of the sample may be missing: the shard can no longer be created.
            self._failed = error
            raise
        self._keys[key] = None
        if self._has_index:
            self._ranges[2].extend([begin] * count)
            self._ranges[3].extend([self._size] * count)
        return total

    def _write_member(self, file: ObjectWriter, key: str, field: str, size: int, parts: Iterable[Any]) -> None:
        first, last = header(f"{key}.{field}", size), padding(size)
        for part in (b"".join((first, *parts, last)),) if size <= _JOINED_BYTES else chain((first,), parts, (last,)):
            file.write(part)
        if self._has_index:
            self._names[0].append(key)
            self._names[1].append(field.lower())
            self._ranges[0].append(self._size + len(first))
            self._ranges[1].append(size)
        self._size += len(first) + size + len(last)
        if file.tell() != self._size:
            raise ValueError(f"{key}.{field}: has other than {size} bytes")

    def close(self) -> TarShard | None:
        """Creates the shard and its index. A second call does nothing.

        Returns:
            URL, size and version of the shard; None if it was closed before.

        Raises:
            StoreError: A sample, the shard or its index could not be written. Without a shard there is no new index.
        """
        file, self._file = self._file, None
        if file is None:
            return None
        if self._failed is not None:
            file.abort()
            raise self._failed
        try:
            last = end_of_archive(self._size)
            file.write(last)
            file.close()
        except BaseException:
            file.abort()
            raise
        self._size += len(last)
        shard = TarShard(self._url, self._size, file.version or None)
        if self._has_index:
            self._write_index(shard)
        return shard

    def _write_index(self, shard: TarShard) -> None:
        beside = shard._replace(name=self._key.rpartition("/")[2])
        columns: dict[str, Any] = {"shard": [beside.name] * len(self._names[0])}
        columns |= dict(zip(("key", "field"), self._names, strict=True))
        columns |= dict(zip(("offset", "size", "begin", "end"), self._ranges, strict=True))
        with ObjectWriter(f"{self._url}{index_file.SUFFIX}", config=self._config) as file:
            index_file.write(file, [beside], index_file.members_table(columns), source=self._source)

    def abort(self) -> None:
        """Discards what was written. A previous shard of this URL is unchanged."""
        file, self._file = self._file, None
        if file is not None:
            file.abort()

    def _unfinished(self) -> str | None:
        return None if self._file is None else self._file.url


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
    _check_shard_url(first)


def check_start_shard(start_shard: int) -> None:
    """Checks the number of the first shard.

    Raises:
        ConfigError: It is negative, or not a whole number.
    """
    is_number = isinstance(start_shard, int) and not isinstance(start_shard, bool) and start_shard >= 0
    check("start_shard", start_shard, "a number, 0 or more", ok=is_number)


def check_shard_limits(maxcount: int, maxsize: float) -> None:
    """Checks the maximum number of samples and of bytes of a shard.

    Raises:
        ConfigError: One of them is not positive.
    """
    is_count = isinstance(maxcount, int) and not isinstance(maxcount, bool) and maxcount > 0
    check("maxcount", maxcount, "a number of samples, 1 or more", ok=is_count)
    is_size = isinstance(maxsize, (int, float)) and not isinstance(maxsize, bool) and maxsize > 0
    check("maxsize", maxsize, "a number of bytes, more than 0", ok=is_size)


class ShardWriter(_Writer):
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
        config: Settings of the store.

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
        config: StoreConfig | None = None,
    ) -> None:
        check_shard_pattern(pattern)
        check_shard_limits(maxcount, maxsize)
        check_start_shard(start_shard)
        if index:
            index_file.check_installed()
        self.pattern, self.maxcount, self.maxsize = pattern, maxcount, maxsize
        self._has_index = index
        self._config = store_config(config)
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

    def _unfinished(self) -> str | None:
        return None if self._tar is None else self._tar._unfinished()
