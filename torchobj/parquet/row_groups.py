"""Row groups of Parquet files: footers, the ranges of their columns, and the one schema of several files. Reads no
object.

pyarrow decodes, from ranges that the caller has read. It is imported when it is needed.
"""

import bisect
import io
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchobj.exceptions import ConfigError, ParquetError
from torchobj.parquet.arrow import import_arrow
from torchobj.parquet.pages import DELTA_TEXTS, DICTIONARY, DICTIONARY_PAGE, Chunk, Page, pages_of, read_footer

#: Bytes read from the end of a file at first, which contain most footers.
FOOTER_BYTES = 64 << 10

#: Columns whose chunks are at most this far apart are read with one request.
_MAX_GAP_BYTES = 64 << 10

#: Maximum size of a footer, so that a damaged length does not allocate more.
_MAX_FOOTER_BYTES = 256 << 20

#: pyarrow's own limits for parts of a footer, 100 MB and a million, are lower.
FOOTER_LIMITS = {"thrift_string_size_limit": _MAX_FOOTER_BYTES, "thrift_container_size_limit": _MAX_FOOTER_BYTES}

#: The first version of parquet-mr whose columns are as long as its footer says, and how much longer earlier ones are:
#: pyarrow's limit for the header of a dictionary.
_PADDED_BEFORE, _MAX_DICTIONARY_HEADER_BYTES = (1, 2, 9), 100

#: What to do with an encrypted file, for which there are no arguments.
_DECRYPT = "torchobj takes no keys; decrypt it with pyarrow.parquet"

#: Length of the footer and magic bytes at the end of a file.
_TAIL_BYTES = 8

#: Rows that a file may have, and how many per byte if that is more: equal values take almost no bytes, so that a small
#: damaged file would otherwise claim any number.
_MAX_ROWS, _MAX_ROWS_PER_BYTE = 1 << 24, 1 << 10

#: Maximum size of the decoded columns of a row group, or as a multiple of their bytes in the file if that is more.
_MAX_DECODED_BYTES, _MAX_DECODED_RATIO = 2 << 30, 10

#: Size of texts that are decoded at a time to measure them.
_STEP_BYTES = 64 << 20

#: Maximum size of a dictionary whose values are measured.
_MAX_DICTIONARY_BYTES = 64 << 20

#: Bytes of a decoded value by its type; None: its length, or that of each text.
_WIDTHS = {"BOOLEAN": 1, "INT32": 8, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}

#: Names in pyarrow of the numbers of compressions.
_CODECS = {0: "none", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}


class EncryptedError(ParquetError):
    """The footer, or a selected column, is encrypted."""


class RowGroup(NamedTuple):
    """A row group of a file."""

    rows: int
    ranges: tuple[tuple[int, int], ...]
    """Bytes of the selected columns, in order, as start and end."""
    measured: "array[int]"
    """Start, end, number of values and compression of the columns whose decoded size does not follow from the number of
    rows."""


class Leaf(NamedTuple):
    """A selected column with data: a struct has several."""

    path: str
    """Its name, nested ones with dots."""
    number: int
    width: int | None
    """Bytes of a decoded value; None: those of a text."""
    is_repeated: bool
    """Whether a row may have any number of values."""

    @property
    def is_measured(self) -> bool:
        """Whether its decoded size does not follow from the number of rows."""
        return self.is_repeated or self.width is None


class ParquetFile(NamedTuple):
    """The footer of a file."""

    url: str
    metadata: Any
    """`pyarrow.parquet.FileMetaData`."""
    schema: Any
    """`pyarrow.Schema` of the selected columns, without the fields of structs that are not."""
    leaves: tuple[Leaf, ...]
    """The columns to decode."""
    row_groups: tuple[RowGroup, ...]


def missing_footer_bytes(tail: Any, size: int, url: str) -> int:
    """Number of bytes of the footer that precede `tail`, the end of a file of `size` bytes.

    Raises:
        ParquetError: It is not a Parquet file.
        EncryptedError: Its footer is encrypted.
    """
    end = bytes(memoryview(tail)[-_TAIL_BYTES:])
    if len(end) < _TAIL_BYTES or end[4:] not in (b"PAR1", b"PARE"):
        raise ParquetError(f"{url}: not a Parquet file: its last bytes are {end[4:]!r}")
    if end[4:] == b"PARE":
        raise EncryptedError(f"{url}: its footer is encrypted: {_DECRYPT}")
    length = int.from_bytes(end[:4], "little") + _TAIL_BYTES
    if length > min(size, _MAX_FOOTER_BYTES):
        raise ParquetError(f"{url}: its footer has {length} bytes: must be at most {min(size, _MAX_FOOTER_BYTES)}")
    return max(0, length - len(tail))


def open_file(
    url: str, footer: Any, size: int, columns: Sequence[str] | None, filtered: Sequence[str] = ()
) -> ParquetFile:
    """Reads the footer of a file.

    Args:
        url: URL of the file.
        footer: The end of the file, with the whole footer.
        size: Size of the file in bytes.
        columns: Names of the columns to read, nested ones with dots; None: all. A column of this name precedes a
            nested one.
        filtered: Names of the columns that filters use, which are read too.

    Raises:
        ConfigError: A column does not exist.
        ParquetError: The footer is damaged, names bytes outside of the file, or has a selected column twice.
        EncryptedError: A selected column is encrypted.
    """
    parquet = import_arrow("pyarrow.parquet")
    try:
        reader = parquet.ParquetFile(io.BytesIO(footer), **FOOTER_LIMITS).reader
        metadata, described = reader.metadata, read_footer(memoryview(footer))
        kinds, names, writer = metadata.schema, reader.schema_arrow.names, metadata.created_by
    except Exception as error:
        raise ParquetError(f"{url}: its footer cannot be read: {error}") from error
    if sum(described.leaves) != metadata.num_columns or len(described.leaves) != len(names):
        raise ParquetError(f"{url}: its schema has {len(names)} columns, its footer {len(described.leaves)}")
    _check_rows(url, described.rows, [rows for rows, _ in described.groups], size)
    columns_of: dict[str, list[tuple[int, str]]] = {}
    paths = enumerate(kinds.column(index).path for index in range(metadata.num_columns))
    for name, count in zip(names, described.leaves, strict=True):
        columns_of.setdefault(name, []).extend(next(paths) for _ in range(count))
    chosen = dict(columns_of) if columns is None else {}
    for column in columns or []:
        name, found = _find(columns_of, column)
        if not found:
            raise ConfigError(f"columns={column!r}: {url} has the columns {', '.join(names)}")
        chosen.setdefault(name, []).extend(found)
    for name in filtered:
        chosen[name] = _of_filter(name, columns_of, chosen, url)
    twice = [name for name, count in Counter(names).items() if count > 1 and name in chosen]
    if twice:
        raise ParquetError(f"{url}: has {names.count(twice[0])} columns {twice[0]!r}; pass columns= without it")
    selected = sorted({index for each in chosen.values() for index, _ in each})
    leaves = tuple(_leaf(index, kinds.column(index)) for index in selected)
    padding = _dictionary_padding(writer)
    groups = tuple(_row_group(url, rows, chunks, leaves, size, padding=padding) for rows, chunks in described.groups)
    try:
        schema = reader.read_row_groups([], column_indices=selected).schema
    except Exception as error:
        raise ParquetError(f"{url}: its schema cannot be read: {error}") from error
    return ParquetFile(url, metadata, schema, leaves, groups)


def _find(columns_of: dict[str, list[tuple[int, str]]], column: str) -> tuple[str, list[tuple[int, str]]]:
    """The top-level column that a name or path selects, and its leaves. Names with dots precede paths."""
    if column in columns_of:
        return column, columns_of[column]
    for at in reversed([at for at, character in enumerate(column) if character == "."]):
        found = [leaf for leaf in columns_of.get(column[:at], []) if f"{leaf[1]}.".startswith(f"{column}.")]
        if found:
            return column[:at], found
    return column, []


def _of_filter(
    name: str, columns_of: dict[str, list[tuple[int, str]]], chosen: dict[str, list[tuple[int, str]]], url: str
) -> list[tuple[int, str]]:
    """The leaves of a column that filters use, which may be one of those that are chosen."""
    if name not in columns_of:
        raise ConfigError(f"filters: column {name!r}: {url} has the columns {', '.join(columns_of)}")
    if not set(columns_of[name]) <= set(chosen.get(name, columns_of[name])):
        raise ConfigError(f"filters: column {name!r}: columns= selects only a part of it; select the whole column")
    return columns_of[name]


def _leaf(number: int, kind: Any) -> Leaf:
    width = kind.length if kind.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(kind.physical_type)
    return Leaf(kind.path, number, width, kind.max_repetition_level > 0)


def _check_rows(url: str, rows: int, groups: list[int], size: int) -> None:
    counted = sum(groups)
    # Writers that do not know the total leave it 0.
    if min(groups, default=0) < 0 or (rows not in (0, -1) and rows != counted):
        raise ParquetError(f"{url}: its footer has {rows} rows, its row groups have {counted}")
    limit = max(_MAX_ROWS, _MAX_ROWS_PER_BYTE * size)
    if counted > limit:
        raise ParquetError(f"{url}: its footer has {counted} rows in {size} bytes: must be at most {limit}")


def _dictionary_padding(writer: str | None) -> int:
    """Bytes by which a column may be longer than its footer says.

    The sizes of parquet-mr before 1.2.9 lack the header of the dictionary (PARQUET-816, IMPALA-694).
    """
    named = re.match(r"parquet-mr\b(?: version (\d+)\.(\d+)(?:\.(\d+))?)?", writer or "", re.IGNORECASE)
    version = tuple(int(number or 0) for number in named.groups()) if named else _PADDED_BEFORE
    return _MAX_DICTIONARY_HEADER_BYTES if version < _PADDED_BEFORE else 0


def _row_group(
    url: str, rows: int, columns: list[Chunk], leaves: tuple[Leaf, ...], size: int, *, padding: int
) -> RowGroup:
    if len(columns) <= max((leaf.number for leaf in leaves), default=-1):
        raise ParquetError(f"{url}: a row group has {rows} rows and {len(columns)} columns")
    measured, ranges = array("q"), list[tuple[int, int]]()
    for leaf in leaves:
        begin, end, values, codec, is_encrypted = columns[leaf.number]
        if is_encrypted:
            raise EncryptedError(f"{url}: column {leaf.path!r} is encrypted: {_DECRYPT}, or pass columns= without it")
        if not 0 <= begin <= end <= size:
            raise ParquetError(f"{url}: its footer names bytes {begin}..{end} of {size}")
        if values < rows or (values > rows and not leaf.is_repeated):
            raise ParquetError(f"{url}: a row group has {rows} rows, but column {leaf.number} has {values} values")
        end = min(end + padding, size)
        ranges.append((begin, end))
        if leaf.is_measured:
            measured.extend((begin, end, values, codec))
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin - merged[-1][1] <= _MAX_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return RowGroup(rows, tuple(merged), measured)


class RangesFile(io.RawIOBase):
    """The ranges of a file that were read, as a file for pyarrow. Reading outside of them raises an OSError."""

    def __init__(self, ranges: Sequence[tuple[int, int]], buffers: Sequence[Any], size: int) -> None:
        self._starts = [start for start, _ in ranges]
        self._buffers = [memoryview(buffer) for buffer in buffers]
        self._size, self._position = size, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position.

        Args:
            offset: Number of bytes.
            whence: As for files.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Returns the position."""
        return self._position

    def read_buffer(self, size: int = -1) -> memoryview:
        """Returns bytes of one range, which share its memory. Called by pyarrow.

        Args:
            size: Number of bytes.
        """
        number = bisect.bisect_right(self._starts, self._position) - 1
        begin = self._position - self._starts[number] if number >= 0 else 0
        if number < 0 or size < 0 or begin + size > len(self._buffers[number]):
            raise OSError(f"bytes {self._position}..{self._position + size} are not among the columns of the footer")
        self._position += size
        return self._buffers[number][begin : begin + size]

    def read(self, size: int = -1) -> bytes:
        """Returns a copy of bytes of one range.

        Args:
            size: Number of bytes.
        """
        return bytes(self.read_buffer(size))


def read_row_group(file: ParquetFile, number: int, buffers: Sequence[Any], size: int) -> Any:
    """Decodes a row group.

    Args:
        file: The footer.
        number: Number of the row group in the file.
        buffers: The bytes of its ranges.
        size: Size of the file in bytes.

    Returns:
        A `pyarrow.Table` of the selected columns.

    Raises:
        ParquetError: It is damaged, or has another number of rows than its footer.
    """
    parquet = import_arrow("pyarrow.parquet")
    group = file.row_groups[number]
    source = RangesFile(group.ranges, buffers, size)
    try:
        reader = parquet.ParquetFile(source, metadata=file.metadata, **FOOTER_LIMITS).reader
        _check_decoded(file, number, source, reader)
        table = reader.read_row_group(number, column_indices=[leaf.number for leaf in file.leaves], use_threads=False)
    except Exception as error:
        raise ParquetError(f"{file.url}: row group {number} cannot be decoded: {error}") from error
    if table.num_rows != group.rows:
        raise ParquetError(f"{file.url}: row group {number} has {table.num_rows} rows, its footer says {group.rows}")
    return table


def _check_decoded(file: ParquetFile, number: int, source: RangesFile, reader: Any) -> None:
    """Raises ValueError if a row group decodes to more than the limit.

    The headers of pages bound it, since the footer is not trusted. Texts that may exceed the limit are decoded in steps
    and dropped.
    """
    group = file.row_groups[number]
    limit = max(_MAX_DECODED_BYTES, _MAX_DECODED_RATIO * sum(end - begin for begin, end in group.ranges))
    fixed = group.rows * sum(leaf.width or 0 for leaf in file.leaves if not leaf.is_measured)
    for is_exact in (False, True):
        # Of texts, one per row, and of columns with any number of values per row.
        sizes = [0, 0]
        measured = iter(group.measured)
        for leaf in (leaf for leaf in file.leaves if leaf.is_measured):
            begin, end, values, codec = next(measured), next(measured), next(measured), next(measured)
            source.seek(begin)
            pages, codec_name = source.read_buffer(end - begin), _CODECS.get(codec) if is_exact else None
            sizes[leaf.is_repeated] += sum(_decoded_sizes(pages, values, leaf.width, codec_name))
        if fixed + sum(sizes) <= limit:
            return
    size, rows = fixed + sizes[1], max(1, group.rows * _STEP_BYTES // max(1, sizes[0]))
    texts = [leaf.number for leaf in file.leaves if leaf.is_measured and not leaf.is_repeated]
    steps = reader.iter_batches(rows, [number], column_indices=texts, use_threads=False) if size <= limit else []
    for batch in steps:
        size += batch.nbytes
        if size > limit:
            break
    if size > limit:
        raise ValueError(f"its columns have more than {limit} bytes; read fewer of them, or write smaller row groups")


def _decoded_sizes(chunk: memoryview, values: int, width: int | None, codec: str | None) -> Iterator[int]:
    """What each page decodes to at most, in bytes. With a codec, values of dictionaries are measured.

    As in pyarrow, the pages end with that of the last of the values: padding may follow.
    """
    longest = 0
    for page in pages_of(chunk, 0):
        # An offset and a level of each value.
        own = 16 * page.values
        if page.kind == DICTIONARY_PAGE:
            longest = _longest_value(chunk, page, codec) if width is None else width
            yield max(page.sizes)
            continue
        if width is not None:
            yield own + page.values * width
        elif page.encoding in DICTIONARY - {0}:
            yield own + page.values * longest
        else:
            yield own + max(page.sizes) * (page.values if page.encoding == DELTA_TEXTS else 1)
        values -= page.values
        if values <= 0:
            return


def _longest_value(chunk: memoryview, page: Page, codec: str | None) -> int:
    """The length of the longest text of a dictionary, or a larger number. Each has 4 bytes of its length before it."""
    size, compressed = page.sizes
    most = max(0, size - 4 * page.values)
    if codec is None or size > _MAX_DICTIONARY_BYTES:
        return most
    data: Any = chunk[page.begin : page.begin + compressed]
    data = data if codec == "none" else import_arrow().decompress(data, size, codec=codec, asbytes=True)
    at = longest = 0
    for _ in range(page.values):
        length = int.from_bytes(data[at : at + 4], "little")
        at, longest = at + 4 + length, max(longest, length)
        if at > len(data):
            return most
    return longest


def merged_schema(schema: Any, file: ParquetFile, first_url: str) -> Any:
    """The schema to which the columns of earlier files and of this one can be converted without loss.

    Args:
        schema: The `pyarrow.Schema` of the earlier files, whose order it keeps.
        file: This file. The order of its columns may differ, and one without values may have no type.
        first_url: URL of the first file, for messages.

    Raises:
        ParquetError: It has other columns, or one of another kind.
    """
    if file.schema.equals(schema):
        return schema
    names, pyarrow = schema.names, import_arrow()
    try:
        if sorted(names) != sorted(file.schema.names):
            raise pyarrow.ArrowInvalid("other columns")
        fields = [_merged_field(schema.field(name), file.schema.field(name)) for name in names]
    except pyarrow.ArrowException as error:
        shown = [", ".join(f"{field.name}: {field.type}" for field in each) for each in (file.schema, schema)]
        raise ParquetError(
            f"{file.url}: its columns are {shown[0]}; those of {first_url} are {shown[1]}; pass columns= with those "
            "that are the same in all files"
        ) from error
    return pyarrow.schema(fields, schema.metadata)


def _merged_field(first: Any, second: Any) -> Any:
    pyarrow = import_arrow()
    kinds = [first.type, second.type]
    if kinds[0] != kinds[1]:
        if not _is_similar(*kinds):
            raise pyarrow.ArrowInvalid("another kind")
        # A dictionary of texts is text in a file without dictionaries; views are read by few.
        if [*map(pyarrow.types.is_dictionary, kinds)].count(True) == 1 and pyarrow.null() not in kinds:
            kinds = [kind.value_type if pyarrow.types.is_dictionary(kind) else kind for kind in kinds]
        kinds = [pyarrow.large_string() if kind == pyarrow.string_view() else kind for kind in kinds]
    schemas = [
        pyarrow.schema([pyarrow.field(first.name, kind, nullable=first.nullable or second.nullable)]) for kind in kinds
    ]
    return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0)


def _is_similar(first: Any, second: Any) -> bool:
    """Whether two types differ in their width, or precision, only."""
    if first == second or import_arrow().null() in (first, second):
        return True
    shape, other = _shape(first), _shape(second)
    same = shape[0] == other[0] and shape[1].keys() == other[1].keys()
    return same and all(_is_similar(kind, other[1][name]) for name, kind in shape[1].items())


def _shape(kind: Any) -> tuple[str, dict[str, Any]]:
    """What must be equal in the types of a column, and the types in it by name."""
    kinds = import_arrow().types
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    if kinds.is_struct(kind):
        return "struct", {field.name: field.type for field in kind}
    if kinds.is_map(kind):
        return "map", {"key": kind.key_type, "value": kind.item_type}
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return "list", {"": kind.value_type}
    if kinds.is_fixed_size_list(kind):
        return f"list of {kind.list_size}", {"": kind.value_type}
    if kinds.is_timestamp(kind):
        return f"timestamp of {kind.tz}", {}
    return next((name for name, of_family in _FAMILIES.items() if of_family(kinds, kind)), str(kind)), {}


_FAMILIES: dict[str, Callable[[Any, Any], bool]] = {
    "integer": lambda kinds, kind: kinds.is_integer(kind),
    "float": lambda kinds, kind: kinds.is_floating(kind),
    "text": lambda kinds, kind: kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind),
    "bytes": lambda kinds, kind: kinds.is_binary(kind) or kinds.is_large_binary(kind),
    "decimal": lambda kinds, kind: kinds.is_decimal(kind),
    "date": lambda kinds, kind: kinds.is_date(kind),
    "time": lambda kinds, kind: kinds.is_time(kind),
    "duration": lambda kinds, kind: kinds.is_duration(kind),
}


def with_schema(table: Any, schema: Any) -> Any:
    """The columns of a row group in the order and with the types of a schema from `merged_schema`.

    Raises:
        pyarrow.ArrowException: A value cannot be converted without loss.
    """
    return table if table.schema.equals(schema, check_metadata=True) else table.select(schema.names).cast(schema)
