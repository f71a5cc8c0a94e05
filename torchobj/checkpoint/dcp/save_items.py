"""Writes the items of one rank: resolves each, chooses a file for its bytes, and closes the files.

The items of a file follow each other, and are sent from the memory of their tensors.
"""

import dataclasses
import io
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchobj import _torchobj
from torchobj.checkpoint.archive.device_memory import BLOCK_BYTES, BLOCKS_BYTES, check_memory
from torchobj.checkpoint.archive.plan import TensorArchive, is_memory, tensor_archive
from torchobj.checkpoint.archive.zip_archive import DESCRIPTOR_MARK
from torchobj.checkpoint.dcp.object_names import FileNames
from torchobj.checkpoint.dcp.removal import DistributedDir
from torchobj.checkpoint.leftovers import under_way
from torchobj.ranks.meeting import portable
from torchobj.store.file_objects import NO_ATTRIBUTES
from torchobj.store.tensor_memory import memory_of
from torchobj.store.transfers import ByteProgress

__all__ = ["STAGED_BYTES", "ItemFile", "RankReport", "close_files", "expect_items", "opened_files", "write_items"]

#: Maximum size of the copies that a file of copies holds at once.
STAGED_BYTES = 64 << 20

#: Maximum size of the copies in a file of the caller's own memory, which has no other limit.
_COPIED_BYTES = 32 << 20

#: Maximum size of one copy.
_PIECE_BYTES = 16 << 20

#: Payloads up to this size are copied together with their frames: seven separate pieces cost more than the copy.
_JOINED_BYTES = 16 << 10

#: Size of a batch of copied items.
_BATCH_BYTES = 1 << 20

#: Number of pieces of a batch.
_BATCH_PIECES = 1000


@dataclasses.dataclass
class RankReport:
    """What a rank reports to the coordinator besides its items, in a result of its own."""

    checksums: dict[str, int]
    """CRC-32 of each file, by name."""
    error: BaseException | None = None
    """Failure of the rank: the coordinator then deletes what the other ranks wrote."""
    trace: str = ""
    """Traceback of the failure."""

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        # An error that the coordinator cannot unpickle would fail its gather while the other ranks wait.
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            error = portable(error)
        return RankReport, (self.checksums, error, self.trace)

    def result(self) -> WriteResult:
        """Returns the result that contains the report, in place of the `_StorageInfo` of an item."""
        return WriteResult(MetadataIndex(""), 0, self)


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


class ItemFile:
    """A file that is created by `close_files`, unless a write failed before.

    Args:
        checkpoint: Folder of the checkpoint.
        name: Name of the file, relative to the folder.
        limit_bytes: Maximum size of the bytes that are held until they are sent; None if they are the caller's memory.
        counted: Receives the number of bytes that are sent, up to those in flight.
    """

    def __init__(self, checkpoint: DistributedDir, name: str, limit_bytes: int | None, counted: ByteProgress) -> None:
        self.name = name
        self._counted = counted
        #: Bytes of items in the current batch.
        self._uncounted = 0
        #: Offset of the last item that was added, and its end.
        self.offset = self.length = 0
        self._native = _torchobj.NativeGather(
            checkpoint.native, checkpoint.key(name), NO_ATTRIBUTES, limit_bytes=limit_bytes
        )
        # Bytes of the next copy, and the pieces of the current batch.
        self._joined: list[Any] = []
        self._joined_bytes = 0
        self._pieces: list[Any] = []
        # Large copies are written at once: the limit counts them only then.
        self._max_pieces = _BATCH_PIECES if limit_bytes is None else 1
        # Including those of the current batch.
        self._records = 0

    def add_small(self, item: TensorArchive, payload: Any) -> None:
        """Adds a tensor that is copied with the current batch. Keeps its memory, any contiguous buffer, until then."""
        if item.payload_bytes == 0:
            self._joined.append(item.before)
        else:
            crc32 = zlib.crc32(payload).to_bytes(4, "little")
            self._joined += (item.before, payload, DESCRIPTOR_MARK, crc32, item.middle, crc32, item.after)
        self._grow(item.length)
        self._uncounted += item.payload_bytes
        self._joined_bytes += item.length
        if self._joined_bytes >= _BATCH_BYTES:
            self._write()

    def add_bytes(self, content: memoryview) -> None:
        """Adds bytes without a frame. They must not change before the file is closed."""
        if len(content) <= _JOINED_BYTES:
            self._joined.append(content)
            self._joined_bytes += len(content)
        else:
            self._join()
            self._add_record(content)
        self._grow(len(content))
        self._counted.expect(len(content))
        self._uncounted += len(content)
        self._write_if_full()

    def add_large(self, item: TensorArchive, payload: Iterable[torch.Tensor]) -> None:
        """Adds a tensor as consecutive pieces that are sent from their own memory: the tensor, or copies.

        A piece that is not a copy must not change before the file is closed. A copy is released when it has been sent.
        """
        self._join()
        self._pieces.append(item.before)
        records = self._add_records(payload)
        self._pieces += (DESCRIPTOR_MARK, records, item.middle, records, item.after)
        self._grow(item.length)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Adds the bytes of a tensor without a frame: small ones as a copy, large ones as `add_large`."""
        is_own = is_memory(tensor)
        if tensor.nbytes <= _JOINED_BYTES:
            self._joined.append(memory_of(tensor if is_own else _staged_whole(tensor)))
            self._joined_bytes += tensor.nbytes
            self._uncounted += tensor.nbytes
            if self._joined_bytes >= _BATCH_BYTES:
                self._write()
        else:
            self._join()
            self._add_records([tensor] if is_own else _staged_pieces(tensor))
        self._grow(tensor.nbytes)

    def abort(self) -> None:
        """Aborts the upload."""
        self._native.abort()

    def _grow(self, length: int) -> None:
        self.offset, self.length = self.length, self.length + length

    def _add_records(self, payload: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Adds consecutive pieces. Returns the range of their records."""
        first = self._records
        for piece in payload:
            memory = memory_of(piece)
            # A block is written when those before it are sent, up to the limit.
            step = max(1, len(memory)) if self._counted.arrived is None else BLOCK_BYTES
            # An empty tensor is a record too.
            for at in range(0, max(1, len(memory)), step):
                block = memory[at : at + step]
                self._add_record(block)
                self._uncounted += len(block)
                self._write_if_full()
        return first, self._records

    def _add_record(self, content: Any) -> None:
        self._pieces.append(content)
        self._records += 1

    def _join(self) -> None:
        """Copies the bytes of small items into one piece."""
        if self._joined:
            self._pieces.append(b"".join(self._joined))
            self._joined, self._joined_bytes = [], 0

    def _write_if_full(self) -> None:
        if len(self._pieces) >= self._max_pieces:
            self._write()

    def _write(self) -> None:
        self._native.write(self._take())
        self.count()

    def count(self) -> None:
        """Reports the bytes that are written."""
        self._counted.add(self._uncounted)
        self._uncounted = 0

    def _take(self) -> list[Any]:
        """Returns the pieces of the current batch, and starts a new one."""
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces


@contextmanager
def opened_files(checkpoint: DistributedDir) -> Iterator[list[ItemFile]]:
    """Yields a list for the files of a save. If the block fails, they are aborted, and stored ones are deleted."""
    files: list[ItemFile] = []
    try:
        yield files
    except BaseException:
        for file in files:
            file.abort()
        checkpoint.discard(file.name for file in files)
        raise


def close_files(files: Sequence[ItemFile]) -> dict[str, int]:
    """Completes all files concurrently. Returns the CRC-32 of each, by name.

    Raises:
        StoreError: The error of the first file that failed, after the others have ended.
    """
    closed = _torchobj.close_gathers([(file._native, file._take()) for file in files])
    for file in files:
        file.count()
    return {file.name: crc32 for file, (_, _, crc32) in zip(files, closed, strict=True)}


class _Bin:
    """The items of one file of `thread_count`: a file of the caller's memory, and another if there are many copies.

    Args:
        checkpoint: Folder of the checkpoint.
        names: Names of the files of the rank.
        opened: All files of the rank, to which this adds those that it opens.
        counted: As for `ItemFile`.
    """

    def __init__(
        self, checkpoint: DistributedDir, names: FileNames, opened: list[ItemFile], counted: ByteProgress
    ) -> None:
        self._checkpoint, self._names, self._opened, self._counted = checkpoint, names, opened, counted
        #: The file of copies, and that of the caller's memory.
        self._files: dict[bool, ItemFile] = {}
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
        file = self._file(of_copies=not is_own and not self._takes_copy(frame.payload_bytes))
        if frame.payload_bytes > _JOINED_BYTES or (is_own and not self._takes_copy(frame.length)):
            file.add_large(frame, [tensor] if is_own else _staged_pieces(tensor))
        else:
            file.add_small(frame, memory_of(tensor if is_own else _staged_whole(tensor)))
        return file

    def _add_bytes(self, content: Any) -> ItemFile:
        file = self._file(of_copies=not self._takes_copy(len(content)))
        file.add_bytes(content)
        return file

    def _file(self, *, of_copies: bool) -> ItemFile:
        """Returns the file of copies, or that of the caller's memory."""
        if of_copies not in self._files:
            limit_bytes = STAGED_BYTES if of_copies else None if self._counted.arrived is None else BLOCKS_BYTES
            name = self._names.file(len(self._opened))
            self._files[of_copies] = ItemFile(self._checkpoint, name, limit_bytes, self._counted)
            self._opened.append(self._files[of_copies])
        return self._files[of_copies]

    def _takes_copy(self, length: int) -> bool:
        """Returns whether the file of the caller's memory may hold a copy of `length` bytes, and counts it."""
        if length > self._left:
            return False
        self._left -= length
        return True


def expect_items(items: Iterable[WriteItem], counted: ByteProgress) -> None:
    """Counts the bytes of tensors as bytes to send."""
    tensors = [item.tensor_data for item in items if item.tensor_data is not None]
    counted.expect(sum(math.prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors))


def write_items(
    checkpoint: DistributedDir,
    prefix: str,
    items: list[WriteItem],
    planner: SavePlanner,
    thread_count: int,
    *,
    counted: ByteProgress,
) -> list[WriteResult]:
    """Writes the items of a rank. Returns when all files are stored.

    Args:
        checkpoint: Folder of the checkpoint.
        prefix: Start of the names of the rank's files.
        items: Items to write. The planner resolves them one by one, on this thread.
        thread_count: Maximum number of files, without files of copies.
        counted: Receives the number of bytes of items that are sent.

    Returns:
        A result for each item, and the rank's report.

    Raises:
        ConfigError: The prefix is not below the checkpoint's folder.
        StoreError: A file could not be stored. The stored files are deleted.
    """
    if not items:
        return []
    names = FileNames(prefix)
    expect_items(items, counted)
    with under_way(names.attempt), opened_files(checkpoint) as opened:
        results = []
        for content in _split_by_size_and_type(thread_count, items):
            content_bin = _Bin(checkpoint, names, opened, counted)
            results += [content_bin.add(item, planner.resolve_data(item)) for item in content]
        checksums = close_files(opened)
    return [*results, RankReport(checksums).result()]
