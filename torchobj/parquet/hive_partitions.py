"""Columns from the names of folders, such as `year=2024/month=05/`: their types, and the values of each file. pyarrow
parses the names. Reads no object.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from torchobj.exceptions import ConfigError, ParquetError
from torchobj.parquet.arrow import import_arrow


class HivePartitions(NamedTuple):
    """The columns of files that the names of their folders contain."""

    schema: Any
    """`pyarrow.Schema` of these columns."""
    expressions: list[Any]
    """For each file, the expression that is true for all its rows."""

    def values(self, file: int) -> dict[str, Any]:
        """The value of each column in a file, by its number."""
        found: dict[str, Any] = import_arrow("pyarrow.dataset").get_partition_keys(self.expressions[file])
        return found

    def files_of(self, expression: Any, schema: Any) -> list[int]:
        """Numbers of the files that may have rows for which an expression is true, by the names of their folders.

        Args:
            expression: The expression.
            schema: The `pyarrow.Schema` of the columns that it uses.
        """
        dataset, local = import_arrow("pyarrow.dataset"), import_arrow("pyarrow.fs").LocalFileSystem()
        parquet = dataset.ParquetFileFormat()
        # Files of pyarrow that are not opened.
        files = [parquet.make_fragment(f"{at}", local, each) for at, each in enumerate(self.expressions)]
        found = dataset.FileSystemDataset(files, schema, parquet).get_fragments(filter=expression)
        return [int(file.path) for file in found]


def no_partitions(files: int) -> HivePartitions:
    """Of files whose folders are no columns."""
    return HivePartitions(import_arrow().schema([]), [import_arrow("pyarrow.dataset").scalar(value=True)] * files)


def hive_partitions(files: Sequence[tuple[str, str]], partitioning: Any = None) -> HivePartitions:
    """The columns in the names of folders.

    Args:
        files: URL and key of each file.
        partitioning: A `pyarrow.dataset.HivePartitioning`, for their names and types. None: all folders with names such
            as `year=2024`, whose types are inferred from all files: `int32` if all values are, otherwise `string`.

    Raises:
        ConfigError: No folder has such a name.
        ParquetError: A file lacks a folder that others have, has one twice, or has one whose value is not of its type.
    """
    dataset, arrow = import_arrow("pyarrow.dataset"), import_arrow()
    # URL of the first file of each folder, whose files have the same values.
    folders: dict[str, str] = {}
    for url, key in files:
        folders.setdefault(_folder(key), url)
    names = dict.fromkeys(name for folder, url in folders.items() for name in _names(url, folder))
    if not names:
        raise ConfigError(
            f"partitioning: {files[0][0]} has no folder with a name such as year=2024; pass partitioning=None"
        )
    if partitioning is None:
        texts = dataset.HivePartitioning(arrow.schema([(name, arrow.string()) for name in names]))
        found = HivePartitions(texts.schema, [_parsed(texts, *each) for each in folders.items()])
        values = [found.values(number) for number in range(len(folders))]
        fields = [(name, _inferred(name, [each.get(name) for each in values], files[0][0])) for name in names]
        partitioning = dataset.HivePartitioning(arrow.schema(fields))
    partitions = HivePartitions(partitioning.schema, [_parsed(partitioning, *each) for each in folders.items()])
    for number, url in enumerate(folders.values()):
        if missing := [name for name in partitions.schema.names if name not in partitions.values(number)]:
            raise ParquetError(f"{url}: no folder is named {missing[0]}=..., which those of other files are")
    of_folders = dict(zip(folders, partitions.expressions, strict=True))
    return partitions._replace(expressions=[of_folders[_folder(key)] for _, key in files])


def _folder(key: str) -> str:
    """The folder of a file, which ends with a slash unless it is empty."""
    return key[: key.rfind("/") + 1]


def _names(url: str, folder: str) -> list[str]:
    """The names of columns in a folder and those that contain it."""
    named = Counter(map(unquote, re.findall(r"(?:^|/)([^/=]*)=[^/]*(?=/)", folder)))
    for name, count in named.items():
        if not name or count > 1:
            problem = f"has {count} folders named {name}=..." if name else "has a folder whose name begins with '='"
            raise ParquetError(f"{url}: {problem}, which is no name of a column; pass partitioning=None")
    return list(named)


def _parsed(partitioning: Any, folder: str, url: str) -> Any:
    try:
        return partitioning.parse(folder)
    except import_arrow().ArrowException as error:
        raise ParquetError(f"{url}: the names of its folders cannot be read as columns: {error}") from error


def _inferred(name: str, texts: list[str | None], url: str) -> Any:
    """The type that pyarrow infers of the values of a column."""
    arrow = import_arrow()
    if set(texts) == {None}:
        raise ParquetError(f"{url}: no folder named {name}=... has a value, from which its type is inferred")
    try:
        return arrow.array(texts, arrow.string()).cast(arrow.int32()).type
    except arrow.ArrowException:
        return arrow.string()
