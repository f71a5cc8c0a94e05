"""The Parquet table of an index of tar shards: reads and writes it, and converts it to columns of samples and back.

A row is a member: the shard, the key of its sample, its field, the range of its bytes, and that of its sample. The
metadata of the schema has the size and version of each shard. pyarrow is imported when it is needed; callers store the
file. It is untrusted: its footer, the headers of its pages and all ranges are checked, the members of a sample must
follow each other, and samples their predecessors.
"""

import dataclasses
import importlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchobj.exceptions import ConfigError, TarIndexError
from torchobj.parquet.pages import DICTIONARY, WHOLE_TEXTS, largest_column, row_limit
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
    "columns_of",
    "expanded",
    "members_table",
    "name_in",
    "numbers",
    "one_chunk",
    "parts_of",
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


def one_chunk(column: Any) -> Any:
    """A column as one array."""
    arrow = importlib.import_module("pyarrow")
    if isinstance(column, arrow.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    # A table without rows has no chunk to take the dictionary from.
    return arrow.concat_arrays(column.chunks) if column.num_chunks else arrow.array([], column.type)


def numbers(column: Any) -> Any:
    """The integers of a column, which share its memory; elements are of type int."""
    return memoryview(one_chunk(column).to_numpy())


def parts_of(table: IndexTable, name: str) -> list[list[Any]]:
    """The members of each shard of an index file, whose name is `name`.

    Raises:
        TarIndexError: The members are not in the order of the shards.
    """
    arrow, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    numpy = importlib.import_module("numpy")
    names = arrow.array([shard.name for shard in table.shards], arrow.string())
    shard = one_chunk(compute.index_in(table.members["shard"].cast(arrow.string()), names)).to_numpy()
    if numpy.any(shard[1:] < shard[:-1]):
        raise TarIndexError(f"{name}: damaged: its members are not in the order of the shards; {ADVICE}")
    ends = numpy.searchsorted(shard, numpy.arange(len(table.shards) + 1)).tolist()
    return [[table.members.slice(first, last - first)] for first, last in itertools.pairwise(ends)]


def columns_of(parts: Sequence[Sequence[Any]], name: str) -> tuple[Any, Any]:
    """The tables of samples and members, given the tables of the members of each shard.

    Returns:
        Samples, with the columns shard (its number), key, begin, end and first (the row of the first member), and
        members, with the columns field, offset and size.

    Raises:
        TarIndexError: The members are not in the order of their shard, or a sample has a field twice.
    """
    arrow, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    numpy = importlib.import_module("numpy")
    tables = [table for part in parts for table in part] or [members_table({key: [] for key in COLUMNS})]
    rows = [sum(table.num_rows for table in part) for part in parts]
    table = arrow.concat_tables(tables).drop_columns("shard").unify_dictionaries()
    # Offsets of 64 bits: the keys of one column may exceed 2 GiB.
    key = one_chunk(table["key"].cast(arrow.large_string()))
    shard = numpy.repeat(numpy.arange(len(parts), dtype=numpy.int32), rows)
    offset, size, begin, end = (one_chunk(table[column]).to_numpy() for column in ("offset", "size", "begin", "end"))
    is_start = numpy.ones(table.num_rows, bool)
    is_start[1:] = (shard[1:] != shard[:-1]) | (begin[1:] != begin[:-1])
    same_key = compute.equal(key[1:], key[:-1]).to_numpy(zero_copy_only=False)
    continues = same_key & (end[1:] == end[:-1]) & (offset[1:] >= (offset + size)[:-1])
    follows = (begin[1:] >= end[:-1]) | (shard[1:] != shard[:-1])
    if not numpy.all(numpy.where(is_start[1:], follows, continues)):
        raise TarIndexError(f"{name}: damaged: its members are not in the order of their shard; {ADVICE}")
    _check_fields(one_chunk(table["field"]), numpy.cumsum(is_start), name)
    first = numpy.flatnonzero(is_start)
    samples = {"shard": shard[first], "key": key.take(arrow.array(first)), "begin": begin[first], "end": end[first]}
    members = {"field": one_chunk(table["field"]), "offset": offset, "size": size}
    return arrow.table({**samples, "first": first}), arrow.table(members)


def _check_fields(fields: Any, sample: Any, name: str) -> None:
    """Checks that no sample has a field twice, given the field and the number of the sample of each member."""
    compute, numpy = importlib.import_module("pyarrow.compute"), importlib.import_module("numpy")
    # The dictionary of a damaged file may contain a name twice.
    names = compute.unique(fields.dictionary)
    codes = compute.index_in(fields.dictionary, names).take(fields.indices).to_numpy()
    # Members of a sample are neighbours, so that this sorts in about linear time.
    pairs = numpy.sort(sample * len(names) + codes, kind="stable")
    twice = pairs[1:][pairs[1:] == pairs[:-1]]
    if twice.size:
        field = names[int(twice[0]) % len(names)].as_py()
        raise TarIndexError(f"{name}: damaged: a sample has the field {field!r} twice; {ADVICE}")


def expanded(names: Sequence[str], samples: Any, members: Any) -> tuple[Any, list[tuple[int, int]]]:
    """The table of members of an index file, and the first row of each shard with the row after its last.

    Args:
        names: Names of the shards in the file.
        samples, members: Tables from `columns_of`.
    """
    arrow, numpy = importlib.import_module("pyarrow"), importlib.import_module("numpy")
    starts = numpy.append(one_chunk(samples["first"]).to_numpy(), members.num_rows)
    sample = arrow.array(numpy.repeat(numpy.arange(samples.num_rows), numpy.diff(starts)))
    shard = one_chunk(samples["shard"])
    columns = {
        "shard": arrow.DictionaryArray.from_arrays(shard.take(sample), arrow.array(names, arrow.string())),
        **{name: one_chunk(samples[name]).take(sample) for name in ("begin", "end")},
        # Texts whose offsets have 64 bits are divided into chunks, which files have anyway.
        "key": arrow.chunked_array([samples["key"].combine_chunks()]).take(sample).cast(arrow.string()),
        **{name: members[name] for name in members.column_names},
    }
    rows = starts[numpy.searchsorted(shard.to_numpy(), numpy.arange(len(names) + 1))].tolist()
    return members_table(columns), list(itertools.pairwise(rows))


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
