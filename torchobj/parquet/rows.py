"""Rows of tables as samples: missing floats are NaN, and what cannot be converted or collated is named. Reads no table.

Neither pyarrow nor torch's `default_collate` names column, row and file of a value that it refuses, so that a row knows
its origin.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data._utils.collate import collate, default_collate_fn_map

from torchobj.exceptions import ConfigError
from torchobj.parquet.arrow import import_arrow


class TableRow(dict[str, Any]):
    """A row of a table by the names of its columns; the KeyError of a missing one names the row. Pickled as a dict.

    Args:
        values: The row.
        table: Name of the table, or URL of the file and number of the row group.
        number: Number of the row in it.
    """

    __slots__ = ("number", "table")

    def __init__(self, values: dict[str, Any], table: str, number: int) -> None:
        super().__init__(values)
        self.table, self.number = table, number

    def __missing__(self, column: object) -> Any:
        raise KeyError(f"no column {column!r} in row {self.number} of {self.table}: its columns are {', '.join(self)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def converted(values: Any, convert: Callable[[Any], Iterable[Any]]) -> tuple[list[Any], dict[int, Exception]]:
    """The values of a column, and the exceptions of those that cannot be converted, by their numbers.

    Args:
        values: A column, or a part of one.
        convert: Converts a part of it. Called with halves of a part for which it raises, down to a single value.
    """
    found, failed, parts = list[Any](), dict[int, Exception](), [values]
    while parts:
        part = parts.pop()
        half = len(part) // 2
        try:
            found += convert(part)
        except Exception as error:  # noqa: BLE001  of many types: those of Python's dates, of text, of extension types
            if half:
                parts += [part.slice(half), part.slice(0, half)]
            else:
                failed[len(found)] = error
                found.append(None)
    return found, failed


def unconverted(table: str, row: int, column: str, error: Exception) -> str:
    """The message for a value that cannot be converted.

    Args:
        table: Name of the table, or URL of the file and number of the row group.
        row: Number of the row in it.
        column: Name of the column.
        error: The exception of its conversion.
    """
    reason = str(error).partition("\n")[0]
    return f"{table}: row {row}, column {column!r}: the value cannot be converted: {type(error).__name__}: {reason}"


def float_parts(fields: Any) -> dict[str, Any]:
    """The columns of a `pyarrow.Schema`, or fields of a struct, that contain floats, for `with_nan`.

    The value is True for floats, a dict for structs, and a list of one for lists.
    """
    parts = {field.name: _parts(field.type) for field in fields}
    return {name: part for name, part in parts.items() if part}


def _parts(kind: Any) -> Any:
    kinds = import_arrow().types
    if kinds.is_struct(kind):
        return float_parts(kind)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return [part] if (part := _parts(kind.value_type)) else None
    return kinds.is_floating(kind)


def with_nan(value: Any, parts: Any) -> Any:
    """A value or row with NaN in place of missing floats.

    Args:
        value: A Python value, which is changed.
        parts: From `float_parts`.
    """
    if parts is True:
        return math.nan if value is None else value
    if isinstance(parts, dict) and value is not None:
        for name, part in parts.items():
            value[name] = with_nan(value[name], part)
    elif value is not None:
        return [with_nan(each, parts[0]) for each in value]
    return value


#: How to convert integers that torch makes no tensor of.
_TO_UINT64 = ", such as with torch.tensor(number, dtype=torch.uint64) or float"


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 63


def _collate_rows(
    batch: Sequence[TableRow], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """Collates rows as dicts. Called by torch's `default_collate`.

    Raises:
        ConfigError: A value cannot be collated; with its column, row and table. Or two rows have other columns.
    """
    for row in batch:
        if isinstance(row, TableRow) and row.keys() != batch[0].keys():
            _check_columns(batch[0], row)
            _check_columns(row, batch[0])
    collated = {}
    for name in batch[0]:
        try:
            collated[name] = collate([row[name] for row in batch], collate_fn_map=collate_fn_map)
        except Exception as error:
            row, described, example = _culprit(batch, name)
            raise ConfigError(
                f"{row.table}: row {row.number}, column {name!r}: {described} cannot be collated; pass a transform "
                f"that converts it{example}, columns= without it, or a collate_fn to the loader"
            ) from error
    return collated


def _check_columns(row: TableRow, other: TableRow) -> None:
    """Raises a ConfigError if a row lacks a column of another one, which is of another table."""
    for name in other.keys() - row.keys():
        raise ConfigError(
            f"{row.table} has no column {name!r}, which {other.table} has: the rows of a batch must have the same "
            "columns; pass columns= with those of both, or a transform that gives them the same"
        )


def _culprit(batch: Sequence[TableRow], name: str) -> tuple[TableRow, str, str]:
    """The first row whose value cannot be collated, what it is, and how to convert it; without one, the first row."""
    for row in batch:
        value = row[name]
        if isinstance(value, dict) and value.keys() == {"bytes", "path"} and value["bytes"] is not None:
            example = f", such as torchobj.decode.image(row[{name!r}])"
            return row, "a file of Hugging Face datasets, a dict of bytes and path,", example
        values = list(_values(value))
        if None in values:
            return row, "a missing value", ""
        if large := next(filter(_is_too_large, values), None):
            return row, f"{large}, which is not in the range of int64,", _TO_UINT64
    return batch[0], f"a value of type {type(batch[0][name]).__name__}", ""


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from _values(each)


default_collate_fn_map[TableRow] = _collate_rows
