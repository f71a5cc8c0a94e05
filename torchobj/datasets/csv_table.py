"""Reads CSV files as Arrow tables. Types are inferred, but no column loses digits."""

import codecs
import collections
import contextlib
import decimal
import logging
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torchobj._torchobj import Buffer
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError
from torchobj.parquet.arrow import import_arrow
from torchobj.urls import shown_url

logger = logging.getLogger("torchobj")

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


#: Bytes that pyarrow parses at a time, in parallel. A row must not be longer.
_BLOCK_BYTES = 1 << 20

#: The largest block that pyarrow accepts, and how many bytes in UTF-8 one byte in another encoding becomes at most.
_MAX_BLOCK_BYTES, _MAX_UTF8_RATIO = (1 << 31) - 1, 3


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


def csv_table(data: Buffer, start: bytes, url: str, csv: CsvFormat) -> Any:
    """The table in a CSV.

    Args:
        data: The bytes of the file.
        start: The first of them.
        url: Its URL.
        csv: How it is read.

    Raises:
        ConfigError: It is not a CSV, or does not fit the format.
        pyarrow.ArrowException: It is damaged.
    """
    arrow = import_arrow()
    other = next((name for magic, name in _OTHER_FORMATS.items() if start.startswith(magic)), None)
    if other is not None:
        raise ConfigError(f"{shown_url(url)}: {other}: must be a CSV or Parquet file; read it with pandas and pass the "
                          "DataFrame")  # fmt: skip
    # Text of UTF-16 begins with its mark, or with a letter of two bytes.
    if csv.encoding is None and (start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start[:2]):
        raise ConfigError(f"{shown_url(url)}: its encoding is UTF-16: pass encoding='utf-16'")
    try:
        table = _parsed(data, csv, column_types=csv.column_types)
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
    return _without_loss(table, data, shown_url(url), csv)


def _parsed(data: Buffer, csv: CsvFormat, **options: Any) -> Any:
    arrow, reader = import_arrow(), import_arrow("pyarrow.csv")
    size = memoryview(data).nbytes * (1 if csv.encoding is None else _MAX_UTF8_RATIO)

    def parse(block_bytes: int) -> Any:
        return reader.read_csv(
            arrow.BufferReader(arrow.py_buffer(data)),
            reader.ReadOptions(encoding=csv.encoding or "utf8", block_size=block_bytes),
            reader.ParseOptions(newlines_in_values=True),
            reader.ConvertOptions(**options),
        )

    try:
        return parse(_BLOCK_BYTES)
    except arrow.ArrowInvalid:
        if size <= _BLOCK_BYTES:
            raise
    # A row may be longer than a block.
    return parse(min(size, _MAX_BLOCK_BYTES))


def _not_text(encoding: str | None) -> str:
    return f"it is not text in {encoding or 'UTF-8'}; pass encoding=, such as 'latin-1' or 'cp1252'"


def _without_loss(table: Any, data: Buffer, name: str, csv: CsvFormat) -> Any:
    """The table, with other types for columns whose inferred one does not distinguish all values, as in pandas."""
    arrow = import_arrow()
    # Lists of the names are made once: there may be thousands.
    uses = collections.Counter(table.column_names)
    inferred = {
        field.name: field.type
        for field in table.schema
        if field.type in (arrow.int64(), arrow.float64(), arrow.bool_())
        and field.name not in csv.column_types
        and uses[field.name] == 1
    }
    # Numbers that begin with 0 are rare, and a column of plain ones loses nothing.
    if not _ZERO.search(data):
        inferred = {column: kind for column, kind in inferred.items() if kind != arrow.int64()}
    if not inferred:
        return table
    options = {"include_columns": list(inferred), "column_types": dict.fromkeys(inferred, arrow.string())}
    texts, compute = _parsed(data, csv, strings_can_be_null=True, **options), import_arrow("pyarrow.compute")
    numbers = {column: number for number, column in enumerate(table.column_names)}
    for (column, kind), text in zip(inferred.items(), texts.columns, strict=True):
        # Spaces around numbers are ignored.
        values = compute.utf8_trim_whitespace(text)
        if kind == arrow.int64():
            kept = _of_integers(values, f"{name}: column {column!r}")
        elif kind == arrow.bool_():
            # Beside true and false, pyarrow reads 1 and 0 as the same.
            kept = values if {"0", "1"} & set(values.unique().to_pylist()) else None
        else:
            kept = _of_floats(values, table.column(numbers[column]), f"{name}: column {column!r}")
        if kept is not None:
            table = table.set_column(numbers[column], column, kept)
    return table


#: A number that begins with 0, in the bytes of a CSV in any encoding.
_ZERO = re.compile(rb"(?<![\d.])0\0*[\dxX]")

#: 16 digits, of which a float may not distinguish all.
_LONG = r"\d(\.?\d){15}"


def _of_integers(texts: Any, where: str) -> Any:
    """The texts of a column that was inferred as integers if it must stay text; otherwise None."""
    compute = import_arrow("pyarrow.compute")
    if _any(compute.match_substring_regex(texts, "^[+-]?0[xX]")):
        return texts
    if (padded := _first(texts, r"^[+-]?0\d")) is not None:
        logger.warning("%s: %r is read as a number, without its zeros; to keep these, pass column_types= with str",
                       where, padded)  # fmt: skip
    return None


def _of_floats(texts: Any, floats: Any, where: str) -> Any:
    """What to replace a column by that was inferred as floats: integers, its texts, or nothing."""
    arrow, compute = import_arrow(), import_arrow("pyarrow.compute")
    if _any(compute.invert(compute.match_substring_regex(texts, r"^[+-]?\d+$"))):
        lost = _first_lost(texts, floats)
        if lost is None:
            return None
    else:
        for kind in (arrow.int64(), arrow.uint64()):
            with contextlib.suppress(arrow.ArrowInvalid):
                return compute.replace_substring_regex(texts, r"^\+", "").cast(kind)
        lost = _first(texts, r"\d{19}")
    logger.warning(
        "%s: stays text, because %r would lose digits as a float64; pass column_types= with float, or with str to "
        "silence this",
        where,
        lost,
    )
    return texts


def _first_lost(texts: Any, floats: Any) -> str | None:
    """A number that a float does not represent: a whole one of more digits, or one of several that become the same."""
    compute = import_arrow("pyarrow.compute")
    is_long = compute.match_substring_regex(texts, _LONG)
    is_infinite = compute.and_(compute.is_inf(floats), compute.match_substring_regex(texts, r"\d"))
    is_whole = compute.and_(is_long, compute.match_substring_regex(texts, r"^[+-]?\d+(\.0*)?$"))
    for text in map(str, texts.filter(compute.or_(is_infinite, is_whole))):
        if decimal.Decimal(text) not in (decimal.Decimal(float(text)), decimal.Decimal(repr(float(text)))):
            return text
    # Measurements have as many digits, but not several of the same float.
    is_other = compute.and_(is_long, compute.not_equal(floats, 0.0))
    long = texts.filter(is_other).unique()
    if len(long) == len(floats.filter(is_other).unique()):
        return None
    known: dict[float, decimal.Decimal] = {}
    for text in map(str, long):
        number = decimal.Decimal(text)
        digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
        if len(digits) > sys.float_info.dig and known.setdefault(float(text), number) != number:
            return text
    return None


def _any(mask: Any) -> bool:
    return bool(import_arrow("pyarrow.compute").any(mask).as_py())


def _first(texts: Any, pattern: str) -> str | None:
    """The first text that matches."""
    compute = import_arrow("pyarrow.compute")
    at = compute.index(compute.match_substring_regex(texts, pattern), value=True).as_py()
    return None if at < 0 else str(texts[at])
