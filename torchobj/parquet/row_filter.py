"""Filters of rows: pyarrow's expressions, the columns that they use, and what statistics say of row groups. Reads no
object.

pyarrow evaluates them, and decides which row groups cannot have a row that they keep.
"""

import bisect
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from torchobj.exceptions import ConfigError, ParquetError
from torchobj.parquet.arrow import import_arrow
from torchobj.parquet.pages import has_sound_statistics
from torchobj.parquet.row_groups import FOOTER_LIMITS, ParquetFile


class RowFilter:
    """An expression of pyarrow that is true for the rows to keep.

    Args:
        filters: A `pyarrow.dataset.Expression`, or a list as for `pyarrow.parquet.read_table`.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(self, filters: Any) -> None:
        try:
            self.expression = import_arrow("pyarrow.parquet").filters_to_expression(_in_one_order(filters))
        except (TypeError, ValueError, import_arrow().ArrowException) as error:
            raise ConfigError(
                f"filters={filters!r}: must be an expression of pyarrow, such as pyarrow.dataset.field('id') > 3, or "
                f"a list such as [('id', '>', 3)]: {error}"
            ) from error
        try:
            serialized = pickle.dumps(self.expression, protocol=5)
        except import_arrow().ArrowNotImplementedError as error:
            reason = "names a column by its position; use its name"
            raise ConfigError(f"filters={self}: cannot be sent to workers, or {reason}: {error}") from error
        #: Identifies the expression, with all values of long lists, of which its text has only some.
        self.digest = hashlib.sha256(serialized).hexdigest()

    def __str__(self) -> str:
        return str(self.expression)

    def is_bound_by(self, schema: Any) -> bool:
        """Whether it can be evaluated for a table with this `pyarrow.Schema`."""
        try:
            self._bind(schema)
        except import_arrow().ArrowException:
            return False
        return True

    def _bind(self, schema: Any) -> None:
        # Not its empty_table, which some types do not have.
        self.kept(import_arrow().Table.from_batches([], schema))

    def columns(self, schema: Any, url: str, folders: Any) -> list[str]:
        """Names of the columns that it uses. pyarrow does not tell them: without one, the expression is not bound.

        Args:
            schema: The `pyarrow.Schema` of all columns.
            url: URL of the file, for messages.
            folders: The `pyarrow.Schema` of those that the names of folders contain, for messages.

        Raises:
            ConfigError: It cannot be evaluated with these columns.
        """
        try:
            self._bind(schema)
        except import_arrow().ArrowException as error:
            reason = str(error).partition("\n")[0]
            columns = f"its columns are {', '.join(schema.names)}"
            if typed := [f"{field.name} ({field.type})" for field in folders if field.name in str(self)]:
                columns += (
                    f"; the names of folders give {', '.join(typed)}: compare with values of this type, such as 1 for "
                    "int32, or pass a pyarrow.dataset.HivePartitioning with another one as partitioning="
                )
            raise ConfigError(f"filters={self}: {url}: {reason}; {columns}") from error
        fields, found = list(schema), list[Any]()
        arrow = import_arrow()
        while not self.is_bound_by(arrow.schema(found)):
            begin = [*found]
            count = bisect.bisect_left(
                range(len(fields)), x=True, key=lambda end: self.is_bound_by(arrow.schema([*begin, *fields[:end]]))
            )
            # Fewer fields are left in each step: all that are needed precede this one.
            found.append(fields[count - 1])
            fields = fields[: count - 1]
        return [field.name for field in found]

    def kept(self, table: Any) -> Any:
        """The rows of a `pyarrow.Table` for which it is true, in their order.

        Raises:
            pyarrow.ArrowException: It cannot be evaluated.
        """
        acero = import_arrow("pyarrow.acero")
        rows = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
        filtered = acero.Declaration("filter", acero.FilterNodeOptions(self.expression), [rows])
        return filtered.to_table(use_threads=False)

    def rows_of(self, file: ParquetFile, footer: Any, schema: Any, partition: Any) -> list[int | None]:
        """Number of rows of each row group of a file that it keeps, by their statistics; None if these do not tell.

        Args:
            file: The file.
            footer: The end of it, with the whole footer.
            schema: The `pyarrow.Schema` of the columns that it uses.
            partition: The expression that is true for all rows of the file, by the names of its folders.

        Raises:
            ParquetError: The statistics cannot be read.
        """
        rows = [group.rows for group in file.row_groups]
        if not has_sound_statistics(memoryview(footer), _levels(file, schema.names)):
            return [count and None for count in rows]
        arrow, dataset = import_arrow(), import_arrow("pyarrow.dataset")
        options = dataset.ParquetFragmentScanOptions(**FOOTER_LIMITS)
        parquet = dataset.ParquetFileFormat(default_fragment_scan_options=options)
        try:
            found = parquet.make_fragment(arrow.py_buffer(footer), partition_expression=partition)
            some = {group.id for group in found.subset(filter=self.expression, schema=schema).row_groups}
            others = set(some)
            # Statistics leave NaN out, which no comparison keeps.
            if all(_is_ordered(field.type) for field in schema):
                dropped = ~self.expression | self.expression.is_null()
                others = {group.id for group in found.subset(filter=dropped, schema=schema).row_groups}
        except (OSError, arrow.ArrowException) as error:
            raise ParquetError(f"{file.url}: the statistics of its row groups cannot be read: {error}") from error
        # A row group without rows has no statistics.
        unknown = some & others
        return [None if count and at in unknown else count * (at in some) for at, count in enumerate(rows)]


def _in_one_order(filters: Any) -> Any:
    """The same filters, whose sets are lists with the same order in each process."""
    if isinstance(filters, (set, frozenset)):
        return sorted(filters, key=repr)
    return type(filters)(map(_in_one_order, filters)) if type(filters) in (list, tuple) else filters


def _levels(file: ParquetFile, names: Sequence[str]) -> dict[int, tuple[int, int]]:
    """The maximum levels of repetition and definition of the leaves of columns, by the numbers of these."""
    tops = tuple(f"{name}." for name in names)
    numbers = [leaf.number for leaf in file.leaves if f"{leaf.path}.".startswith(tops)]
    kinds = map(file.metadata.schema.column, numbers)
    levels = [(kind.max_repetition_level, kind.max_definition_level) for kind in kinds]
    return dict(zip(numbers, levels, strict=True))


def _is_ordered(kind: Any) -> bool:
    """Whether each value of a type is within the minimum and maximum of statistics."""
    kinds = import_arrow().types
    return not (kinds.is_floating(kind) or kinds.is_nested(kind) or kinds.is_dictionary(kind))
