"""Writes samples to one tar shard in the format of webdataset, with an index beside it. Does not import torch.

`members` encodes samples, `ObjectWriter` sends the bytes, `index_file` writes the index.
"""

from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, Self

from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError
from torchobj.shards import index_file
from torchobj.shards.index_file import TarShard
from torchobj.shards.members import end_of_archive, header, members_of, padding
from torchobj.shards.shard_urls import compression
from torchobj.store.file_objects import ObjectWriter
from torchobj.urls import parse_object_url

__all__ = ["TarWriter", "check_shard_url"]

#: Members up to this size are copied into one write with their header.
_JOINED_BYTES = 64 << 10


def check_shard_url(url: str) -> None:
    """Checks the URL of a shard that is to be written.

    Raises:
        ConfigError: It does not name an uncompressed object.
    """
    parse_object_url(url)
    if compression(url) is not None:
        raise ConfigError(
            f"url={url!r}: must end in .tar: shards are written uncompressed, so that ranges of them can be read"
        )


class TarWriter:
    """Writes samples to one tar shard, and its index to `<url>.index.parquet`.

    `close()`, or the end of a `with` block, creates the shard if nothing failed before, and then its index. After an
    exception in the block there is no shard, and a previous one is unchanged. The members are sent while they are
    written, without a local file. Equal samples give equal bytes. Not thread-safe.

    Args:
        url: `s3://bucket/train.tar`, `gs://…`, `file:///…` or `memory://…`.
        index: Whether to write the index, which needs pyarrow: `pip install torchobj[manifest]`. `TarIndex` builds that
            of a shard without one.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Replace the configuration's.
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
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        source: str | None = None,
    ) -> None:
        self._file: ObjectWriter | None = None
        self._failed: BaseException | None = None
        check_shard_url(url)
        if index:
            index_file.check_installed()
        self._config = store_config(config, region, endpoint_url, url=url)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self.abort()
