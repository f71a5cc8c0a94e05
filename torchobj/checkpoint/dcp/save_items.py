"""Writes the items of one rank: resolves each, chooses a file for its bytes, and closes the files."""

import dataclasses
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
from torchobj.checkpoint.plan import is_memory, tensor_archive
from torchobj.checkpoint.ranks import portable
from torchobj.exceptions import CheckpointError
from torchobj.store.tensor_memory import memory_of

__all__ = ["RankReport", "write_items"]

#: Maximum size of the copies that a file of copies holds at once.
_STAGED_BYTES = 64 << 20

#: Maximum size of the copies in a file of the caller's own memory, which has no other limit.
_COPIED_BYTES = 32 << 20

#: Maximum size of one copy.
_PIECE_BYTES = 16 << 20


@dataclasses.dataclass
class RankReport:
    """What a rank reports to the coordinator besides its items, in a result of its own."""

    checksums: dict[str, int]
    """CRC-32 of each file, by name."""
    error: BaseException | None = None
    """Failure of the rank: the coordinator then deletes what the other ranks wrote."""
    trace: str = ""
    """Traceback of the failure."""

    @classmethod
    def of_failure(cls, error: BaseException) -> "RankReport":
        """Returns the report of a rank that failed."""
        return cls({}, error, "".join(traceback.format_exception(error)))

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        # An error that the coordinator cannot unpickle would fail its gather while the other ranks wait.
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            error = portable(error)
        return RankReport, (self.checksums, error, self.trace)

    def result(self) -> WriteResult:
        """Returns the result that contains the report, in place of the `_StorageInfo` of an item."""
        return WriteResult(MetadataIndex(""), 0, self)


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


class _RankFiles:
    """The files of one rank in one save."""

    def __init__(self, checkpoint: CheckpointDir, names: FileNames) -> None:
        self._checkpoint, self._names = checkpoint, names
        self.files: list[ItemFile] = []

    def open(self, limit_bytes: int | None) -> ItemFile:
        """Opens a new file, which holds at most `limit_bytes` of copies; None if it holds the caller's memory."""
        file = ItemFile(self._checkpoint, self._names.file(len(self.files)), limit_bytes)
        self.files.append(file)
        return file


class _Bin:
    """The items of one file of `thread_count`: a file of the caller's memory, and another if there are many copies."""

    def __init__(self, files: _RankFiles) -> None:
        self._files = files
        self._own: ItemFile | None = None
        self._copies: ItemFile | None = None
        self._left = _COPIED_BYTES

    def add(self, item: WriteItem, data: Any) -> WriteResult:
        """Adds the data of an item. The store sends it concurrently."""
        if item.type is WriteItemType.BYTE_IO:
            file = self._add_bytes(data.getbuffer())
        else:
            file = self._add_tensor(data.detach(), item.index.fqn)
        length = file.length - file.offset
        return WriteResult(item.index, length, _StorageInfo(file.name, file.offset, length))

    def _add_tensor(self, tensor: torch.Tensor, name: str) -> ItemFile:
        check_memory(tensor, name)
        is_own = is_memory(tensor)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        frame = tensor_archive(tensor.dtype, tensor.shape) if is_plain else None
        if frame is None:
            # Only torch can save it.
            content = io.BytesIO()
            torch.save(tensor.cpu(), content)
            return self._add_bytes(content.getbuffer())
        file = self._own_file() if is_own else self._file_for_copy(frame.payload_bytes)
        if frame.payload_bytes > JOINED_BYTES or (is_own and not self._takes_copy(frame.length)):
            file.add_large(frame, [tensor] if is_own else _staged_pieces(tensor))
        else:
            file.add_small(frame, memory_of(tensor if is_own else _staged_whole(tensor)))
        return file

    def _add_bytes(self, content: Any) -> ItemFile:
        file = self._file_for_copy(len(content))
        file.add_bytes(content)
        return file

    def _own_file(self) -> ItemFile:
        """Returns the file of the caller's memory."""
        if self._own is None:
            self._own = self._files.open(None)
        return self._own

    def _file_for_copy(self, length: int) -> ItemFile:
        """Returns the file for a copy of `length` bytes."""
        if self._takes_copy(length):
            return self._own_file()
        if self._copies is None:
            self._copies = self._files.open(_STAGED_BYTES)
        return self._copies

    def _takes_copy(self, length: int) -> bool:
        """Returns whether the file of the caller's memory may hold a copy of `length` bytes, and counts it."""
        if length > self._left:
            return False
        self._left -= length
        return True


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
        A result for each item, and the rank's report.

    Raises:
        ConfigError: The prefix is not below the checkpoint's folder.
        StoreError: A file could not be stored. The stored files are deleted.
        CheckpointError: An item has no file.
    """
    if not items:
        return []
    contents = _packed(items, thread_count)
    if sum(map(len, contents)) != len(items):
        raise CheckpointError(f"{checkpoint.url}: {sum(map(len, contents))} of {len(items)} items have a file")
    names = FileNames(prefix)
    opened = _RankFiles(checkpoint, names)
    with under_way(names.token):
        try:
            results = []
            for content in contents:
                content_bin = _Bin(opened)
                results += [content_bin.add(item, planner.resolve_data(item)) for item in content]
            checksums = close_files(opened.files)
        except BaseException:
            for file in opened.files:
                file.abort()
            discard(checkpoint, [file.name for file in opened.files])
            raise
    return [*results, RankReport(checksums).result()]
