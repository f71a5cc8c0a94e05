"""What is read by one call: segments of many files, small items through a buffer, large ones into their memory."""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchobj import _torchobj
from torchobj.checkpoint.collector import paused_collector
from torchobj.checkpoint.dcp.item import DESCRIPTOR_MARK, descriptor_bytes
from torchobj.checkpoint.dcp.place import Place
from torchobj.checkpoint.dcp.transfer import narrowed
from torchobj.checkpoint.dcp.wanted import Wanted
from torchobj.exceptions import CheckpointError, IntegrityError, RangeError

__all__ = ["ShortFileError", "Wave", "damaged"]

#: Payloads begin at multiples of it in the buffer of small items, as a view of any dtype wants them.
_ALIGNMENT = 16

#: How the descriptor behind a payload begins: its mark, and the checksum.
_DESCRIPTOR = struct.Struct("<4sI")

_Segments = list[tuple[int, Any]]


class ShortFileError(CheckpointError, RangeError):
    """The metadata names bytes behind the end of a file: one of the two is damaged."""


class Wave:
    """Collects what is to be read, and reads it.

    Args:
        place: The checkpoint's.
        files: By the names of files the version that must answer, and the size; those that are read first are added.
        verify: Whether checksums are compared.
    """

    def __init__(self, place: Place, files: dict[str, tuple[str | None, int]], *, verify: bool) -> None:
        self._place = place
        self._files = files
        self._verify = verify
        self._segments: dict[str, _Segments] = {}
        self._small: list[Wanted] = []
        # Where each begins in the buffer, and where the last one ends. No tuples: the collector would look at each.
        self._positions = [0]
        self._finishes: list[tuple[str, int, int, Callable[[Sequence[int]], None]]] = []
        #: Memory that it needs beside the targets', in bytes.
        self.temporary_bytes = 0

    def add_small(self, wanted: Wanted) -> None:
        """Adds an item that has a frame, to be read whole and copied."""
        frame = wanted.frame
        assert frame is not None  # noqa: S101  the caller looked
        length = len(frame.before) + frame.payload_bytes + descriptor_bytes(frame.payload_bytes)
        # Rounded up: what stands behind a descriptor is longer.
        room = length + -length % _ALIGNMENT
        self._small.append(wanted)
        self._positions.append(self._positions[-1] + room)
        self.temporary_bytes += room

    def add(
        self, name: str, segments: _Segments, temporary_bytes: int, finish: Callable[[Sequence[int]], None]
    ) -> None:
        """Adds segments of a file.

        Args:
            name: Of the file.
            segments: Where they begin, and the memory that each goes to.
            temporary_bytes: How much of that is no target's.
            finish: Is called when they are there, with the CRC-32 of each where checksums are compared.
        """
        into = self._segments.setdefault(name, [])
        self._finishes.append((name, len(into), len(segments), finish))
        into += segments
        self.temporary_bytes += temporary_bytes

    def read(self) -> tuple[list[Wanted], list[Wanted]]:
        """Reads everything.

        Returns:
            The small items that are in their targets, and those that are framed otherwise than was expected.

        Raises:
            IntegrityError: A checksum is another; the message names tensor and file.
            ShortFileError: A file ends before what is to be read of it.
            ObjectChangedError: A file is not of the version that was read before.
            StoreError: What could not be read.
        """
        buffer = self._add_small_segments()
        jobs = [
            (self._place.native, self._place.key(name), self._files.get(name, (None, 0))[0], segments)
            for name, segments in self._segments.items()
        ]
        if jobs:
            try:
                results = _torchobj.scatter(jobs, self._verify and bool(self._finishes))
            except RangeError as error:
                raise _short(self._place, error) from error
            sums = {}
            for name, (version, size, sums_of_file) in zip(self._segments, results, strict=True):
                sums[name] = sums_of_file
                self._files[name] = (version, size)
            for name, first, count, finish in self._finishes:
                finish(sums[name][first : first + count])
        return self._copy_small(buffer)

    @paused_collector()
    def _add_small_segments(self) -> bytearray:
        """Gives each small item a place in a new buffer."""
        positions, segments = self._positions, self._segments
        buffer = bytearray(positions[-1])
        view = memoryview(buffer)
        for wanted, start, end in zip(self._small, positions, positions[1:], strict=False):
            info = wanted.info
            into = segments.get(info.relative_path)
            if into is None:
                into = segments[info.relative_path] = []
            into.append((info.offset, view[start:end]))
        return buffer

    @paused_collector()
    def _copy_small(self, buffer: bytearray) -> tuple[list[Wanted], list[Wanted]]:
        copied: list[Wanted] = []
        others: list[Wanted] = []
        view, content = memoryview(buffer), _Buffer(buffer)
        for wanted, position in zip(self._small, self._positions, strict=False):
            frame = wanted.frame
            assert frame is not None  # noqa: S101  add_small looked
            start = position + len(frame.before)
            end = start + frame.payload_bytes
            mark, crc32 = _DESCRIPTOR.unpack_from(buffer, end)
            if mark != DESCRIPTOR_MARK or not buffer.startswith(frame.before, position):
                others.append(wanted)
                continue
            if self._verify and crc32 and zlib.crc32(view[start:end]) != crc32:
                raise damaged(self._place, wanted)
            content.copy_to(wanted, start, frame.payload_bytes)
            copied.append(wanted)
        return copied, others


class _Buffer:
    """The bytes of small items, as tensors of any dtype."""

    def __init__(self, content: bytearray) -> None:
        self._content = content
        # Views of all of it: to make a tensor of a part from one takes a quarter of what it takes from the bytes.
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def copy_to(self, wanted: Wanted, start: int, length: int) -> None:
        """Copies a chunk whose payload is `start..start + length`, or the slice of it that is wanted, to its target."""
        memory = wanted.memory
        dtype = wanted.dtype if memory is None else memory.dtype
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = torch.frombuffer(self._content, dtype=dtype)
        first = start // dtype.itemsize
        if wanted.is_whole and memory is not None:
            memory.copy_(view.as_strided(wanted.shape, memory.stride(), first))
            return
        saved = view.narrow(0, first, length // dtype.itemsize).view(wanted.shape)
        saved = narrowed(saved, wanted.request.storage_offsets, wanted.request.lengths)
        (wanted.target if memory is None else memory).copy_(saved)


def _short(place: Place, error: RangeError) -> ShortFileError:
    short = ShortFileError(f"{place.url}: the metadata names bytes that a file does not have: {error}")
    vars(short).update(vars(error))
    return short


def damaged(place: Place, wanted: Wanted) -> IntegrityError:
    """The error of a tensor whose bytes are not what was written."""
    where = f"{place.url_of(wanted.info.relative_path)} at {wanted.info.offset}"
    return IntegrityError(f"{where}: {wanted.name} is not what was written: its CRC-32 is another")
