"""A file of a checkpoint that is being written: items one after the other, sent from the memory of their tensors."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchobj import _torchobj
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.plan import TensorArchive
from torchobj.store.archive import DESCRIPTOR_MARK
from torchobj.store.file_objects import NO_ATTRIBUTES
from torchobj.store.tensor_memory import memory_of

__all__ = ["JOINED_BYTES", "ItemFile", "close_files"]

#: Payloads up to this size are copied together with their frames: seven separate pieces cost more than the copy.
JOINED_BYTES = 16 << 10

#: Size of a batch of copied items.
_BATCH_BYTES = 1 << 20

#: Number of pieces of a batch.
_BATCH_PIECES = 1000


class ItemFile:
    """A file that is created by `close_files`, unless a write failed before.

    Args:
        checkpoint: Folder of the checkpoint.
        name: Name of the file, relative to the folder.
        limit_bytes: Maximum size of the bytes that are held until they are sent; None if they are the caller's memory.
    """

    def __init__(self, checkpoint: CheckpointDir, name: str, limit_bytes: int | None) -> None:
        self.name = name
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
        self._joined_bytes += item.length
        if self._joined_bytes >= _BATCH_BYTES:
            self._write()

    def add_bytes(self, content: memoryview) -> None:
        """Adds bytes without a frame. They must not change before the file is closed."""
        if len(content) <= JOINED_BYTES:
            self._joined.append(content)
            self._joined_bytes += len(content)
        else:
            self._join()
            self._add_record(content)
        self._grow(len(content))
        self._write_if_full()

    def add_large(self, item: TensorArchive, payload: Iterable[torch.Tensor]) -> None:
        """Adds a tensor as consecutive pieces that are sent from their own memory: the tensor, or copies.

        A piece that is not a copy must not change before the file is closed. A copy is released when it has been sent.
        """
        self._join()
        self._pieces.append(item.before)
        first = self._records
        for piece in payload:
            self._add_record(memory_of(piece))
            self._write_if_full()
        records = (first, self._records)
        self._pieces += (DESCRIPTOR_MARK, records, item.middle, records, item.after)
        self._grow(item.length)

    def abort(self) -> None:
        """Aborts the upload."""
        self._native.abort()

    def _grow(self, length: int) -> None:
        self.offset, self.length = self.length, self.length + length

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

    def _take(self) -> list[Any]:
        """Returns the pieces of the current batch, and starts a new one."""
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces


def close_files(files: Sequence[ItemFile]) -> dict[str, int]:
    """Completes all files concurrently. Returns the CRC-32 of each, by name.

    Raises:
        StoreError: The error of the first file that failed, after the others have ended.
    """
    closed = _torchobj.close_gathers([(file._native, file._take()) for file in files])
    return {file.name: crc32 for file, (_, _, crc32) in zip(files, closed, strict=True)}
