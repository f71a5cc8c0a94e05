"""Reads the Arrow table in the bytes of a CSV or Parquet file. Reads no object."""

import codecs
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torchobj._torchobj import Buffer
from torchobj.config.checks import check
from torchobj.datasets.parquet_files import missing_footer_bytes, open_file, read_row_group
from torchobj.datasets.shared_table import import_arrow
from torchobj.exceptions import ConfigError, ParquetError
from torchobj.urls import shown_url

#: Start and end of every Parquet file.
_PARQUET = b"PAR1"

#: What files of other formats start with.
_OTHER_FORMATS = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK\x03\x04": "a zip archive, as those of Excel",
}

#: Python types of columns, by their names in Arrow.
_TYPES = {str: "string", int: "int64", float: "float64", bool: "bool", bytes: "binary"}


class CsvFormat(NamedTuple):
    """How a CSV is read."""

    encoding: str | None = None
    column_types: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_default(self) -> bool:
        """Whether everything is inferred."""
        return self.encoding is None and not self.column_types


def csv_format(encoding: str | None, column_types: Mapping[str, Any] | None) -> CsvFormat:
    """The format of a CSV, from the arguments of a dataset.

    Args:
        encoding: Its encoding. None: UTF-8.
        column_types: Types by the names of columns.

    Raises:
        ConfigError: They are no encoding or types.
    """
    try:
        is_encoding = encoding is None or bool(codecs.lookup(encoding))
    except (LookupError, TypeError):
        is_encoding = False
    check("encoding", encoding, "the name of an encoding of Python, such as 'latin-1'", ok=is_encoding)
    check("column_types", column_types, "types by the names of columns",
          ok=column_types is None or isinstance(column_types, Mapping))  # fmt: skip
    return CsvFormat(encoding, {name: _arrow_type(kind) for name, kind in (column_types or {}).items()})


def _arrow_type(kind: Any) -> Any:
    arrow = import_arrow()
    try:
        name = _TYPES.get(kind, kind)
        return arrow.type_for_alias(name) if isinstance(name, str) else arrow.field("", name).type
    except (ValueError, TypeError):
        raise ConfigError(f"column_types: {kind!r} is no type of Python or pyarrow, such as str or 'int32'") from None


def read_table(data: Buffer, url: str, csv: CsvFormat) -> Any:
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
    is_parquet = start[:4] == _PARQUET
    if not is_parquet and re.search(r"\.(parquet|pq)$", url, re.IGNORECASE):
        raise ConfigError(f"{shown_url(url)}: not a Parquet file: it does not start with {_PARQUET!r}")
    if is_parquet and not csv.is_default:
        raise ConfigError(f"{shown_url(url)}: encoding and column_types are for a CSV; this is a Parquet file")
    try:
        return _parquet_table(data, url) if is_parquet else _csv_table(data, start, url, csv)
    except (arrow.ArrowException, OSError, ParquetError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{shown_url(url)}: not a CSV or Parquet file, or damaged: {reason}") from error


def _csv_table(data: Buffer, start: bytes, url: str, csv: CsvFormat) -> Any:
    arrow, reader = import_arrow(), import_arrow("pyarrow.csv")
    other = next((name for magic, name in _OTHER_FORMATS.items() if start.startswith(magic)), None)
    if other is not None:
        raise ConfigError(f"{shown_url(url)}: {other}: must be a CSV or Parquet file; read it with pandas and pass the "
                          "DataFrame")  # fmt: skip
    # Text of UTF-16 begins with its mark, or with a letter of two bytes.
    if csv.encoding is None and (start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:2]):
        raise ConfigError(f"{shown_url(url)}: its encoding is UTF-16: pass encoding='utf-16'")
    try:
        table = reader.read_csv(
            arrow.BufferReader(arrow.py_buffer(data)),
            reader.ReadOptions(encoding=csv.encoding or "utf8"),
            reader.ParseOptions(newlines_in_values=True),
            reader.ConvertOptions(column_types=csv.column_types),
        )
        names = table.column_names
    except (UnicodeError, arrow.ArrowInvalid) as error:
        if not isinstance(error, UnicodeError) and "UTF8" not in str(error):
            raise
        raise ConfigError(f"{shown_url(url)}: {_not_text(csv.encoding)}") from error
    absent = [name for name in csv.column_types if name not in names]
    if absent:
        raise ConfigError(
            f"column_types: {shown_url(url)} has no column {absent[0]!r}; its columns are {', '.join(names)}"
        )
    for field in table.schema:
        if arrow.types.is_binary(field.type) and field.name not in csv.column_types:
            raise ConfigError(f"{shown_url(url)}: column {field.name!r}: {_not_text(csv.encoding)}")
    return table


def _not_text(encoding: str | None) -> str:
    return f"it is not text in {encoding or 'UTF-8'}; pass encoding=, such as 'latin-1' or 'cp1252'"


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
