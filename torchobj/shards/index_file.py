"""Reads and writes the Parquet table of an index of tar shards. Storage of the file is left to its callers.

A row is a member: the shard, the key of its sample, its field, the range of its bytes, and that of its sample. The
metadata of the schema has the size and version of each shard. pyarrow is imported when it is needed. A file is
untrusted: its footer, the headers of its pages and all ranges are checked.
"""

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchobj.exceptions import ConfigError, TarIndexError
from torchobj.manifest.pages import DICTIONARY, WHOLE_TEXTS, largest_column, row_limit
from torchobj.urls import CLOUD_SCHEMES, parse_object_url, parse_url

__all__ = [
    "ADVICE",
    "COLUMNS",
    "FORMAT",
    "SUFFIX",
    "IndexTable",
    "TarShard",
    "check_installed",
    "check_same",
    "members_table",
    "name_in",
    "read",
    "shard_url",
    "write",
]

#: Version of the format of files.
FORMAT = 1

#: The index of a shard has the URL of the shard with this suffix.
SUFFIX = ".index.parquet"

_FORMAT_KEY, _SHARDS_KEY, _SOURCE_KEY = (
    "torchobj.tar_index.format",
    "torchobj.tar_index.shards",
    "torchobj.tar_index.source",
)

#: Size of a block of a tar file: samples begin and end with one.
_BLOCK_BYTES = 512

#: Members per row group. With names of 4096 bytes a row group has 268 MB.
_GROUP_ROWS = 1 << 16

#: Maximum size of a column of a row group and of the footer of a file that is read, so that a damaged one allocates
#: no more. The footer contains the names of the shards.
_MAX_COLUMN_BYTES, _MAX_FOOTER_BYTES = 80 << 20, 64 << 20

#: Names in the dict of a sample that are not fields.
_RESERVED = ("__key__", "__url__")

_TEXTS = ("shard", "key", "field")
_NUMBERS = ("offset", "size", "begin", "end")

#: The columns of a file.
COLUMNS = (*_TEXTS, *_NUMBERS)

_ENCODINGS = (DICTIONARY, WHOLE_TEXTS, DICTIONARY, None, None, None, None)

#: Ends the messages about files that cannot be used.
ADVICE = "build the index again with `torchobj index`"


class TarShard(NamedTuple):
    """A tar shard of an index."""

    name: str
    """File name relative to the index if it is beside it, otherwise the URL."""
    size: int
    """Size in bytes."""
    version: str | None
    """The version of the object; None if it is unknown."""


@dataclasses.dataclass(frozen=True)
class IndexTable:
    """The content of an index file."""

    shards: tuple[TarShard, ...]
    """The shards, also those without members."""
    members: Any
    """A `pyarrow.Table` with the columns shard and field (dictionaries of strings), key (string), and offset, size,
    begin and end (int64)."""
    source: str | None = None
    """Digest of the objects that were packed into the shard, if `torchobj pack` wrote it."""

    def __repr__(self) -> str:
        return f"<IndexTable of {len(self.shards)} shards, {self.members.num_rows} members>"


def _imported() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"indexes of tar shards need pyarrow ({error}): install the extra with pip install 'torchobj[manifest]'"
        ) from error


def check_installed() -> None:
    """Raises ConfigError, which names the extra, if pyarrow is not installed."""
    _imported()


def _schema(arrow: Any) -> Any:
    names = arrow.dictionary(arrow.int32(), arrow.string())
    kinds = {"shard": names, "key": arrow.string(), "field": names} | dict.fromkeys(_NUMBERS, arrow.int64())
    return arrow.schema([arrow.field(name, kind, nullable=False) for name, kind in kinds.items()])


def members_table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """The table of members, from a sequence for each of the columns shard, key, field, offset, size, begin and end."""
    arrow, _ = _imported()
    return arrow.table({name: columns[name] for name in (*_TEXTS, *_NUMBERS)}, schema=_schema(arrow))


def write(file: Any, shards: Sequence[TarShard], members: Any, *, source: str | None = None) -> None:
    """Writes an index to an open file.

    Args:
        file: A writable binary file.
        shards: The shards, also those without members.
        members: The members, from `members_table`, in the order of the shards and of the members in them.
        source: Digest of the objects that were packed into the shard.
    """
    arrow, parquet = _imported()
    metadata = {_FORMAT_KEY: str(FORMAT), _SHARDS_KEY: json.dumps([list(shard) for shard in shards])}
    metadata |= {} if source is None else {_SOURCE_KEY: source}
    with parquet.ParquetWriter(
        file,
        _schema(arrow),
        compression="zstd",
        # Not DELTA_BYTE_ARRAY, the encoding of prefixes: a small page of it decodes to any size.
        column_encoding={"key": "DELTA_LENGTH_BYTE_ARRAY"} | dict.fromkeys(_NUMBERS, "DELTA_BINARY_PACKED"),
        use_dictionary=["shard", "field"],
        # A page without a dictionary follows one that is too large.
        dictionary_pagesize_limit=_MAX_COLUMN_BYTES,
        write_page_checksum=True,
        # Readers see plain strings instead of dictionaries.
        store_schema=False,
    ) as writer:
        if members.num_rows:
            writer.write_table(members.unify_dictionaries(), row_group_size=_GROUP_ROWS)
        writer.add_key_value_metadata(metadata)


def read(data: Any, name: str) -> IndexTable:
    """The index in the bytes of a file; `name` is that of the file in messages.

    Raises:
        TarIndexError: It is not an index of this format, or is damaged.
    """
    arrow, parquet = _imported()
    _check_footer_length(memoryview(data), name)
    try:
        buffer = arrow.py_buffer(data)
        shards, source = _checked_footer(parquet.ParquetFile(arrow.BufferReader(buffer)), len(buffer), name)
        _check_pages(memoryview(data), name)
        members = parquet.ParquetFile(
            arrow.BufferReader(buffer), read_dictionary=["shard", "field"], page_checksum_verification=True
        ).read()
        _check_members(arrow, members, shards, name)
        members = members.replace_schema_metadata().cast(_schema(arrow))
    except TarIndexError:
        raise
    # What pyarrow and json raise for a damaged file, which is of many types.
    except (
        arrow.ArrowException,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise TarIndexError(f"{name}: not an index of tar shards, or damaged: {reason}; {ADVICE}") from error
    return IndexTable(shards, members, source)


def _check_footer_length(data: memoryview, name: str) -> None:
    """Checks the end of a Parquet file: the length of the footer in 4 bytes, and `PAR1`."""
    end = bytes(data[-8:])
    if len(end) < 8 or end[4:] != b"PAR1":
        raise TarIndexError(f"{name}: not a Parquet file, or truncated: it ends with {end!r}; {ADVICE}")
    length = int.from_bytes(end[:4], "little")
    if length > min(_MAX_FOOTER_BYTES, data.nbytes - 12):
        raise TarIndexError(f"{name}: damaged: a footer of {length} bytes in {data.nbytes}; {ADVICE}")


def _checked_footer(file: Any, size: int, name: str) -> tuple[tuple[TarShard, ...], str | None]:
    """Checks the footer. Returns the shards and the digest in it."""
    metadata = {key.decode(): value.decode() for key, value in (file.metadata.metadata or {}).items()}
    if metadata.get(_FORMAT_KEY) != str(FORMAT):
        found = f"of format {metadata[_FORMAT_KEY]!r}" if _FORMAT_KEY in metadata else "of another kind"
        raise TarIndexError(
            f"{name}: a Parquet file {found}; this version of torchobj reads indexes of format {FORMAT}; {ADVICE}"
        )
    columns = [field.name for field in file.schema_arrow]
    if columns != [*_TEXTS, *_NUMBERS] or file.metadata.num_columns != len(columns):
        raise TarIndexError(f"{name}: its columns are {columns}; must be {[*_TEXTS, *_NUMBERS]}; {ADVICE}")
    groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    if not all(0 <= rows <= _GROUP_ROWS for rows in groups) or sum(groups) != file.metadata.num_rows:
        raise TarIndexError(f"{name}: damaged: row groups of other sizes than its metadata has; {ADVICE}")
    if sum(groups) > row_limit(size):
        raise TarIndexError(f"{name}: damaged: {sum(groups)} members in {size} bytes; {ADVICE}")
    shards = tuple(TarShard(*shard) for shard in json.loads(metadata[_SHARDS_KEY]))
    for shard in shards:
        is_version = shard.version is None or isinstance(shard.version, str)
        if not (isinstance(shard.name, str) and isinstance(shard.size, int) and shard.size >= 0 and is_version):
            raise TarIndexError(f"{name}: damaged: its metadata has the shard {tuple(shard)!r}; {ADVICE}")
    if len({shard.name for shard in shards}) < len(shards):
        raise TarIndexError(f"{name}: damaged: its metadata has a shard twice; {ADVICE}")
    return shards, metadata.get(_SOURCE_KEY)


def _check_pages(data: memoryview, name: str) -> None:
    largest = largest_column(data, _ENCODINGS)
    if largest > _MAX_COLUMN_BYTES:
        raise TarIndexError(
            f"{name}: damaged: a column of a row group has {largest} bytes, at most {_MAX_COLUMN_BYTES}; {ADVICE}"
        )


def _check_members(arrow: Any, members: Any, shards: Sequence[TarShard], name: str) -> None:
    """Checks that members are of the shards, their ranges within their samples, and these blocks of the shards."""
    compute = importlib.import_module("pyarrow.compute")
    if any(column.null_count for column in members.columns):
        raise TarIndexError(f"{name}: damaged: a column has nulls; {ADVICE}")
    sizes = arrow.array([shard.size for shard in shards], arrow.int64())
    of_shard = compute.index_in(
        members["shard"].cast(arrow.string()), arrow.array([shard.name for shard in shards], arrow.string())
    )
    if of_shard.null_count:
        raise TarIndexError(f"{name}: damaged: a member is in a shard that its metadata lacks; {ADVICE}")
    offset, size, begin, end = (members[column] for column in _NUMBERS)
    ordered = (
        (arrow.scalar(0, arrow.int64()), begin),
        (begin, offset),
        (arrow.scalar(0, arrow.int64()), size),
        (compute.add_checked(offset, size), end),
        (end, compute.take(sizes, of_shard)),
    )
    if not all(compute.all(compute.less_equal(low, high)).as_py() is not False for low, high in ordered):
        raise TarIndexError(f"{name}: damaged: a member is outside of its sample or shard; {ADVICE}")
    blocks = compute.bit_wise_and(compute.bit_wise_or(begin, end), arrow.scalar(_BLOCK_BYTES - 1, arrow.int64()))
    if compute.any(compute.not_equal(blocks, 0)).as_py():
        raise TarIndexError(
            f"{name}: damaged: a sample begins or ends within a block of {_BLOCK_BYTES} bytes; {ADVICE}"
        )
    fields = compute.unique(members["field"].cast(arrow.string())).to_pylist()
    reserved = [field for field in fields if field in _RESERVED]
    if reserved:
        raise TarIndexError(f"{name}: damaged: a member has the reserved field {reserved[0]!r}; {ADVICE}")


def _folder(url: str) -> str:
    return url.rpartition("/")[0]


def name_in(index_url: str, shard_url: str) -> str:
    """The name of a shard in an index file: relative if it is beside the file."""
    return shard_url.rpartition("/")[2] if _folder(shard_url) == _folder(index_url) else shard_url


def shard_url(name: str, index_url: str) -> str:
    """The URL of a shard in an index file. Raises TarIndexError if the file must not name it."""
    if "://" not in name:
        if "/" in name or name in ("", ".", ".."):
            raise TarIndexError(f"{index_url}: names the shard {name!r}, which is not beside it; {ADVICE}")
        return f"{_folder(index_url)}/{name}"
    try:
        shard = parse_object_url(name)
    except ConfigError as error:
        raise TarIndexError(f"{index_url}: damaged: it names a shard by {error}; {ADVICE}") from error
    if shard.scheme not in CLOUD_SCHEMES and parse_url(index_url).scheme in CLOUD_SCHEMES:
        raise TarIndexError(
            f"{index_url}: an index in a bucket must not name shards of this machine, but has {name!r}; if you trust "
            "it, download the file and load it from its local path"
        )
    return str(shard)


def check_same(indexed: TarShard, shard: TarShard, name: str) -> None:
    """Raises TarIndexError if an index is for another size or version of a shard."""
    known = indexed.version is not None and shard.version is not None
    if indexed.size != shard.size or (known and indexed.version != shard.version):
        raise TarIndexError(
            f"{name}: is for {shard.name} of {indexed.size} bytes and version {indexed.version}, but the shard has "
            f"{shard.size} bytes and version {shard.version}; {ADVICE}"
        )
