"""`TableDataset`: rows of a table with the objects that their URLs name."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from torchobj._torchobj import Buffer, ObjectReader, ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check, check_callable
from torchobj.datasets.csv_table import CsvFormat, csv_format, csv_table
from torchobj.datasets.failures import OnError
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.samples import Sample_co
from torchobj.exceptions import ConfigError, InvalidKeyError, ObjectNotFoundError, ParquetError
from torchobj.manifest.manifest import url_of_file
from torchobj.parquet.arrow import import_arrow
from torchobj.parquet.row_groups import EncryptedError, missing_footer_bytes, open_file, read_row_group
from torchobj.parquet.rows import TableRow, converted, float_parts, unconverted, with_nan
from torchobj.shards.shard_urls import note_prefix
from torchobj.store.reads import get_many
from torchobj.urls import ALIASES, CLOUD_SCHEMES, SCHEMES, parse_url, shown_url
from torchobj.workers.shared_table import SharedTable

__all__ = ["TableDataset"]


#: Starts of Parquet files. The footer of the second is encrypted.
_PARQUET = (b"PAR1", b"PARE")


class TableDataset(ObjectDataset[Sample_co]):
    r"""A map-style dataset of the rows of a table, with the objects that their URLs name: images with labels in a CSV.

    A sample is the row as a dict by column, with an `ObjectReader` in place of each URL. Missing floats are NaN, other
    missing values None; the default collation refuses these, and types such as dates, with their column and row. The
    objects may be in any buckets, and an object may be in several rows; a table in a bucket must not name files of this
    machine. The table stays in the memory of Arrow, which workers share. Needs pyarrow.

    Args:
        table: The path or URL of a CSV or Parquet file, which is read here; a `pandas.DataFrame`, a `pyarrow.Table`, a
            `datasets.Dataset`, or a table of another library that Arrow imports, such as a `polars.DataFrame`. A CSV
            has a line of column names and is separated by commas; pyarrow infers the types.
            A column whose numbers would lose digits stays text, as with pandas, or becomes `uint64`; `0001` is the
            number 1, which is logged. The index of pandas, which its Parquet files contain, is no column.
        url_columns: Name of the column of URLs, or names of several.
        base_url: URL of the folder to which URLs without a scheme are relative, such as `s3://bucket/images/`.
        columns: Names of the columns of a sample, in their order; those of URLs are added. None: all
            but those of the index of pandas.
        transform: Converts the dict to a sample. None: the sample is the dict.
        encoding: Encoding of a CSV, such as `latin-1`. None: UTF-8.
        column_types: Types of columns of a CSV by their names, such as `{"id": str}`: of Python or pyarrow, or the name
            of one of pyarrow. Those of other columns are inferred.
        config: Settings of the store.
        on_error: Action for a sample that cannot be read or transformed: as for `ObjectDataset`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid; or a URL is missing or malformed: the message names its row and column.
            Rows are counted from 0, as samples are.
        StoreError: The table cannot be read.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://labelled")
        >>> for name in ("a.txt", "b.txt", "c.txt"):
        ...     _ = store.put(f"texts/{name}", name.encode())
        >>> _ = store.put("labels.csv", b"text,label\nc.txt,1\na.txt,0\n")
        >>> dataset = torchobj.TableDataset(
        ...     "memory://labelled/labels.csv",
        ...     "text",
        ...     base_url="memory://labelled/texts/",
        ...     transform=lambda row: (torchobj.decode.text(row["text"]), row["label"]),
        ... )
        >>> dataset[0], len(dataset)
        (('c.txt', 1), 2)
    """

    def __init__(
        self,
        table: Any,
        url_columns: str | Sequence[str],
        base_url: str | None = None,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Sample_co] | None = None,
        *,
        encoding: str | None = None,
        column_types: Mapping[str, Any] | None = None,
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self.url_columns = _names("url_columns", [url_columns] if isinstance(url_columns, str) else url_columns)
        check("url_columns", url_columns, "the name of a column, or a list of names", ok=bool(self.url_columns))
        check_callable("transform", transform)
        if base_url is not None:
            parse_url(base_url)
        self._base = None if base_url is None else f"{base_url.removesuffix('/')}/"
        super().__init__(config=config, on_error=on_error)
        self.transform = transform
        named = None if columns is None else [*_names("columns", columns), *self.url_columns]
        found, self._name, self._schemes = _read(table, config, named, csv_format(encoding, column_types))
        chosen = _chosen(found, self.url_columns, named, self._name)
        for name in self.url_columns:
            self._check_urls(chosen, name)
        self._table = SharedTable(chosen)
        self._floats = float_parts(chosen.schema)
        self._classes = _class_names(table, chosen)

    def __repr__(self) -> str:
        on_error = self._torchobj.failures.on_error
        return f"<{type(self).__name__} of {self._name}, {len(self)} rows, on_error={on_error!r}>"

    def __len__(self) -> int:
        return len(self._table)

    @property
    def table(self) -> Any:
        """The `pyarrow.Table` of the columns of a sample, with the URLs as they are in the table. Shares its memory."""
        return self._table.table

    def column(self, name: str) -> list[Any]:
        """The values of a column as Python objects, in the order of the samples: labels, for the weights of a sampler.

        Args:
            name: Name of the column.

        Raises:
            ConfigError: The samples have no such column; or Python cannot represent one of its values, such as a date
                after the year 9999.
        """
        values = self._values(name, 0, len(self))
        return [with_nan(value, self._floats[name]) for value in values] if name in self._floats else values

    def class_to_idx(self, name: str) -> dict[Any, int]:
        """A number for each value of a column, from 0 in sorted order, as `ImageFolder` numbers its classes.

        The categories of pandas and the class labels of `datasets` keep their own numbers. Missing values have none.

        Args:
            name: Name of the column.

        Raises:
            ConfigError: The samples have no such column, or its values have no order.
        """
        column = self._arrow_column(name)
        if name in self._classes:
            return {value: number for number, value in enumerate(self._classes[name])}
        try:
            values = sorted(value for value in column.unique().to_pylist() if value is not None)
            return {value: number for number, value in enumerate(values)}
        except (TypeError, ValueError, OverflowError, import_arrow().ArrowException) as error:
            raise ConfigError(f"{self._name}: the values of column {name!r} are no classes: {error}") from error

    def _arrow_column(self, name: str) -> Any:
        if name not in self.table.column_names:
            raise ConfigError(f"{self._name}: no column {name!r}; its columns are {', '.join(self.table.column_names)}")
        return self.table.column(name)

    def _values(self, name: str, first: int, count: int) -> list[Any]:
        """The values of rows as Python objects."""
        values, failed = converted(self._arrow_column(name).slice(first, count), lambda column: column.to_pylist())
        for row, error in failed.items():
            raise ConfigError(
                f"{unconverted(self._name, first + row, name, error)}; pass columns= without this one"
            ) from error
        return values

    @override
    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        return [ObjectRef(self._url(self._table.value(name, index))) for name in self.url_columns]

    @override
    def build(self, index: int, readers: Sequence[ObjectReader]) -> Any:
        try:
            values = self._table.row(index)
        except Exception:  # noqa: BLE001  of many types, see `converted`: again, for one that names the column
            values = {name: self._values(name, index, 1)[0] for name in self.table.column_names}
        objects = dict(zip(self.url_columns, readers, strict=True))
        row = TableRow(with_nan(values, self._floats) | objects, self._name, index)
        return row if self.transform is None else self.transform(row)

    def _url(self, value: str) -> str:
        return value if "://" in value or self._base is None else self._base + value

    def _check_urls(self, table: Any, name: str) -> None:
        """Checks the URLs of a column. Only those that are not plain become Python objects."""
        arrow, compute = import_arrow(), import_arrow("pyarrow.compute")
        values = table.column(name)
        try:
            values.validate(full=True)
        except arrow.ArrowException:
            for row, error in converted(values, lambda part: part.to_pylist())[1].items():
                raise ConfigError(f"{unconverted(self._name, row, name, error)}; a URL is text in UTF-8") from error
            raise
        is_plain = compute.match_substring_regex(values, _plain_url(self._schemes))
        if self._base is not None:
            is_relative = compute.invert(compute.match_substring(values, "://"))
            is_plain = compute.or_(is_plain, compute.and_(is_relative, compute.not_equal(values, "")))
        other = compute.indices_nonzero(compute.invert(compute.fill_null(is_plain, False)))  # noqa: FBT003
        for row in other.to_pylist():
            self._check_url(values[row].as_py(), row, name)

    def _check_url(self, value: str | None, row: int, name: str) -> None:
        where = f"{self._name}: row {row}, column {name!r}: "
        if not value:
            raise ConfigError(f"{where}the URL is {'null' if value is None else 'empty'}; every row must have one")
        if "://" not in value:
            raise ConfigError(f"{where}{value!r} is not a URL such as s3://bucket/key; for relative URLs pass base_url")
        try:
            parse_url(value)
            ObjectRef(value)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None
        if parse_url(value).scheme not in self._schemes:
            raise ConfigError(
                f"{where}a table in a bucket must not name objects of this machine, but has {value!r}; if you trust "
                "it, download the table and pass its local path"
            )


def _plain_url(schemes: tuple[str, ...]) -> str:
    """A pattern of URLs that need no further check: with a scheme, a bucket unless it is a file, and a key."""
    others = "|".join(alias for alias, scheme in {**ALIASES, **dict(zip(SCHEMES, SCHEMES, strict=True))}.items()
                      if scheme in schemes and scheme != "file")  # fmt: skip
    return rf"^(?:(?:{others})://[^/@\x00-\x1f\x7f]+{'|file://' if 'file' in schemes else ''})/[^\x00-\x1f\x7f]+$"


def _names(argument: str, names: Any) -> list[str]:
    is_list = not isinstance(names, (str, Mapping)) and isinstance(names, Sequence)
    is_names = is_list and all(isinstance(name, str) for name in names)
    check(argument, names, "the name of a column, or a list of names; names are strings", ok=is_names)
    return list(names)


def _index_columns(table: Any) -> set[str]:
    """The columns that were the index of a DataFrame, from the metadata that pandas and pyarrow add."""
    try:
        described = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
        # An index of consecutive numbers is not a column, and is described by a dict.
        return {each for each in described["index_columns"] if isinstance(each, str)}
    except (ValueError, TypeError, LookupError):
        return set()


def _chosen(table: Any, url_columns: list[str], columns: list[str] | None, name: str) -> Any:
    """The columns of a sample, with URLs as strings."""
    arrow = import_arrow()
    # A list that Arrow builds anew at each access, as the schema.
    names: list[str] = table.column_names
    if columns is None:
        left_out = _index_columns(table) - set(url_columns)
        wanted = [each for each in names if each not in left_out]
    else:
        wanted = list(dict.fromkeys(columns))
    counts = Counter(names)
    for column in (*wanted, *url_columns):
        if counts[column] != 1:
            problem = "no column" if counts[column] == 0 else f"{counts[column]} columns"
            message = f"{name}: {problem} {column!r}; its columns are {', '.join(names)}"
            if counts[column] > 1:
                message += ". Rename one of them, or pass columns= without them: a sample is a dict"
            if len(names) == 1 and re.search("[\t;]", names[0]):
                message += ". Values separated by tabs or semicolons: read them with pandas.read_csv(sep=...) and pass "
                message += "the DataFrame"
            raise ConfigError(message)
    chosen = table.select(wanted)
    for column in url_columns:
        kind = chosen.column(column).type
        values = kind.value_type if arrow.types.is_dictionary(kind) else kind
        is_text = arrow.types.is_string(values) or arrow.types.is_large_string(values)
        if not is_text and not (hasattr(arrow.types, "is_string_view") and arrow.types.is_string_view(values)):
            # A column of nulls only has no type of its own, and its first row is named in the message.
            if not arrow.types.is_null(values):
                raise ConfigError(f"{name}: column {column!r} is of type {kind}: URLs must be strings")
            values = arrow.string()
        if not (kind == arrow.string() or kind == arrow.large_string()):
            texts = chosen.column(column).cast(arrow.large_string() if values != arrow.string() else arrow.string())
            chosen = chosen.set_column(wanted.index(column), column, texts)
    return chosen


def _class_names(table: Any, chosen: Any) -> dict[str, list[Any]]:
    """The classes of columns that number them: categories of a DataFrame, and class labels of `datasets`."""
    pandas, hugging_face = sys.modules.get("pandas"), sys.modules.get("datasets")
    names: dict[str, list[Any]] = {}
    for column in chosen.column_names:
        if pandas is not None and isinstance(table, pandas.DataFrame):
            kind = table[column].dtype
            if isinstance(kind, pandas.CategoricalDtype):
                names[column] = kind.categories.tolist()
        elif hugging_face is not None and isinstance(table, hugging_face.Dataset):
            feature = table.features[column]
            if isinstance(feature, hugging_face.ClassLabel):
                names[column] = list(feature.names)
    return names


def _of_frame(frame: Any, columns: list[str] | None) -> Any:
    """These columns of a `pandas.DataFrame` as an Arrow table, or all if one of them does not exist."""
    arrow = import_arrow()
    names = list(frame.columns)
    other = next((name for name in names if not isinstance(name, str)), None)
    if other is not None:
        raise ConfigError(
            f"the DataFrame: the name of a column is {other!r}: must be a string; pass frame.rename(columns=str), and "
            "the names as strings"
        )
    if columns is not None and set(columns) <= set(names):
        names = columns
    twice = next((name for name, count in Counter(frame.columns).items() if count > 1 and name in names), None)
    if twice is not None:
        raise ConfigError(f"the DataFrame: {list(frame.columns).count(twice)} columns {twice!r}")
    converted = {}
    for name in names:
        try:
            converted[name] = arrow.Array.from_pandas(frame[name])
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"the DataFrame: column {name!r} has values of different types, or of one that Arrow does not have: "
                f"{reason}; convert it, for example with frame[{name!r}].astype(str), or leave it out of columns="
            ) from error
    return arrow.table(converted)


def _read(
    table: Any, config: StoreConfig | None, columns: list[str] | None, csv: CsvFormat
) -> tuple[Any, str, tuple[str, ...]]:
    """A table as an Arrow table, its name in messages, and the schemes of its URLs. Others than `columns` may lack."""
    arrow = import_arrow()
    if not isinstance(table, (str, os.PathLike)) and not csv.is_default:
        raise ConfigError("encoding and column_types are for a CSV: convert the columns of another table before")
    if isinstance(table, arrow.Table):
        return table, "the table", SCHEMES
    if isinstance(table, (str, os.PathLike)):
        url = url_of_file(table)
        try:
            [data] = get_many([url], config=config)
        except (ObjectNotFoundError, InvalidKeyError) as error:
            note_prefix(error, url, config, "a table is one file; pass one of them, or a pyarrow.Table of all")
            raise
        # As for manifests: a file in a bucket is not trusted to name files of this machine.
        is_local = parse_url(url).scheme not in CLOUD_SCHEMES
        return _read_table(data, url, csv), shown_url(url), SCHEMES if is_local else CLOUD_SCHEMES
    # Without importing what the caller has not imported.
    pandas, hugging_face = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(table, pandas.DataFrame):
        return _of_frame(table, columns), "the DataFrame", SCHEMES
    if hugging_face is not None and isinstance(table, hugging_face.Dataset):
        # All rows in the order of the dataset, which may have been shuffled or filtered.
        rows = table.with_format("arrow")[:]
        return rows.replace_schema_metadata(None), "the datasets.Dataset", SCHEMES
    # The interface by which libraries such as polars pass tables on.
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        name = f"the {type(table).__name__}"
        try:
            return arrow.table(table), name, SCHEMES
        except (arrow.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(f"{name}: it is no table that Arrow can import: {error}") from error
    raise ConfigError(
        f"table={type(table)}: must be the path or URL of a CSV or Parquet file, a pandas.DataFrame, a pyarrow.Table, "
        "a datasets.Dataset, or a table with __arrow_c_stream__, such as a polars.DataFrame"
    )


def _read_table(data: Buffer, url: str, csv: CsvFormat) -> Any:
    """The table in a file.

    Args:
        data: The bytes of the file.
        url: Its URL.
        csv: How it is read if it is a CSV.

    Raises:
        ConfigError: It is neither a CSV nor a Parquet file, or does not fit the format.
    """
    arrow = import_arrow()
    start = bytes(memoryview(data)[:8])
    is_parquet = start.startswith(_PARQUET)
    if not is_parquet and re.search(r"\.(parquet|pq)$", url, re.IGNORECASE):
        raise ConfigError(f"{shown_url(url)}: not a Parquet file: it does not start with {_PARQUET[0]!r}")
    if is_parquet and not csv.is_default:
        raise ConfigError(f"{shown_url(url)}: encoding and column_types are for a CSV; this is a Parquet file")
    try:
        return _parquet_table(data, url) if is_parquet else csv_table(data, start, url, csv)
    except EncryptedError as error:
        raise ConfigError(str(error)) from error
    except (arrow.ArrowException, OSError, ParquetError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{shown_url(url)}: not a CSV or Parquet file, or damaged: {reason}") from error


def _parquet_table(data: Buffer, url: str) -> Any:
    """The table in a Parquet file, whose row groups are bounded as those of `ParquetIterableDataset`."""
    view = memoryview(data)
    if missing_footer_bytes(view, len(view), shown_url(url)):
        raise ParquetError("its footer is longer than the file")
    file = open_file(shown_url(url), view, len(view), None)
    groups = [
        read_row_group(file, number, [view[begin:end] for begin, end in group.ranges], len(view))
        for number, group in enumerate(file.row_groups)
    ]
    return import_arrow().concat_tables([file.schema.empty_table(), *groups])
