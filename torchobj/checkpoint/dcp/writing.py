"""Writes the items of one rank: takes each from the planner, chooses how its bytes are had, and closes the files."""

import heapq
import io
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchobj.checkpoint.collector import paused_collector
from torchobj.checkpoint.dcp.asking import source
from torchobj.checkpoint.dcp.attempt import Record, discard, running
from torchobj.checkpoint.dcp.file import JOINED_BYTES, ItemFile, close_files
from torchobj.checkpoint.dcp.item import item_of, stand_in
from torchobj.checkpoint.dcp.manifest import WrittenFile
from torchobj.checkpoint.dcp.place import Place
from torchobj.checkpoint.memory import memory_of
from torchobj.checkpoint.ranks import portable
from torchobj.exceptions import CheckpointError

__all__ = ["FailedWrite", "InfoOfLast", "write_items"]

#: Copies that may be on the way at once, in a file of copies.
_STAGED_BYTES = 64 << 20

#: Copies that a file of the caller's own memory may hold: nothing bounds there what is on the way.
_COPIED_BYTES = 32 << 20

#: The largest copy that is made at once.
_PIECE_BYTES = 16 << 20


class InfoOfLast(_StorageInfo):
    """Where the last item of a file lies, and the file: so the coordinator hears of the files of all ranks."""

    def __init__(self, info: _StorageInfo, file: WrittenFile) -> None:
        super().__init__(info.relative_path, info.offset, info.length)
        self.file = file

    def plain(self) -> _StorageInfo:
        """Without the file, as the metadata has it."""
        return _StorageInfo(self.relative_path, self.offset, self.length)


class FailedWrite(WriteResult):
    """In place of a rank's results what kept it from writing: so the coordinator can delete what the others wrote."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(MetadataIndex(""), 0, None)
        # The fields of a result are frozen. A traceback is text to the other ranks.
        object.__setattr__(self, "error", error)
        object.__setattr__(self, "trace", "".join(traceback.format_exception(error)))

    error: BaseException
    trace: str

    def __reduce__(self) -> tuple[Any, ...]:
        # What unpickles here only would raise in the coordinator's gathering, and the other ranks would wait.
        error = self.error if isinstance(self.error, KeyboardInterrupt | SystemExit) else portable(self.error)
        return _failed_write, (error, self.trace)


def _failed_write(error: BaseException, trace: str) -> FailedWrite:
    failed = FailedWrite(error)
    object.__setattr__(failed, "trace", trace)
    return failed


def _item_bytes(item: WriteItem) -> int:
    """The bytes of an item's tensor, as the plan says it; 0 for other objects, whose size nobody knows yet."""
    data = item.tensor_data
    if data is None:
        return 0
    sizes = data.size if data.chunk is None else data.chunk.sizes
    return math.prod(sizes) * data.properties.dtype.itemsize


def _packed(items: list[WriteItem], files: int) -> list[list[WriteItem]]:
    """Items of each file that has any.

    Args:
        items: Of the rank.
        files: How many files there are at most.
    """
    if files == 1 or len(items) < 2:
        return [items] if items else []
    # What is no tensor is small, and goes round.
    others = [item for item in items if item.type is WriteItemType.BYTE_IO]
    bins: list[list[WriteItem]] = [others[number::files] for number in range(files)]
    tensors = sorted((item for item in items if item.type is not WriteItemType.BYTE_IO), key=_item_bytes, reverse=True)
    sizes = [(0, len(content), number) for number, content in enumerate(bins)]
    heapq.heapify(sizes)
    for item in tensors:
        size, count, number = sizes[0]
        bins[number].append(item)
        heapq.heapreplace(sizes, (size + _item_bytes(item), count + 1, number))
    return [content for content in bins if content]


def _staged_whole(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, of the same shape. Shares no memory with `tensor`."""
    copy = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
    return copy.resolve_conj().resolve_neg()


def _staged_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous copies on the CPU of at most `_PIECE_BYTES` that are the tensor's memory when they are joined."""
    if tensor.nbytes <= _PIECE_BYTES:
        yield _staged_whole(tensor)
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > _PIECE_BYTES:
        for row in tensor:
            yield from _staged_pieces(row)
        return
    for rows in torch.split(tensor, _PIECE_BYTES // row_bytes):
        yield _staged_whole(rows)


class _Bin:
    """The items of one thread of torch's: a file of the caller's memory, and one of copies where they are many."""

    def __init__(self, writing: "_Writing") -> None:
        self._writing = writing
        self._own: ItemFile | None = None
        self._copies: ItemFile | None = None
        self._left = _COPIED_BYTES

    def own(self) -> ItemFile:
        """The file of the caller's memory."""
        if self._own is None:
            self._own = self._writing.open(None)
        return self._own

    def has_room(self, length: int) -> bool:
        """Whether so much may be copied into the file of the caller's memory."""
        if length > self._left:
            return False
        self._left -= length
        return True

    def for_copy(self, length: int) -> ItemFile:
        """The file for a copy of `length` bytes."""
        if self.has_room(length):
            return self.own()
        if self._copies is None:
            self._copies = self._writing.open(_STAGED_BYTES)
        return self._copies

    def add(self, item: WriteItem, data: Any) -> ItemFile:
        """Adds what the planner gave for an item, and returns the file that got it."""
        if item.type is WriteItemType.BYTE_IO:
            return self._add_bytes(data.getbuffer())
        tensor = data.detach()
        seen = stand_in(tensor)
        if seen is None:
            return self._add_other(tensor)
        frame = item_of(tensor.dtype, tensor.shape)
        assert frame is not None  # noqa: S101  stand_in knows no dtype that item_of does not
        file = self.own()
        if frame.payload_bytes <= JOINED_BYTES and self.has_room(frame.length):
            file.add_small(frame, memory_of(seen))
        else:
            file.add_large(frame, seen)
        return file

    def _add_other(self, tensor: torch.Tensor) -> ItemFile:
        """A tensor that is no contiguous memory of this machine, or that torch alone can save."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        frame = item_of(tensor.dtype, tensor.shape) if is_plain else None
        if frame is None:
            content = io.BytesIO()
            torch.save(tensor.cpu(), content)
            return self._add_bytes(content.getbuffer())
        file = self.for_copy(frame.payload_bytes)
        if frame.payload_bytes > _PIECE_BYTES:
            file.add_pieces(frame, _staged_pieces(tensor))
            return file
        seen = stand_in(_staged_whole(tensor))
        assert seen is not None  # noqa: S101  a contiguous copy on the CPU of a dtype that item_of knows
        if frame.payload_bytes <= JOINED_BYTES:
            file.add_small(frame, memory_of(seen))
        else:
            file.add_large(frame, seen)
        return file

    def _add_bytes(self, content: Any) -> ItemFile:
        file = self.for_copy(len(content))
        file.add_bytes(content)
        return file


class _Writing:
    """The files of one rank in one save. A token of the save is in their names: no save writes over another's."""

    def __init__(self, place: Place, record: Record) -> None:
        self._place = place
        self._record = record
        self._files: list[ItemFile] = []
        #: For each file the number of its last result.
        self._last: dict[str, int] = {}
        self._results: list[WriteResult] = []

    def open(self, limit_bytes: int | None) -> ItemFile:
        """A new file of the rank."""
        file = ItemFile(self._place, self._record.file(len(self._files)), limit_bytes)
        self._files.append(file)
        return file

    def write(self, items: list[WriteItem], resolve: Callable[[WriteItem], Any]) -> None:
        """Hands the items of one bin to the store, which sends them meanwhile."""
        content = _Bin(self)
        for is_small, run in itertools.groupby(items, lambda item: _item_bytes(item) <= JOINED_BYTES):
            # Large ones are waited for.
            with paused_collector() if is_small else nullcontext():
                self._write_run(run, content, resolve)

    def _write_run(self, items: Iterable[WriteItem], content: _Bin, resolve: Callable[[WriteItem], Any]) -> None:
        results = self._results
        for item in items:
            file = content.add(item, resolve(item))
            length = file.length - file.offset
            self._last[file.name] = len(results)
            results.append(WriteResult(item.index, length, _StorageInfo(file.name, file.offset, length)))

    def close(self, count: int) -> list[WriteResult]:
        """Waits until all files are stored, with so many items."""
        for file in close_files(self._files):
            number = self._last[file.name]
            last = self._results[number]
            self._results[number] = WriteResult(last.index, last.size_in_bytes, InfoOfLast(last.storage_data, file))
        if len(self._results) != count:
            raise CheckpointError(f"{self._place.url}: {len(self._results)} of {count} items were written")
        return self._results

    def abort(self) -> list[str]:
        """Forgets what is not stored yet, and returns the names of all files."""
        for file in self._files:
            file.abort()
        return [file.name for file in self._files]


def write_items(
    place: Place, prefix: str, items: list[WriteItem], planner: SavePlanner, thread_count: int
) -> list[WriteResult]:
    """Writes the items of a rank, and returns when they are stored.

    Args:
        place: The checkpoint's.
        prefix: How the names of the rank's files begin.
        items: What to write; the planner is asked for one after the other, on this thread.
        thread_count: How many files there are at most, but for those of copies.

    Returns:
        A result for each item; the last of each file has an `InfoOfLast`.

    Raises:
        ConfigError: The prefix is not below the checkpoint's folder.
        StoreError: What kept a file from being stored. What was stored is deleted, with the record of it.
        CheckpointError: An item has no result.
    """
    if not items:
        return []
    record = Record.new(prefix)
    with running(place, record):
        writing = _Writing(place, record)
        try:
            resolve = source(planner)
            for content in _packed(items, thread_count):
                writing.write(content, resolve)
            return writing.close(len(items))
        except BaseException as error:
            discard(place, writing.abort(), [error])
            raise
