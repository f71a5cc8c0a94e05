"""A large tensor on its way: ranges of its file straight into its memory, or tile by tile through a buffer."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj.checkpoint.dcp.foreign import Payload
from torchobj.checkpoint.dcp.item import DESCRIPTOR_MARK, descriptor_bytes
from torchobj.checkpoint.dcp.slices import Tile, runs_of, tiles_of
from torchobj.checkpoint.dcp.wanted import Wanted
from torchobj.checkpoint.memory import memory_of

__all__ = ["Step", "Transfer", "narrowed"]

#: Runs of a slice from here on are read each into its place; shorter ones with all that lies between them.
_RUN_BYTES = 4 << 10

#: The largest buffer.
_TILE_BYTES = 16 << 20


class Step(NamedTuple):
    """What is read at once."""

    segments: list[tuple[int, Any]]
    """Where each begins in the file, and the memory that it goes to."""
    temporary_bytes: int
    """How much of that is no target's."""
    tile: Tile | None
    """What is copied from the buffer; None where the bytes go to the target itself."""
    buffer: torch.Tensor | None
    """Of bytes."""
    is_dense: bool
    """Whether the buffer has the tile alone, and not what lies between its runs."""


class Transfer:
    """One tensor.

    Args:
        wanted: What is wanted, and where it goes. It is not empty.
        payload: Where the payload lies in the item; None where that is what the item's frame says.
        is_direct: Whether the target's memory may be read into.
    """

    def __init__(self, wanted: Wanted, payload: Payload | None, *, is_direct: bool) -> None:
        self.wanted = wanted
        self._is_direct = is_direct
        self._head, self._end = bytearray(), bytearray()
        self._crc32, self._known_crc32 = 0, 0
        self._frame: list[tuple[int, Any]] = []
        start = wanted.info.offset
        if payload is not None:
            self._offset, self._known_crc32 = start + payload.offset, payload.crc32
            return
        frame = wanted.frame
        assert frame is not None  # noqa: S101  the caller looked
        self._head, self._offset = bytearray(len(frame.before)), start + len(frame.before)
        self._frame.append((start, self._head))
        if wanted.is_whole:
            self._end = bytearray(descriptor_bytes(frame.payload_bytes))
            self._frame.append((self._offset + frame.payload_bytes, self._end))

    def steps(self) -> Iterator[Step]:
        """What is to be read, in order."""
        frame, self._left = self._frame, 1
        frame_bytes = len(self._head) + len(self._end)
        direct = self._direct_segments()
        if direct is not None:
            yield Step([*frame, *direct], frame_bytes, None, None, is_dense=True)
            return
        request, width = self.wanted.request, self.wanted.dtype.itemsize
        offsets, lengths = tuple(request.storage_offsets), tuple(request.lengths)
        tiles = list(tiles_of(tuple(self.wanted.shape), offsets, lengths, _TILE_BYTES // width))
        self._left = len(tiles)
        for tile in tiles:
            run, starts = runs_of(tile.shape, tile.inner, tile.lengths)
            is_dense = len(starts) == 1 or run * width >= _RUN_BYTES
            if not is_dense:
                run, starts = math.prod(tile.shape), [0]
            buffer = torch.empty(len(starts) * run * width, dtype=torch.uint8)
            segments = self._segments(run, [tile.start + start for start in starts], memory_of(buffer))
            yield Step([*frame, *segments], frame_bytes + buffer.nbytes, tile, buffer, is_dense)
            frame, frame_bytes = [], 0

    def _direct_segments(self) -> list[tuple[int, Any]] | None:
        """The runs of the slice in the target's memory; None where they cannot go there, or are too short."""
        memory, request = self.wanted.memory, self.wanted.request
        if memory is None or not self._is_direct:
            return None
        offsets, lengths = tuple(request.storage_offsets), tuple(request.lengths)
        run, starts = runs_of(tuple(self.wanted.shape), offsets, lengths)
        if len(starts) > 1 and run * self.wanted.dtype.itemsize < _RUN_BYTES:
            return None
        return self._segments(run, starts, memory_of(memory))

    def _segments(self, run: int, starts: list[int], memory: Any) -> list[tuple[int, Any]]:
        width = self.wanted.dtype.itemsize
        length = run * width
        return [
            (self._offset + start * width, memory[number * length : (number + 1) * length])
            for number, start in enumerate(starts)
        ]

    def take(self, step: Step, sums: Sequence[int]) -> bool:
        """Puts what was read to its place.

        Args:
            step: The step, in order.
            sums: The CRC-32 of each of its segments; none where checksums are not compared.

        Returns:
            Whether this was the last one.
        """
        if self.wanted.is_whole:
            for (offset, memory), crc32 in zip(step.segments, sums, strict=bool(sums)):
                if offset >= self._offset and memory is not self._end:
                    self._crc32 = _torchobj.crc32_joined(self._crc32, crc32, len(memory))
        if step.tile is None:
            target = self.wanted.target
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
        else:
            self._copy(step.tile, step)
        self._left -= 1
        return self._left == 0

    def _copy(self, tile: Tile, step: Step) -> None:
        assert step.buffer is not None  # noqa: S101  a step with a tile has one
        target, memory = self.wanted.target, self.wanted.memory
        saved = step.buffer.view(self.wanted.dtype if memory is None else memory.dtype)
        if step.is_dense:
            saved = saved.view(tile.lengths)
        else:
            saved = narrowed(saved.view(tile.shape), tile.inner, tile.lengths)
        narrowed(target if memory is None else memory, tile.outer, tile.lengths).copy_(saved)

    def is_as_expected(self) -> bool:
        """Whether the payload lay where the frame said; asked behind the last step."""
        frame = self.wanted.frame
        if not self._frame or frame is None:
            return True
        return self._head == frame.before and (not self._end or self._end.startswith(DESCRIPTOR_MARK))

    def is_sound(self) -> bool:
        """Whether the payload's CRC-32 is the one in the file, as far as both are known; asked behind the last step."""
        known = int.from_bytes(self._end[4:8], "little") if self._end else self._known_crc32
        return known in (0, self._crc32) or not self.wanted.is_whole


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A slice of a tensor, sharing its memory."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, length)
    return tensor
