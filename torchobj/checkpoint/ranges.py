"""An object whose ends are known: what is asked of it comes from there, or by one parallel read. Knows no format."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from torchobj import _torchobj

__all__ = ["RangedObject"]

#: Of the head and of the tail. The pickle and the directory of most checkpoints are smaller; so are many checkpoints.
END_BYTES = 256 << 10


class RangedObject:
    """One version of an object, its first and last bytes fetched by two parallel requests.

    Args:
        store, key: The object.
        url: Its URL, for messages.

    Raises:
        StoreError: As for any read.
    """

    def __init__(self, store: "_torchobj.NativeStore", key: str, url: str) -> None:
        self.url = url
        self._store, self._key = store, key
        head, tail, self.size, self._version = store.get_ends(key, END_BYTES, END_BYTES)
        # Any: before 3.12 Python has no type for the buffer protocol.
        self._head: Any = memoryview(head)  # type: ignore[arg-type]
        self._tail: Any = memoryview(tail)  # type: ignore[arg-type]

    def head(self) -> bytes:
        """Its first bytes, at most `END_BYTES`."""
        return bytes(self._head)

    def tail(self) -> bytes:
        """Its last bytes, at most `END_BYTES`."""
        return bytes(self._tail)

    def read(self, start: int, end: int) -> bytearray:
        """Bytes `start..end`."""
        memory = bytearray(end - start)
        self.read_into([(start, memory)])
        return memory

    def read_into(self, segments: Sequence[tuple[int, Any]], *, checksum: bool = False) -> list[int]:
        """Reads (offset, writable contiguous memory) pairs, in parallel and without a copy, those at its ends at once.

        Returns:
            The CRC-32 of each segment, in their order; nothing where none was asked for.

        Raises:
            RangeError: A segment ends behind the object's end.
            ObjectChangedError: The object is another one by now.
        """
        sums = [0] * len(segments)
        remote = []
        for number, (offset, memory) in enumerate(segments):
            view = memoryview(memory).cast("B")
            near = self._near(offset, len(view))
            if near is None:
                remote.append(number)
            else:
                view[:] = near
                sums[number] = crc32(near) if checksum else 0
        if remote:
            job = (self._store, self._key, self._version, [segments[number] for number in remote])
            [(_, _, remote_sums)] = _torchobj.scatter([job], checksum)
            if checksum:
                for number, value in zip(remote, remote_sums, strict=True):
                    sums[number] = value
        return sums if checksum else []

    def _near(self, offset: int, length: int) -> memoryview | None:
        """These bytes, if they lie in one of the ends."""
        for end, start in ((self._head, 0), (self._tail, self.size - len(self._tail))):
            if start <= offset and offset + length <= start + len(end):
                part: memoryview = end[offset - start : offset - start + length]
                return part
        return None
