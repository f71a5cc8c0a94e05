"""Writes the items of one rank: resolves each, chooses a file for its bytes, and closes the files."""

import heapq
import io
import math
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.item_file import JOINED_BYTES, ItemFile, close_files
from torchobj.checkpoint.dcp.leftovers import discard
from torchobj.checkpoint.dcp.object_names import FileNames
from torchobj.checkpoint.device_memory import check_memory
from torchobj.checkpoint.leftovers import under_way
from torchobj.checkpoint.memory import memory_of
from torchobj.checkpoint.plan import is_memory, tensor_archive
from torchobj.checkpoint.ranks import portable
from torchobj.exceptions import CheckpointError

__all__ = ["FailedWrite", "InfoOfLast", "write_items"]

#: Maximum size of the copies that a file of copies holds at once.
_STAGED_BYTES = 64 << 20

#: Maximum size of the copies in a file of the caller's own memory, which has no other limit.
_COPIED_BYTES = 32 << 20

#: Maximum size of one copy.
_PIECE_BYTES = 16 << 20


class InfoOfLast(_StorageInfo):
    """The `_StorageInfo` of the last item of a file, and the file's CRC-32, which it brings to the coordinator."""

    def __init__(self, info: _StorageInfo, crc32: int) -> None:
        super().__init__(info.relative_path, info.offset, info.length)
        self.crc32 = crc32

    def plain(self) -> _StorageInfo:
        """Returns the `_StorageInfo` for the metadata, without the CRC-32."""
        return _StorageInfo(self.relative_path, self.offset, self.length)


class FailedWrite(WriteResult):
    """The failure of a rank, in place of its results: the coordinator then deletes what the other ranks wrote."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(MetadataIndex(""), 0, None)
        # A `WriteResult` is frozen. Other ranks receive the traceback as text.
        object.__setattr__(self, "error", error)
        object.__setattr__(self, "trace", "".join(traceback.format_exception(error)))

    error: BaseException
    trace: str

    def __reduce__(self) -> tuple[Any, ...]:
        # An error that the coordinator cannot unpickle would fail its gather while the other ranks wait.
        error = self.error if isinstance(self.error, KeyboardInterrupt | SystemExit) else portable(self.error)
        return _failed_write, (error, self.trace)


def _failed_write(error: BaseException, trace: str) -> FailedWrite:
    failed = FailedWrite(error)
    object.__setattr__(failed, "trace", trace)
    return failed


def _item_bytes(item: WriteItem) -> int:
    """Returns the size of an item's tensor in bytes; 0 for other objects, whose size is not known yet."""
    data = item.tensor_data
    if data is None:
        return 0
    sizes = data.size if data.chunk is None else data.chunk.sizes
    return math.prod(sizes) * data.properties.dtype.itemsize


def _packed(items: list[WriteItem], files: int) -> list[list[WriteItem]]:
    """Divides the items of a rank among at most `files` files of about the same size. Returns those with items."""
    if files == 1 or len(items) < 2:
        return [items] if items else []
    # Other objects are small: they are distributed in turn.
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
    """Returns a contiguous copy on the CPU, of the same shape."""
    copy = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
    return copy.resolve_conj().resolve_neg()


def _staged_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields contiguous copies on the CPU of at most `_PIECE_BYTES`. Joined, they are the bytes of the tensor."""
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
    """The items of one file of `thread_count`: a file of the caller's memory, and another if there are many copies."""

    def __init__(self, writing: "_Writing") -> None:
        self._writing = writing
        self._own: ItemFile | None = None
        self._copies: ItemFile | None = None
        self._left = _COPIED_BYTES

    def own(self) -> ItemFile:
        """Returns the file of the caller's memory."""
        if self._own is None:
            self._own = self._writing.open(None)
        return self._own

    def takes_copy(self, length: int) -> bool:
        """Returns whether the file of the caller's memory may hold a copy of `length` bytes, and counts it."""
        if length > self._left:
            return False
        self._left -= length
        return True

    def for_copy(self, length: int) -> ItemFile:
        """Returns the file for a copy of `length` bytes."""
        if self.takes_copy(length):
            return self.own()
        if self._copies is None:
            self._copies = self._writing.open(_STAGED_BYTES)
        return self._copies

    def add(self, item: WriteItem, data: Any) -> ItemFile:
        """Adds the data of an item. Returns its file."""
        if item.type is WriteItemType.BYTE_IO:
            return self._add_bytes(data.getbuffer())
        tensor = data.detach()
        check_memory(tensor, item.index.fqn)
        frame = tensor_archive(tensor.dtype, tensor.shape) if is_memory(tensor) else None
        if frame is None:
            return self._add_other(tensor)
        file = self.own()
        if frame.payload_bytes <= JOINED_BYTES and self.takes_copy(frame.length):
            file.add_small(frame, memory_of(tensor))
        else:
            file.add_large(frame, tensor)
        return file

    def _add_other(self, tensor: torch.Tensor) -> ItemFile:
        """Adds a tensor that is not contiguous memory of the CPU, or that only torch can save."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        frame = tensor_archive(tensor.dtype, tensor.shape) if is_plain else None
        if frame is None:
            content = io.BytesIO()
            torch.save(tensor.cpu(), content)
            return self._add_bytes(content.getbuffer())
        file = self.for_copy(frame.payload_bytes)
        if frame.payload_bytes > _PIECE_BYTES:
            file.add_pieces(frame, _staged_pieces(tensor))
            return file
        copy = _staged_whole(tensor)
        if frame.payload_bytes <= JOINED_BYTES:
            file.add_small(frame, memory_of(copy))
        else:
            file.add_large(frame, copy)
        return file

    def _add_bytes(self, content: Any) -> ItemFile:
        file = self.for_copy(len(content))
        file.add_bytes(content)
        return file


class _Writing:
    """The files of one rank in one save."""

    def __init__(self, checkpoint: CheckpointDir, names: FileNames) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._files: list[ItemFile] = []
        #: Index of the last result of each file.
        self._last: dict[str, int] = {}
        self._results: list[WriteResult] = []

    def open(self, limit_bytes: int | None) -> ItemFile:
        """Opens a new file of the rank."""
        file = ItemFile(self._checkpoint, self._names.file(len(self._files)), limit_bytes)
        self._files.append(file)
        return file

    def write(self, items: list[WriteItem], planner: SavePlanner) -> None:
        """Adds the items of one bin. The store sends them concurrently."""
        content = _Bin(self)
        for item in items:
            file = content.add(item, planner.resolve_data(item))
            length = file.length - file.offset
            self._last[file.name] = len(self._results)
            info = _StorageInfo(file.name, file.offset, length)
            self._results.append(WriteResult(item.index, length, info))

    def close(self, count: int) -> list[WriteResult]:
        """Waits until all files are stored. Checks that they have `count` items."""
        for file, crc32 in zip(self._files, close_files(self._files), strict=True):
            number = self._last[file.name]
            last = self._results[number]
            self._results[number] = WriteResult(last.index, last.size_in_bytes, InfoOfLast(last.storage_data, crc32))
        if len(self._results) != count:
            raise CheckpointError(f"{self._checkpoint.url}: {len(self._results)} of {count} items were written")
        return self._results

    def abort(self) -> list[str]:
        """Aborts unfinished uploads. Returns the names of all files."""
        for file in self._files:
            file.abort()
        return [file.name for file in self._files]


def write_items(
    checkpoint: CheckpointDir, prefix: str, items: list[WriteItem], planner: SavePlanner, thread_count: int
) -> list[WriteResult]:
    """Writes the items of a rank. Returns when all files are stored.

    Args:
        checkpoint: Folder of the checkpoint.
        prefix: Start of the names of the rank's files.
        items: Items to write. The planner resolves them one by one, on this thread.
        thread_count: Maximum number of files, without files of copies.

    Returns:
        A result for each item. The last one of each file has an `InfoOfLast`.

    Raises:
        ConfigError: The prefix is not below the checkpoint's folder.
        StoreError: A file could not be stored. The stored files are deleted.
        CheckpointError: An item has no result.
    """
    if not items:
        return []
    names = FileNames(prefix)
    with under_way(names.token):
        writing = _Writing(checkpoint, names)
        try:
            for content in _packed(items, thread_count):
                writing.write(content, planner)
            return writing.close(len(items))
        except BaseException:
            discard(checkpoint, writing.abort())
            raise
