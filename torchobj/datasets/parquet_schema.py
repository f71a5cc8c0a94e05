"""The one schema of several Parquet files, and the conversion of their row groups to it. Decodes nothing."""

from collections.abc import Callable
from typing import Any

from torchobj.datasets.parquet_files import ParquetFile, arrow
from torchobj.exceptions import ParquetError

__all__ = ["merged_schema", "with_schema"]


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
    names, pyarrow = schema.names, arrow()
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
    pyarrow = arrow()
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
    if first == second or arrow().null() in (first, second):
        return True
    shape, other = _shape(first), _shape(second)
    same = shape[0] == other[0] and shape[1].keys() == other[1].keys()
    return same and all(_is_similar(kind, other[1][name]) for name, kind in shape[1].items())


def _shape(kind: Any) -> tuple[str, dict[str, Any]]:
    """What must be equal in the types of a column, and the types in it by name."""
    kinds = arrow().types
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


def with_schema(table: Any, schema: Any, url: str) -> Any:
    """The columns of a row group in the order and with the types of a schema from `merged_schema`.

    Raises:
        ParquetError: A value cannot be converted without loss.
    """
    if table.schema.equals(schema, check_metadata=True):
        return table
    try:
        return table.select(schema.names).cast(schema)
    except arrow().ArrowException as error:
        raise ParquetError(f"{url}: a value does not fit the type of its column in all files: {error}") from error
