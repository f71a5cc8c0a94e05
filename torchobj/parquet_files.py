"""Row groups of Parquet files: footers, schemas, and the ranges of their columns. Reads no object.

Does not import torch. pyarrow decodes, from ranges that the caller has read. It is imported when it is needed.
"""

import bisect
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchobj.exceptions import ConfigError, ParquetError
from torchobj.manifest_pages import column_chunks

__all__ = [
    "FOOTER_BYTES",
    "ParquetFile",
    "RowGroup",
    "arrow",
    "check_installed",
    "missing_footer_bytes",
    "open_file",
    "read_row_group",
]

#: Bytes read from the end of a file at first, which contain most footers.
FOOTER_BYTES = 64 << 10

#: Columns whose chunks are at most this far apart are read with one request.
_MAX_GAP_BYTES = 64 << 10

#: Maximum size of a footer, so that a damaged length does not allocate more.
_MAX_FOOTER_BYTES = 256 << 20

#: Length of the footer and magic bytes at the end of a file.
_TAIL_BYTES = 8


class RowGroup(NamedTuple):
    """A row group of a file."""

    rows: int
    ranges: tuple[tuple[int, int], ...]
    """Bytes of the selected columns, in order, as start and end."""


class ParquetFile(NamedTuple):
    """The footer of a file."""

    url: str
    metadata: Any
    """`pyarrow.parquet.FileMetaData`."""
    schema: Any
    """`pyarrow.Schema` of the selected columns."""
    columns: tuple[str, ...]
    """Names of the columns to decode."""
    row_groups: tuple[RowGroup, ...]


def check_installed() -> Any:
    """`pyarrow.parquet`.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: PLC0415  optional
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install torchobj[manifest]") from error
    return pyarrow.parquet


def arrow() -> Any:
    """The module `pyarrow`, which is installed: `check_installed` was called."""
    import pyarrow  # noqa: PLC0415  optional

    return pyarrow


def missing_footer_bytes(tail: Any, size: int, url: str) -> int:
    """Number of bytes of the footer that precede `tail`, the end of a file of `size` bytes.

    Raises:
        ParquetError: It is not a Parquet file.
    """
    end = bytes(memoryview(tail)[-_TAIL_BYTES:])
    if len(end) < _TAIL_BYTES or end[4:] not in (b"PAR1", b"PARE"):
        raise ParquetError(f"{url}: not a Parquet file: its last bytes are {end[4:]!r}")
    length = int.from_bytes(end[:4], "little") + _TAIL_BYTES
    if length > min(size, _MAX_FOOTER_BYTES):
        raise ParquetError(f"{url}: its footer has {length} bytes: must be at most {min(size, _MAX_FOOTER_BYTES)}")
    return max(0, length - len(tail))


def open_file(url: str, footer: Any, size: int, columns: Sequence[str] | None) -> ParquetFile:
    """Reads the footer of a file.

    Args:
        url: URL of the file.
        footer: The end of the file, with the whole footer.
        size: Size of the file in bytes.
        columns: Names of the columns to read, nested ones with dots; None: all.

    Raises:
        ConfigError: A column does not exist.
        ParquetError: The footer is damaged, or names bytes outside of the file.
    """
    parquet = check_installed()
    try:
        file = parquet.ParquetFile(io.BytesIO(footer))
        metadata, schema, chunks = file.metadata, file.schema_arrow, column_chunks(memoryview(footer))
    except Exception as error:
        raise ParquetError(f"{url}: its footer cannot be read: {error}") from error
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    selected = list(range(len(paths)))
    if columns is not None:
        for name in columns:
            if not any(path == name or path.startswith(f"{name}.") for path in paths):
                raise ConfigError(f"columns={name!r}: {url} has the columns {', '.join(schema.names)}")
        selected = [
            index
            for index, path in enumerate(paths)
            if any(path == name or path.startswith(f"{name}.") for name in columns)
        ]
        roots = {name.partition(".")[0] for name in columns}
        schema = type(schema).empty_table(schema).select([name for name in schema.names if name in roots]).schema
    groups = tuple(_row_group(url, rows, columns, selected, size) for rows, columns in chunks)
    return ParquetFile(url, metadata, schema, tuple(schema.names if columns is None else columns), groups)


def _row_group(url: str, rows: int, columns: list[tuple[int, int]], selected: list[int], size: int) -> RowGroup:
    if rows < 0 or len(columns) <= max(selected, default=-1):
        raise ParquetError(f"{url}: a row group has {rows} rows and {len(columns)} columns")
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(columns[index] for index in selected):
        if not 0 <= begin <= end <= size:
            raise ParquetError(f"{url}: its footer names bytes {begin}..{end} of {size}")
        if merged and begin - merged[-1][1] <= _MAX_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return RowGroup(rows, tuple(merged))


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
    parquet = check_installed()
    group = file.row_groups[number]
    source = RangesFile(group.ranges, buffers, size)
    try:
        table = parquet.ParquetFile(source, metadata=file.metadata).read_row_group(
            number, columns=list(file.columns), use_threads=False
        )
    except Exception as error:
        raise ParquetError(f"{file.url}: row group {number} cannot be decoded: {error}") from error
    if table.num_rows != group.rows:
        raise ParquetError(f"{file.url}: row group {number} has {table.num_rows} rows, its footer says {group.rows}")
    return table
