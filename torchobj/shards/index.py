"""`TarIndex`: the ranges of all samples of tar shards, from their headers or from index files. Does not import torch.

The native `TarIndexer` parses headers and skips the bodies of large members. Shards are read in rounds: one range of
each open shard, in one call. `index_file` defines the format of files. Columns stay in Arrow's memory, which datasets
share with their workers.
"""

import importlib
import io
import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torchobj import _torchobj
from torchobj._torchobj import ObjectRef
from torchobj.config import StoreConfig
from torchobj.exceptions import AccessDeniedError, ConfigError, ObjectNotFoundError, TarIndexError
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import url_of_file
from torchobj.shards import index_file
from torchobj.shards.index_file import ADVICE, SUFFIX, TarShard
from torchobj.shards.shard_urls import compression, shard_manifest
from torchobj.store.concurrency import CallPool
from torchobj.store.file_objects import ObjectWriter
from torchobj.store.reads import get_many
from torchobj.store.transfers import ProgressOption, counters_to
from torchobj.urls import canonical_url

__all__ = ["TarIndex", "TarMember", "TarSample"]

logger = logging.getLogger("torchobj")

#: Maximum number of shards whose headers are read at the same time; each has one range in memory.
_OPEN_SHARDS = 64

#: Members that are kept as Python objects, before they become columns.
_PENDING_MEMBERS = 50_000

#: Number of index files that are read at the same time, and are in memory together.
_CONCURRENT_FILES = 64

#: Number of index files that are written at the same time, each from a thread.
_CONCURRENT_WRITES = 16


class TarMember(NamedTuple):
    """A member of a tar shard."""

    field: str
    """Its extension, lower-case, without the first dot."""
    offset: int
    """Offset of its bytes in the shard."""
    size: int
    """Number of its bytes."""


class TarSample(NamedTuple):
    """A sample of a tar shard: adjacent members with the same name up to the first dot."""

    url: str
    """URL of the shard."""
    key: str
    """The common name."""
    begin: int
    """Offset of its first header in the shard."""
    end: int
    """End of its last member, with padding."""
    members: tuple[TarMember, ...]
    """Its members, in their order."""


class TarIndex:
    """The samples of tar shards: their keys, and the ranges of their members.

    `build` reads the headers of shards and skips the bodies of large members. `load` reads a file that `save`,
    `torchobj index` or `ShardWriter` wrote. A sample takes about 60 bytes and the length of its key, a member 20
    bytes. Needs pyarrow: `pip install torchobj[manifest]`.

    Args:
        shards: The shards, named by their URLs.
        samples, members: Their tables, of another index.

    Example:
        >>> import io, tarfile, torchobj
        >>> from torchobj.shards.index import TarIndex
        >>> file = io.BytesIO()
        >>> with tarfile.open(fileobj=file, mode="w") as tar:
        ...     for name in ("a.txt", "a.cls", "b.txt"):
        ...         info = tarfile.TarInfo(name)
        ...         info.size = 2
        ...         tar.addfile(info, io.BytesIO(b"hi"))
        >>> _ = torchobj.Store("memory://indexed").put("train-0.tar", file.getvalue())
        >>> index = TarIndex.build("memory://indexed/train-{0..0}.tar")
        >>> index, index.sample(1).key, index.sample(0).members[1]
        (<TarIndex of 1 shards, 2 samples, 3 members>, 'b', TarMember(field='cls', offset=1536, size=2))
        >>> index.save("memory://indexed/train.parquet")
        >>> TarIndex.load("memory://indexed/train.parquet").counts()
        [2]
    """

    def __init__(self, shards: Sequence[TarShard], samples: Any, members: Any) -> None:
        self.shards, self.samples, self.members = tuple(shards), samples, members
        columns = (samples["shard"], samples["begin"], samples["end"], samples["first"])
        self._shard, self._begin, self._end, self._first = map(index_file.numbers, columns)
        self._offset, self._size = index_file.numbers(members["offset"]), index_file.numbers(members["size"])
        self._keys = index_file.one_chunk(samples["key"])
        fields = index_file.one_chunk(members["field"])
        self._field, self.fields = index_file.numbers(fields.indices), fields.dictionary.to_pylist()

    def __repr__(self) -> str:
        return f"<TarIndex of {len(self.shards)} shards, {len(self)} samples, {len(self._offset)} members>"

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._begin)

    def __reduce__(self) -> Any:
        return type(self), (self.shards, self.samples, self.members)

    def counts(self) -> list[int]:
        """Number of samples of each shard."""
        numpy = importlib.import_module("numpy")
        counts: list[int] = numpy.bincount(self._shard, minlength=len(self.shards)).tolist()
        return counts

    def sample(self, index: int) -> TarSample:
        """A sample.

        Args:
            index: Its number, from 0, in the order of the shards and of the samples in them.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self._first[index]
        last = self._first[index + 1] if index + 1 < len(self) else len(self._offset)
        members = tuple(
            TarMember(self.fields[self._field[row]], self._offset[row], self._size[row]) for row in range(first, last)
        )
        url = self.shards[self._shard[index]].name
        return TarSample(url, self._keys[index].as_py(), self._begin[index], self._end[index], members)

    def data_range(self, index: int) -> tuple[TarShard, int, int]:
        """The range of a sample from the first byte of its first member to the end of its last, and its shard.

        Args:
            index: Number of the sample, from 0 to the number of samples.
        """
        first = self._first[index]
        last = (self._first[index + 1] if index + 1 < len(self) else len(self._offset)) - 1
        return self.shards[self._shard[index]], self._offset[first], self._offset[last] + self._size[last]

    @classmethod
    def build(
        cls,
        urls: str | Sequence[str],
        *,
        config: StoreConfig | None = None,
        progress: ProgressOption = None,
    ) -> Self:
        """Reads the headers of shards. Many shards are read concurrently.

        Args:
            urls: The shards: URLs, or patterns with braces or wildcards, or prefixes that end with a slash.
            config: Settings of the store.
            progress: Receives a `torchobj.files.Progress`, whose bytes are those of the shards.

        Raises:
            ConfigError: A shard is compressed, a pattern selects nothing, or pyarrow is not installed.
            TarError: A shard is not a tar file, or is damaged.
            StoreError: A read failed, or a shard was replaced meanwhile.
        """
        index_file.check_installed()
        shards = _shards_of(shard_manifest(urls, config))
        return cls._of_parts(shards, _members_of(shards, config, progress))

    @classmethod
    def load(cls, path_or_url: str | os.PathLike[str], *, config: StoreConfig | None = None) -> Self:
        """Reads an index file. Reads no shard.

        A file in a bucket may name shards of any bucket, but no files or memory of this machine.

        Args:
            path_or_url: A local path, or the URL of an object.
            config: Settings of the store.

        Raises:
            ConfigError: pyarrow is not installed, or the URL does not name an object.
            ObjectNotFoundError: The file does not exist.
            TarIndexError: The file is not an index of this format, is damaged, or names shards that it must not.
            StoreError: The file cannot be read.
        """
        index_file.check_installed()
        url = canonical_url(url_of_file(path_or_url))
        [data] = get_many([url], config=config)
        return cls._of_file(data, url)

    @classmethod
    def load_or_build(
        cls,
        manifest: Manifest,
        index: "TarIndex | str | os.PathLike[str] | None" = None,
        config: StoreConfig | None = None,
        *,
        progress: ProgressOption = None,
    ) -> "TarIndex":
        """The index of the shards of a manifest, in their order.

        Args:
            manifest: The shards, with their sizes and versions, from `shard_manifest`.
            index: An index, or the path or URL of an index file, which must contain these shards. None: the files
                beside the shards, `<URL of the shard>.index.parquet`; the index of shards that have none, or one for
                another size or version, is built and not saved.
            config: Settings of the store.
            progress: As for `build`.

        Raises:
            TarIndexError: `index` lacks a shard, or is for another size or version of it.
            ConfigError, TarError, StoreError: As `load` and `build` raise.
        """
        index_file.check_installed()
        shards = _shards_of(manifest)
        if index is None:
            return cls._per_shard(shards, config, progress)
        loaded = index if isinstance(index, TarIndex) else cls.load(index, config=config)
        return loaded._selected(shards, "index" if isinstance(index, TarIndex) else url_of_file(index))

    @classmethod
    def update_per_shard(
        cls,
        manifest: Manifest,
        *,
        config: StoreConfig | None = None,
        progress: ProgressOption = None,
    ) -> list[str]:
        """Writes the index of each shard that has none beside it, or one for another size or version.

        Args:
            manifest: The shards, with their sizes and versions, from `shard_manifest`.
            config: Settings of the store.
            progress: As for `build`.

        Returns:
            The URLs of the files that were written.

        Raises:
            ConfigError, TarError, StoreError: As `build` raises.
            StoreError: A file cannot be written; others may have been.
        """
        shards = list({shard.name: shard for shard in _shards_of(manifest)}.values())
        found = cls._found_per_shard(shards, config)
        stale = [shard for shard in shards if shard.name not in found]
        return cls._of_parts(stale, _members_of(stale, config, progress)).save_per_shard(config=config)

    @classmethod
    def _per_shard(cls, shards: list[TarShard], config: StoreConfig | None, progress: ProgressOption) -> Self:
        found = cls._found_per_shard(shards, config)
        missing = list({shard.name: shard for shard in shards if shard.name not in found}.values())
        if missing:
            logger.info(
                "%d of %d tar shards have no index beside them; reading their headers; `torchobj index` saves it",
                len(missing),
                len(shards),
            )
            found |= dict(zip((shard.name for shard in missing), _members_of(missing, config, progress), strict=True))
        return cls._of_parts(shards, [found[shard.name] for shard in shards])

    @classmethod
    def _found_per_shard(cls, shards: list[TarShard], config: StoreConfig | None) -> dict[str, list[Any]]:
        """The members of the shards that have a current index beside them, by the URL of the shard."""
        found: dict[str, list[Any]] = {}
        unusable: list[TarIndexError] = []
        wanted = {shard.name: shard for shard in shards}
        names = list(wanted)
        for start in range(0, len(names), _CONCURRENT_FILES):
            some = names[start : start + _CONCURRENT_FILES]
            files = get_many([f"{name}{SUFFIX}" for name in some], config=config, return_errors=True)
            for name, data in zip(some, files, strict=True):
                # Without the permission to list, a store refuses access to an object that does not exist.
                if isinstance(data, ObjectNotFoundError | AccessDeniedError):
                    continue
                if isinstance(data, Exception):
                    raise data
                try:
                    index = cls._of_file(data, f"{name}{SUFFIX}")
                    found[name] = [index._selected([wanted[name]], f"{name}{SUFFIX}")._expanded("")[0]]
                except TarIndexError as error:
                    unusable.append(error)
        if unusable:
            logger.warning(
                "%s; %s are read instead; `torchobj index` writes new indexes",
                unusable[0],
                "its headers" if len(unusable) == 1 else f"the headers of {len(unusable)} such shards",
            )
        return found

    @classmethod
    def _of_file(cls, data: Any, url: str) -> Self:
        table = index_file.read(data, url)
        shards = [shard._replace(name=index_file.shard_url(shard.name, url)) for shard in table.shards]
        return cls._of_parts(shards, index_file.parts_of(table, url), url)

    @classmethod
    def _of_parts(cls, shards: Sequence[TarShard], parts: Sequence[Sequence[Any]], name: str = "index") -> Self:
        """The index of shards, given the tables of the members of each."""
        return cls(shards, *index_file.columns_of(parts, name))

    def _selected(self, wanted: Sequence[TarShard], name: str) -> "TarIndex":
        """The index of these shards only, in their order. Raises TarIndexError if one is absent or differs."""
        numbers_of = {shard.name: number for number, shard in enumerate(self.shards)}
        for shard in wanted:
            if shard.name not in numbers_of:
                raise TarIndexError(f"{name}: does not contain the shard {shard.name}; {ADVICE}, or pass index=None")
            index_file.check_same(self.shards[numbers_of[shard.name]], shard, name)
        if [shard.name for shard in wanted] == [shard.name for shard in self.shards]:
            return TarIndex(wanted, self.samples, self.members)
        table, rows = self._expanded("")
        chosen = [rows[numbers_of[shard.name]] for shard in wanted]
        return TarIndex(
            wanted, *index_file.columns_of([[table.slice(first, last - first)] for first, last in chosen], name)
        )

    def _expanded(self, index_url: str) -> tuple[Any, list[tuple[int, int]]]:
        """The table of a file at `index_url`, and the rows of each shard."""
        return index_file.expanded(
            [index_file.name_in(index_url, shard.name) for shard in self.shards], self.samples, self.members
        )

    def save(self, path_or_url: str | os.PathLike[str], *, config: StoreConfig | None = None) -> None:
        """Writes the index as a Parquet file, which replaces an existing one when it is complete.

        A row is a member, with the columns `shard`, `key`, `field`, `offset`, `size`, and `begin` and `end` of the
        sample. Shards are named relative to the file if they are beside it, and can then be moved with it.

        Args:
            path_or_url: A local path, or the URL of an object.
            config: Settings of the store.

        Raises:
            ConfigError: The URL does not name an object.
            StoreError: The file cannot be written.
        """
        url = canonical_url(url_of_file(path_or_url))
        with ObjectWriter(url, config=config) as file:
            self._write(file, url)

    def _write(self, file: Any, url: str) -> None:
        # A file has each shard once.
        shards = list({shard.name: shard for shard in self.shards}.values())
        index = self if len(shards) == len(self.shards) else self._selected(shards, "index")
        table, _ = index._expanded(url)
        index_file.write(file, [shard._replace(name=index_file.name_in(url, shard.name)) for shard in shards], table)

    def save_per_shard(self, *, config: StoreConfig | None = None) -> list[str]:
        """Writes the index of each shard beside it, as `<URL of the shard>.index.parquet`.

        Args:
            config: Settings of the store.

        Returns:
            The URLs of the files.

        Raises:
            StoreError: A file cannot be written; others may have been.
        """
        table, rows = self._expanded("")
        arrow = importlib.import_module("pyarrow")

        def write(number: int) -> str:
            shard, (first, last) = self.shards[number], rows[number]
            url = f"{shard.name}{SUFFIX}"
            name = index_file.name_in(url, shard.name)
            members = table.slice(first, last - first)
            named = arrow.DictionaryArray.from_arrays(arrow.array([0] * members.num_rows, arrow.int32()), [name])
            columns = {column: members[column] for column in members.column_names} | {"shard": named}
            with ObjectWriter(url, config=config) as file:
                index_file.write(file, [shard._replace(name=name)], index_file.members_table(columns))
            return url

        with CallPool(_CONCURRENT_WRITES, "torchobj-index") as pool:
            return list(pool.map(write, range(len(self.shards))))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The index whose bytes `bytes(index)` returned.

        Args:
            data: The bytes.

        Raises:
            TarIndexError: They are not an index, or are damaged.
        """
        return cls._of_file(data, "memory://bytes/index")

    def __bytes__(self) -> bytes:
        """The content of a file, with the URLs of the shards."""
        file = io.BytesIO()
        self._write(file, "")
        return file.getvalue()


def _shards_of(manifest: Manifest) -> list[TarShard]:
    """The shards of a manifest, named by their URLs.

    Raises:
        ConfigError: The size of one is unknown, or it is compressed, according to its name.
    """
    shards = []
    for index in range(len(manifest)):
        _, _, size, version = manifest.entry(index)
        url = manifest.url(index)
        if size is None:
            raise ConfigError(f"{url}: a manifest of shards needs their sizes: make it with shard_manifest")
        if compression(url) is not None:
            raise ConfigError(
                f"{url}: a compressed shard has no random access, because its members cannot be read by their ranges; "
                "store it as a plain .tar, whose members may be compressed, or read it in order with TarIterableDataset"
            )
        shards.append(TarShard(url, size, version))
    return shards


class _OpenShard:
    """A shard that is being read."""

    def __init__(self, number: int, shard: TarShard) -> None:
        self.number, self.shard = number, shard
        self._indexer = _torchobj.TarIndexer(shard.name, shard.size)
        self._rows: list[tuple[Any, ...]] = []
        self.tables: list[Any] = []
        self.range = self._indexer.next()

    def ref(self, begin: int, end: int) -> ObjectRef:
        return ObjectRef(self.shard.name, begin, end, self.shard.size, self.shard.version)

    def feed(self, data: Any) -> None:
        """Parses the range. The members are in the tables after the last one."""
        self._indexer.feed(data)
        self.range = self._indexer.next()
        for key, begin, end, members in self._indexer.samples():
            self._rows += [(self.shard.name, key, field, offset, size, begin, end) for field, offset, size in members]
        if self._rows and (self.range is None or len(self._rows) >= _PENDING_MEMBERS):
            self.tables.append(
                index_file.members_table(dict(zip(index_file.COLUMNS, zip(*self._rows, strict=True), strict=True)))
            )
            self._rows = []


def _members_of(
    shards: Sequence[TarShard], config: StoreConfig | None, progress: ProgressOption = None
) -> list[list[Any]]:
    """The members of shards as tables of `index_file`, several per shard. The name of a shard is its URL.

    Raises:
        TarError: A shard is not a tar file, or is damaged.
        ObjectChangedError: A shard has another version.
        StoreError: A read failed.
    """
    report = counters_to(progress)
    found: list[list[Any]] = [[] for _ in shards]
    waiting, opened = deque(enumerate(shards)), list[_OpenShard]()
    total, done, done_bytes = sum(shard.size for shard in shards), 0, 0
    while waiting or opened:
        while waiting and len(opened) < _OPEN_SHARDS:
            opened.append(_OpenShard(*waiting.popleft()))
        ranges = [(each, each.range) for each in opened]
        refs = [each.ref(*part) for each, part in ranges if part is not None]
        datas = iter(get_many(refs, config=config))
        remaining = []
        for each, part in ranges:
            if part is not None:
                each.feed(next(datas))
                remaining.append(each)
                continue
            found[each.number] = each.tables
            done, done_bytes = done + 1, done_bytes + each.shard.size
        opened = remaining
        if report is not None:
            reached = sum(each.range[0] if each.range else each.shard.size for each in opened)
            report(done, len(shards), done_bytes + reached, total, 0)
    return found
