"""Streams rows of Parquet files, or batches of rows. `parquet_files` reads footers and decodes row groups."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj._torchobj import ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check
from torchobj.datasets.containers.stream import SampleId, StreamDataset, StreamItem, failed_items
from torchobj.datasets.failures import OnIterableError
from torchobj.datasets.listing import Shards, listing_of
from torchobj.datasets.samples import Sample_co
from torchobj.exceptions import ParquetError
from torchobj.parquet.arrow import import_arrow
from torchobj.parquet.hive_partitions import HivePartitions, hive_partitions, no_partitions
from torchobj.parquet.row_filter import RowFilter
from torchobj.parquet.row_groups import (
    FOOTER_BYTES,
    ParquetFile,
    RowGroup,
    merged_schema,
    missing_footer_bytes,
    open_file,
    read_row_group,
    with_schema,
)
from torchobj.parquet.rows import TableRow, converted, float_parts, unconverted, with_nan
from torchobj.ranks.sample_ranks import SampleRanks
from torchobj.ranks.sharding import Order, Segment, Shard, Uneven
from torchobj.reading.read_ahead import Group, read_ahead
from torchobj.shards.shard_urls import checked_urls
from torchobj.urls import parse_url

__all__ = ["ParquetIterableDataset"]

_SUFFIXES = (".parquet", ".pq")

#: Rows that are converted to Python at a time.
_ROWS = 1024

#: Files whose footers are read at the same time.
_FOOTERS = 256


class _Unit(NamedTuple):
    """A row group of a dataset."""

    file: ParquetFile
    file_index: int
    """Index of the file in the manifest."""
    number: int
    """Number of the row group in the file."""
    rows: int | None
    """Number of rows that the filters keep; None if only its rows tell."""
    partition: dict[str, Any]
    """Values of the columns that the names of its folders contain."""

    @property
    def row_group(self) -> RowGroup:
        return self.file.row_groups[self.number]


class _Footers(NamedTuple):
    """What the footers of all files tell."""

    schema: Any
    """`pyarrow.Schema` of the rows."""
    read: Any
    """That of the columns that are read: also those that only the filters use."""
    units: list[_Unit]
    """The row groups that may have rows that the filters keep."""


class _Rows(NamedTuple):
    """Rows of a row group."""

    table: Any
    """`pyarrow.Table`. Its types are not yet those of all files if one of its values does not fit them."""
    unit: int
    first: int
    """Number of the first row in the row group."""


class ParquetIterableDataset(StreamDataset[Sample_co]):
    """An iterable dataset of the rows of Parquet files, or of batches of rows. The files are read as they are.

    Only the selected columns are read. The next row groups are read ahead by one process for all its DataLoader
    workers, within the memory budget (`torchobj.set_memory_budget`); a worker decodes one at a time with pyarrow. Row
    groups are divided among the ranks of torch.distributed and their workers. The position of a `torchobj.DataLoader`
    is exact within a row group, and can be resumed with the same numbers of ranks and workers.

    The footers of all files are read when the first row is needed. Needs pyarrow: `pip install torchobj[manifest]`.

    Args:
        urls: One or several of: the URL of a file; a pattern with braces, such as `s3://b/part-{000..127}.parquet`; a
            pattern with `*`, `?` or `[`; a prefix that ends with a slash, below which names with a part that begins
            with `_` or `.` are skipped.
        columns: Names of the columns to read, nested ones with dots; a column whose name contains the dot precedes
            these. None: all. Their types must be the same in all files, or of one kind: if some files have `int32` and
            others `int64`, all rows have `int64`.
        batch_rows: Number of rows of a batch; the last batch of a worker may have fewer. Pass `batch_size=None` to the
            loader. None: a sample is a row, a dict of column → Python value; missing floats are NaN, other missing
            values None, which the default collation refuses with their column, row and file.
        format: Type of a batch: `torch` is a dict of column → tensor for numbers (missing floats are NaN), for lists of
            a fixed size, also nested ones, and for tensors of a fixed shape; a list of tensors for other lists of
            these, and a list for other columns; `arrow` is a `pyarrow.Table`, which shares the memory of its row group.
        partitioning: Whether folders with names such as `year=2024/month=05/` are columns: `hive`, with types inferred
            from the names of all files, `int32` or `string`; or a `pyarrow.dataset.HivePartitioning`, which has their
            names and types. All folders of a key count, also those of a prefix in `urls`. Values are decoded as those
            of URLs; `__HIVE_DEFAULT_PARTITION__` is a missing one. None: no folder is a column.
        filters: Keeps the rows for which it is true, as `pyarrow.dataset` does: an expression such as
            `pyarrow.dataset.field("id") > 3`, or a list such as `[("id", ">", 3), ("year", "=", 2024)]`, as for
            `pyarrow.parquet.read_table`. Nothing is read of files that the names of their folders exclude, and only the
            footer of row groups that their statistics exclude. Columns that only the filters use are read, but are not
            in the rows.
        transform: Converts a row or batch.
        shuffle: Whether to shuffle the row groups, in an order that depends on `seed` and the epoch only.
        shuffle_buffer: Number of rows that are held to draw the next one from. 0: rows have the order of their row
            groups. Only without `batch_rows`.
        seed: Seed of both orders; 0 or more. Each pass has the order of the next epoch, unless
            `set_epoch` is called.
        uneven: How to make all ranks yield the same number of rows: `drop` leaves out the rest, `pad` repeats some
            rows. What is left out or repeated is logged. With `filters`, only if statistics and the names of folders
            tell the number of rows. None: row groups are divided, and the numbers of rows may differ.
        on_error: Action for a row that cannot be read, converted to Python or transformed, or for a batch that contains
            such a row: `raise`, after which iteration can continue with the next one; `skip`; or a callable that
            receives the number of the row in its row group (among those that the filters keep), the URL of the file and
            the exception, and returns a sample. After a row group that cannot be read, the next one is read.
        enable_sharding: Whether to divide the row groups among the ranks and their DataLoader workers. False: each
            process yields all rows. The ranks are those of torch.distributed when iteration starts; if a loader that
            Accelerate has prepared iterates, which divides the samples itself, there is one rank, and in a Trainer of
            Lightning its strategy determines them.
        rank, world_size: The rank of this process and the number of ranks, instead of those; `rank=0, world_size=1` if
            something else divides.
        mesh: A `DeviceMesh`, instead of `rank` and `world_size`. Ranks that differ only in dimensions for parts of the
            model, such as `tp`, `cp` and `pp`, get the same samples. Dimensions with names such as `dp`, `fsdp`,
            `dp_replicate` and `data_parallel` divide them; pass `mesh["name"]` to divide by one of another name.
        config: Settings of the store.

    Attributes:
        failed_samples: Number of rows or batches that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid, or pyarrow is not installed; when iteration starts: a pattern matches
            nothing, a column does not exist, in any file, or the filters cannot be evaluated.
        ParquetError: A file is damaged, or its columns have other types than those of the first file; it lacks a
            folder that is a column, or has one whose value is not of its type; a row group decodes to more than 2 GiB
            and ten times its size. In place of a row or batch: Python cannot represent a value, such as a date after
            the year 9999 or text that is not UTF-8, or a tensor cannot contain it; the message names file, row and
            column.

    Example:
        >>> import pyarrow, pyarrow.parquet, torchobj
        >>> table = pyarrow.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})
        >>> with torchobj.ObjectWriter("memory://tables/part-0.parquet") as file:
        ...     pyarrow.parquet.write_table(table, file)
        >>> list(ParquetIterableDataset("memory://tables/"))[1]
        {'id': 2, 'text': 'b'}
        >>> [batch["id"] for batch in ParquetIterableDataset("memory://tables/", columns=["id"], batch_rows=2)]
        [tensor([1, 2]), tensor([3])]
        >>> list(ParquetIterableDataset("memory://tables/", columns=["text"], filters=[("id", ">", 1)]))
        [{'text': 'b'}, {'text': 'c'}]
    """

    _unit_name = "row groups"
    _uncounted = "the rows that filters= keeps are known only when they are read"

    def __init__(
        self,
        urls: str | Sequence[str],
        columns: Sequence[str] | None = None,
        batch_rows: int | None = None,
        *,
        format: Literal["torch", "arrow"] = "torch",  # noqa: A002  the name of Hugging Face's datasets
        partitioning: Any = None,
        filters: Any = None,
        transform: Callable[[Any], Sample_co] | None = None,
        shuffle: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        enable_sharding: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        config: StoreConfig | None = None,
    ) -> None:
        import_arrow("pyarrow.parquet")
        named = columns is None or (not isinstance(columns, str) and all(isinstance(name, str) for name in columns))
        check("columns", columns, "a list of names, or None", ok=named and columns != [])
        is_count = isinstance(batch_rows, int) and not isinstance(batch_rows, bool) and batch_rows > 0
        check("batch_rows", batch_rows, "1 or more, or None", ok=batch_rows is None or is_count)
        check("format", format, "'torch' or 'arrow'", ok=format in ("torch", "arrow"))
        check(
            "format",
            format,
            "'torch' without batch_rows, as a sample is a dict",
            ok=batch_rows is not None or format == "torch",
        )
        alone = batch_rows is None or shuffle_buffer == 0
        check("shuffle_buffer", shuffle_buffer, "0 with batch_rows: the buffer holds rows", ok=alone)
        is_hive = partitioning in (None, "hive")
        is_hive = is_hive or isinstance(partitioning, import_arrow("pyarrow.dataset").HivePartitioning)
        check("partitioning", partitioning, "'hive', a pyarrow.dataset.HivePartitioning, or None", ok=is_hive)
        self._partitioning = partitioning
        self._filter = None if filters is None else RowFilter(filters)
        self._columns = None if columns is None else list(columns)
        # Not a cached_property, which holds a lock of the class in Python 3.11: a child that is forked while another
        # thread reads footers would wait for it.
        self._footers: _Footers | None = None
        self._batch_rows, self._format = batch_rows, format
        self._set_up(
            listing_of(Shards(checked_urls(urls), _SUFFIXES), parse_url, config),
            transform=transform,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            uneven=uneven,
            on_error=on_error,
            ranks=SampleRanks.of(enable_sharding, rank, world_size, mesh),
        )

    @override
    def _units(self) -> int:
        return len(self._row_groups)

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the selected columns of all files. The first access reads the footers."""
        return self._read_footers().schema

    @property
    def _row_groups(self) -> list[_Unit]:
        return self._read_footers().units

    def _read_footers(self) -> _Footers:
        """The columns and row groups of all files. The first call reads the footers of those that may have rows."""
        if self._footers is not None:
            return self._footers
        arrow, partitions, filters = import_arrow(), self._partitions(), self._filter
        chosen = [name for name in partitions.schema.names if self._columns is None or name in self._columns]
        columns = None if self._columns is None else [name for name in self._columns if name not in chosen]
        files = list(range(len(self.manifest)))
        if filters is not None and filters.is_bound_by(partitions.schema):
            files = partitions.files_of(filters.expression, partitions.schema) or files
        # Columns of files have the types that the first one gives them.
        ends = self._ends(files[:1])
        first = self._opened(files[0], ends[files[0]], columns, partitions)
        used, names, units = arrow.schema([]), [*first.schema.names, *chosen], list[_Unit]()
        schema: Any = None
        if filters is not None:
            known = arrow.schema([*first.metadata.schema.to_arrow_schema(), *partitions.schema])
            used = arrow.schema([known.field(name) for name in filters.columns(known, first.url, partitions.schema)])
            if partitions.schema.names:
                files = partitions.files_of(filters.expression, used) or files[:1]
        filtered = [name for name in used.names if name not in partitions.schema.names]
        for begin in range(0, len(files), _FOOTERS):
            indices = files[begin : begin + _FOOTERS]
            found = ends | self._ends([index for index in indices if index not in ends])
            for index in indices:
                file = self._opened(index, found[index], columns, partitions, filtered)
                schema = file.schema if schema is None else merged_schema(schema, file, self.manifest.url(files[0]))
                counts: list[int | None] = [group.rows for group in file.row_groups]
                if filters is not None:
                    counts = filters.rows_of(file, found[index], used, partitions.expressions[index])
                values = partitions.values(index)
                units += [
                    _Unit(file, index, number, rows, values)
                    for number, rows in enumerate(counts)
                    if rows != 0 or filters is None
                ]
        read = [field for field in partitions.schema if field.name in (*chosen, *used.names)]
        read = arrow.schema([*schema, *read], schema.metadata)
        rows = arrow.schema([read.field(name) for name in names], schema.metadata)
        self._footers = _Footers(rows, read, units)
        return self._footers

    def _partitions(self) -> HivePartitions:
        """The columns that the names of folders contain."""
        numbers = range(len(self.manifest))
        if self._partitioning is None:
            return no_partitions(len(numbers))
        files = [(self.manifest.url(number), self.manifest.entry(number)[1]) for number in numbers]
        return hive_partitions(files, None if self._partitioning == "hive" else self._partitioning)

    def _opened(
        self,
        index: int,
        end: memoryview,
        columns: list[str] | None,
        partitions: HivePartitions,
        filtered: Sequence[str] = (),
    ) -> ParquetFile:
        """The footer of a file, which is within its last bytes."""
        file = open_file(self.manifest.url(index), end, self._size(index), columns, filtered)
        named = partitions.schema.names
        both = [name for name in file.metadata.schema.to_arrow_schema().names if name in named] if named else []
        if both:
            raise ParquetError(
                f"{file.url}: has a column {both[0]!r}, as the names of its folders; pass as partitioning= a "
                "pyarrow.dataset.HivePartitioning without it"
            )
        return file

    def _ends(self, indices: Sequence[int]) -> dict[int, memoryview]:
        """The ends of files with their whole footers."""
        ends = self._read_ends(dict.fromkeys(indices, FOOTER_BYTES))
        missing = {
            index: missing_footer_bytes(end, self._size(index), self.manifest.url(index)) for index, end in ends.items()
        }
        return ends | self._read_ends({index: len(ends[index]) + count for index, count in missing.items() if count})

    def _size(self, index: int) -> int:
        return self.manifest.entry(index)[2] or 0

    def _read_ends(self, counts: Mapping[int, int]) -> dict[int, memoryview]:
        """The last bytes of files, by their indices as the numbers of bytes."""
        refs = [
            self._ref(index, max(0, self._size(index) - count), self._size(index)) for index, count in counts.items()
        ]
        readers = self._reader.read(refs)
        for reader in readers:
            if isinstance(reader, Exception):
                raise reader
        return dict(zip(counts, (memoryview(reader) for reader in readers), strict=True))

    def _ref(self, index: int, begin: int, end: int) -> ObjectRef:
        _, _, size, version = self.manifest.entry(index)
        return ObjectRef(self.manifest.url(index), start=begin, end=end, size=size, version=version)

    @override
    def _unit_bytes(self, unit: int) -> int | None:
        return None

    @override
    def _unit_url(self, unit: int) -> str:
        return self._row_groups[unit].file.url

    @override
    def _counts(self) -> Order | None:
        rows = [unit.rows for unit in self._row_groups]
        return None if None in rows else np.array(rows, dtype=np.int64)

    @override
    def _lengths(self, shards: Sequence[Shard], epoch: int) -> list[int]:
        lengths = super()._lengths(shards, epoch)
        return lengths if self._batch_rows is None else [-(-rows // self._batch_rows) for rows in lengths]

    @override
    def _shape(self, shard: Shard) -> dict[str, Any]:
        shape = super()._shape(shard) | {"columns": self._columns, "batch_rows": self._batch_rows}
        if self._filter is None:
            return shape
        # Places count the row groups that are read, and the rows that are kept.
        return shape | {"filters": self._filter.digest, "row_groups": self._units()}

    @override
    def _items(self, segments: list[Segment], number: int, begin: int | None) -> Iterator[StreamItem]:
        items = self._rows if self._batch_rows is None else self._batches
        return items(self._tables(segments), number)

    @override
    def _items_again(self, ids: list[SampleId]) -> Iterator[StreamItem]:
        units = sorted({each.unit for each in ids})
        tables = dict(zip(units, (table for _, table in self._tables([Segment(unit) for unit in units])), strict=True))
        for each in ids:
            table = tables[each.unit]
            value = table if isinstance(table, Exception) else self._samples(table, each.unit, each.sample, 1)[0]
            yield StreamItem(each, value, (0, None, 0))

    def _tables(self, segments: list[Segment]) -> Iterator[tuple[Segment, Any]]:
        """The decoded row groups of segments, or exceptions. Several are read ahead."""
        units = self._row_groups

        def groups(_: int) -> Iterator[Group[ObjectRef]]:
            for segment in segments:
                unit = units[segment.unit]
                ranges = unit.row_group.ranges
                refs = [self._ref(unit.file_index, begin, end) for begin, end in ranges]
                yield Group(refs, sum(end - begin for begin, end in ranges), segment)

        for group, found in read_ahead(self._reader, groups):
            segment, readers = group.content, list(found)
            unit = units[segment.unit]
            file, index, number, *_ = unit
            failed = next((reader for reader in readers if isinstance(reader, Exception)), None)
            try:
                table = failed or self._kept_rows(unit, read_row_group(file, number, readers, self._size(index)))
                yield segment, table
            except ParquetError as error:
                yield segment, error

    def _kept_rows(self, unit: _Unit, table: Any) -> Any:
        """The rows of a row group that the filters keep.

        They have the types of all files, unless a value does not fit them: its row fails, and no other.
        """
        arrow, (schema, read, _) = import_arrow(), self._read_footers()
        for field in read:
            if field.name in unit.partition:
                value = arrow.array([unit.partition[field.name]], field.type)[0]
                table = table.append_column(field, arrow.repeat(value, table.num_rows))
        try:
            table = with_schema(table, read)
        except arrow.ArrowException:
            table = table.select(read.names)
        if self._filter is not None:
            where = f"{unit.file.url}: row group {unit.number}"
            try:
                table = self._filter.kept(table)
            except arrow.ArrowException as error:
                raise ParquetError(f"{where}: filters={self._filter}: {error}") from error
            if unit.rows not in (None, table.num_rows):
                raise ParquetError(f"{where}: the filters keep {table.num_rows} rows, its statistics say {unit.rows}")
        return table.select(schema.names)

    def _rows(self, tables: Iterator[tuple[Segment, Any]], number: int) -> Iterator[StreamItem]:
        for at, (segment, table) in enumerate(tables, number):
            if isinstance(table, Exception):
                count = 1 if segment.end is None else segment.end - segment.first
                yield from self._failed(segment, count, at, table)
                continue
            end = table.num_rows if segment.end is None else segment.end
            for begin in range(segment.first, end, _ROWS):
                rows = self._samples(table, segment.unit, begin, min(_ROWS, end - begin))
                for row, value in enumerate(rows, begin):
                    yield StreamItem(SampleId(segment.unit, row), value, (at, row + 1, 0))

    def _samples(self, table: Any, unit: int, begin: int, count: int) -> list[TableRow | ParquetError]:
        """Rows of a row group, or the exceptions in their place. Missing floats are NaN."""
        schema = self.schema
        names, parts, where = schema.names, float_parts(schema), self._table_name(unit)
        columns, failed = list[list[Any]](), dict[int, ParquetError]()
        for column, field in zip(table.slice(begin, count).columns, schema, strict=True):
            values, errors = converted(column, functools.partial(_python_values, kind=field.type))
            columns.append(values)
            for at, error in errors.items():
                failed.setdefault(at, _failure(where, begin + at, field.name, error))
        return [
            failed[at] if at in failed else TableRow(with_nan(dict(zip(names, row, strict=True)), parts), where, number)
            for at, (number, row) in enumerate(enumerate(zip(*columns, strict=True), begin))
        ]

    def _table_name(self, unit: int) -> str:
        return f"{self._unit_url(unit)}: row group {self._row_groups[unit].number}"

    def _batches(self, tables: Iterator[tuple[Segment, Any]], number: int) -> Iterator[StreamItem]:
        assert self._batch_rows is not None  # noqa: S101  checked by the caller
        held: list[_Rows] = []
        rows, last = 0, SampleId(0, 0)
        for at, (segment, table) in enumerate(tables, number):
            begin = segment.first
            if isinstance(table, Exception):
                count = 1 if segment.end is None else max(1, (segment.end - begin) // self._batch_rows)
                yield from self._failed(segment, count, at, table)
                continue
            end = table.num_rows if segment.end is None else segment.end
            while begin < end:
                taken = min(self._batch_rows - rows, end - begin)
                held.append(_Rows(table.slice(begin, taken), segment.unit, begin))
                begin, rows, last = begin + taken, rows + taken, SampleId(segment.unit, begin)
                if rows == self._batch_rows:
                    yield self._batch(held, StreamItem(last, None, (at, begin, 0)))
                    held, rows = [], 0
        if held:
            yield self._batch(held, StreamItem(last, None, (at + 1, None, 0)))

    def _batch(self, held: list[_Rows], item: StreamItem) -> StreamItem:
        """The item with a batch of these rows, or with the exception in place of it, and its row."""
        schema, values = self.schema, dict[str, Any]()
        try:
            table = import_arrow().concat_tables([with_schema(each.table, schema) for each in held])
            if self._format == "arrow":
                return item._replace(value=table)
            for field in schema:
                values[field.name] = _column(table.column(field.name))
        except Exception as error:  # noqa: BLE001  of many types, see `converted`
            return self._failed_batch(held, item, error)
        return item._replace(value=values)

    def _failed_batch(self, held: list[_Rows], item: StreamItem, error: Exception) -> StreamItem:
        """The item with the exception of the first row that cannot be converted."""
        convert = _arrow_values if self._format == "arrow" else _tensor_values
        for each in held:
            rows: dict[int, tuple[str, Exception]] = {}
            for column, field in zip(each.table.columns, self.schema, strict=True):
                _, errors = converted(column, functools.partial(convert, kind=field.type))
                rows = {at: (field.name, failed) for at, failed in errors.items()} | rows
            if rows:
                at = min(rows)
                failure = _failure(self._table_name(each.unit), each.first + at, *rows[at])
                return item._replace(id=SampleId(each.unit, each.first + at), value=failure)
        # No single value, but all of them together.
        return item._replace(value=error)

    def _failed(self, segment: Segment, count: int, number: int, error: Exception) -> Iterator[StreamItem]:
        samples = range(segment.first, segment.first + count)
        return failed_items(self._unit_url(segment.unit), segment.unit, number, samples, error)


def _failure(where: str, row: int, column: str, error: Exception) -> ParquetError:
    """The exception for a value that cannot be converted."""
    failure = ParquetError(
        f"{unconverted(where, row, column, error)}; pass columns= without this one, or on_error=; batch_rows= with "
        'format="arrow" converts nothing to Python'
    )
    failure.__cause__ = error
    return failure


def _arrow_values(column: Any, kind: Any) -> Any:
    """A column with the type of all files."""
    return column if column.type == kind else column.cast(kind)


def _python_values(column: Any, kind: Any) -> list[Any]:
    values: list[Any] = _arrow_values(column, kind).to_pylist()
    return values


def _tensor_values(column: Any, kind: Any) -> Sequence[Any]:
    values: Sequence[Any] = _column(_arrow_values(column, kind))
    return values


def _column(column: Any) -> Any:
    """A column as tensors if it contains numbers, otherwise as a list. Depends on its type and not on its values."""
    pyarrow = import_arrow()
    kinds, kind = pyarrow.types, column.type
    is_list = kinds.is_list(kind) or kinds.is_large_list(kind)
    if not _has_shape(kind.value_type if is_list else kind):
        # Dictionaries of several row groups are not merged: their indices may have 8 bits.
        return column.to_pylist()
    column = pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], kind)
    if not is_list:
        return _tensor(column)
    return [None if each is None else _tensor(each) for each in (value.values for value in column)]


def _has_shape(kind: Any) -> bool:
    """Whether all values of a type are numbers, or tensors of numbers of one shape."""
    pyarrow = import_arrow()
    kinds = pyarrow.types
    if kinds.is_fixed_size_list(kind) or isinstance(kind, pyarrow.FixedShapeTensorType):
        return _has_shape(kind.value_type)
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind))


def _tensor(values: Any) -> torch.Tensor:
    """Numbers, or tensors of numbers of one shape, as a tensor. Missing floats are NaN."""
    pyarrow = import_arrow()
    kinds, kind = pyarrow.types, values.type
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        # In the order of memory, which a permutation changes.
        stored = _tensor(values.storage).reshape(len(values), *kind.shape)
        return stored.permute(0, *(number + 1 for number in kind.permutation or range(len(kind.shape))))
    if kinds.is_fixed_size_list(kind):
        if values.null_count:
            raise ValueError("a list is missing; a tensor cannot contain it")
        parts = _tensor(values.flatten())
        return parts.reshape(len(values), kind.list_size, *parts.shape[1:])
    if values.null_count and not kinds.is_floating(kind):
        raise ValueError("a value is missing; a tensor cannot contain it")
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
