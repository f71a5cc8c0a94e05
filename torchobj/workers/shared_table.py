"""`SharedTable`: an Arrow table of which workers have no copies of their own. Reading tables is left to the datasets.

Forked workers inherit the memory. For a worker that is being spawned the table is written once, as an Arrow stream, to
a file in memory, which the trainer and all its workers map; after that the trainer uses this memory too. pyarrow is
imported when it is needed.
"""

import mmap
import os
import sys
from typing import Any, Self

from torchobj.parquet.arrow import import_arrow
from torchobj.workers import process
from torchobj.workers.descriptors import Descriptors
from torchobj.workers.shared_values import SharedFile


class SharedTable:
    """An immutable Arrow table whose memory DataLoader workers share, however they were started.

    Pickling for another purpose, such as `pickle.dumps`, copies the table.

    Args:
        table: A `pyarrow.Table`. Its memory is shared with the caller.

    Example:
        >>> import pyarrow
        >>> shared = SharedTable(pyarrow.table({"url": ["a", "b"], "label": [1, 2]}))
        >>> shared, shared.row(1)
        (<SharedTable, 2 rows, columns: url, label>, {'url': 'b', 'label': 2})
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self._file: SharedFile | None = None
        self._lock = process.ProcessLock()
        self._set_up()

    def _set_up(self) -> None:
        self._columns = dict(zip(self._table.column_names, self._table.columns, strict=True))

    @property
    def table(self) -> Any:
        """The `pyarrow.Table`, which shares the memory."""
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def value(self, column: str, row: int) -> Any:
        """A value as a Python object.

        Args:
            column: Name of the column.
            row: Number of the row, from 0.

        Raises:
            KeyError: There is no such column.
            IndexError: There is no such row.
        """
        return self._columns[column][row].as_py()

    def row(self, row: int) -> dict[str, Any]:
        """A row as Python objects by the names of their columns.

        Args:
            row: Number of the row, from 0.

        Raises:
            IndexError: There is no such row.
        """
        return {name: column[row].as_py() for name, column in self._columns.items()}

    def __repr__(self) -> str:
        return f"<SharedTable, {len(self)} rows, columns: {', '.join(self._columns)}>"

    def __reduce__(self) -> Any:
        if sys.platform == "linux" and process.is_pickling_for_spawn():
            return self._received, (Descriptors.to_new_process(self._descriptor()),)
        sink = import_arrow().BufferOutputStream()
        _write(self._table, sink)
        return self._unpickled, (sink.getvalue().to_pybytes(),)

    def _descriptor(self) -> int:
        """The file in memory, which the first call writes."""
        with self._lock:
            file = self._file
            if file is None:
                file = SharedFile.create("torchobj-table")
                with os.fdopen(file.descriptor, "wb", closefd=False) as sink:
                    _write(self._table, sink)
                self._map(file)
            return file.descriptor

    def _map(self, file: SharedFile) -> None:
        """Uses the table in a file."""
        self._file = file
        self._table = _read(mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ))
        self._set_up()

    @classmethod
    def _received(cls, descriptors: Descriptors) -> Self:
        shared = cls.__new__(cls)
        shared._lock = process.ProcessLock()
        shared._map(SharedFile(*descriptors.copies()))
        return shared

    @classmethod
    def _unpickled(cls, data: bytes) -> Self:
        return cls(_read(data))


def _write(table: Any, sink: Any) -> None:
    with import_arrow("pyarrow.ipc").new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def _read(memory: Any) -> Any:
    """The table in an Arrow stream, whose memory it shares."""
    arrow = import_arrow()
    return import_arrow("pyarrow.ipc").open_stream(arrow.py_buffer(memory)).read_all()
