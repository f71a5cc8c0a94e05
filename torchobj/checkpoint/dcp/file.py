"""One file of a checkpoint while it is written: items one behind the other, gathered from the tensors' own memory."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchobj import _torchobj
from torchobj.checkpoint.dcp.item import DESCRIPTOR_MARK, Item
from torchobj.checkpoint.dcp.manifest import WrittenFile
from torchobj.checkpoint.dcp.place import Place
from torchobj.checkpoint.files import NO_ATTRIBUTES
from torchobj.checkpoint.memory import memory_of

__all__ = ["JOINED_BYTES", "ItemFile", "close_files"]

#: Payloads up to it are copied together with what stands around them: seven pieces cost more than such a copy.
JOINED_BYTES = 16 << 10

#: So much is copied together, and then handed on.
_BATCH_BYTES = 1 << 20

#: And so many pieces.
_BATCH_PIECES = 1000


class ItemFile:
    """A file that appears by `close_files`, if nothing failed before.

    Args:
        place: The checkpoint's.
        name: Of the file, relative to the checkpoint.
        limit_bytes: How much of what is written may be on the way at once; None where it is the caller's own memory.
    """

    def __init__(self, place: Place, name: str, limit_bytes: int | None) -> None:
        self.name = name
        #: Where the item begins that was added last, and where it ends.
        self.offset = self.length = 0
        self._native = _torchobj.NativeGather(place.native, place.key(name), NO_ATTRIBUTES, limit_bytes=limit_bytes)
        # What is copied together, and the pieces that wait to be handed on with it.
        self._joined: list[Any] = []
        self._joined_bytes = 0
        self._pieces: list[Any] = []
        # Copies do not wait for others: nothing counts them before they are handed on.
        self._most_pieces = _BATCH_PIECES if limit_bytes is None else 1
        # Those that wait are counted too.
        self._records = 0

    def add_small(self, item: Item, payload: Any) -> None:
        """Adds a tensor that is copied before long: its memory, any contiguous buffer, is kept until then."""
        if item.payload_bytes == 0:
            self._joined.append(item.before)
        else:
            crc32 = zlib.crc32(payload).to_bytes(4, "little")
            self._joined += (item.before, payload, DESCRIPTOR_MARK, crc32, item.middle, crc32, item.after)
        self._grow(item.length)
        self._joined_bytes += item.length
        if self._joined_bytes >= _BATCH_BYTES:
            self._hand_on()

    def add_bytes(self, content: memoryview) -> None:
        """Adds bytes as they are. They are not to be changed before the file is closed."""
        if len(content) <= JOINED_BYTES:
            self._joined.append(content)
            self._joined_bytes += len(content)
        else:
            self._join()
            self._add_record(content)
        self._grow(len(content))
        self._hand_on_if_many()

    def add_large(self, item: Item, payload: torch.Tensor) -> None:
        """Adds a tensor whose memory is read when it is sent: it is not to be changed before the file is closed."""
        self._join()
        self._pieces.append(item.before)
        self._add_record(memory_of(payload))
        self._add_end(item, (self._records - 1, self._records))
        self._grow(item.length)
        self._hand_on_if_many()

    def add_pieces(self, item: Item, payload: Iterable[torch.Tensor]) -> None:
        """Adds a tensor whose memory comes in pieces, each of which is forgotten when it is sent."""
        self._join()
        self._pieces.append(item.before)
        first = self._records
        for piece in payload:
            self._add_record(memory_of(piece))
            self._hand_on()
        self._add_end(item, (first, self._records))
        self._grow(item.length)

    def abort(self) -> None:
        """Forgets what was written."""
        self._native.abort()

    def _grow(self, length: int) -> None:
        self.offset, self.length = self.length, self.length + length

    def _add_record(self, content: Any) -> None:
        self._pieces.append(content)
        self._records += 1

    def _add_end(self, item: Item, records: tuple[int, int]) -> None:
        """What stands behind a payload that was added as these records."""
        self._pieces += (DESCRIPTOR_MARK, records, item.middle, records, item.after)

    def _join(self) -> None:
        """Copies what waits for it into one literal."""
        if self._joined:
            self._pieces.append(b"".join(self._joined))
            self._joined, self._joined_bytes = [], 0

    def _hand_on_if_many(self) -> None:
        if len(self._pieces) >= self._most_pieces:
            self._hand_on()

    def _hand_on(self) -> None:
        pieces = self._take()
        if pieces:
            self._native.write(pieces)

    def _take(self) -> list[Any]:
        """What waits to be handed on."""
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces


def close_files(files: Sequence[ItemFile]) -> list[WrittenFile]:
    """Makes the objects, at a time. When this returns all of each is stored.

    Raises:
        StoreError: What kept a part, or the end, of the first that failed from succeeding. The others are waited for.
    """
    closed = _torchobj.close_gathers([(file._native, file._take()) for file in files])
    return [
        WrittenFile(file.name, size, version, crc32) for file, (version, size, crc32) in zip(files, closed, strict=True)
    ]
