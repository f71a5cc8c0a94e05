"""Reads what a rank's plan asks for: chooses for each item how its bytes come to their memory, in waves."""

import bisect
import io
import math
import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torchobj import _torchobj
from torchobj.checkpoint.collector import paused_collector
from torchobj.checkpoint.dcp.asking import destination
from torchobj.checkpoint.dcp.foreign import (
    END_BYTES,
    check_archive,
    check_packed,
    is_transformed,
    payload_in,
    untransformed,
)
from torchobj.checkpoint.dcp.item import item_of, pickle_of
from torchobj.checkpoint.dcp.limits import check_apart, unpacked_limit
from torchobj.checkpoint.dcp.place import Place
from torchobj.checkpoint.dcp.transfer import Step, Transfer, narrowed
from torchobj.checkpoint.dcp.wanted import Directory, Wanted
from torchobj.checkpoint.dcp.wave import ShortFileError, Wave, damaged
from torchobj.exceptions import CheckpointError, TorchobjError

__all__ = ["read_items"]

#: Payloads up to it are read whole, with what stands around them, and copied.
_SMALL_BYTES = 16 << 10

#: Memory that is no target's: so much in a wave, before one more piece.
_WAVE_BYTES = 48 << 20

#: Items up to it are read without a look at the size of their file: a wave of them is not more than `_WAVE_BYTES`.
_UNCHECKED_BYTES = 1 << 20

#: What a planner meets in bytes that are no saved value.
_DAMAGED = (pickle.UnpicklingError, EOFError, MemoryError, OverflowError, RecursionError, ValueError)

#: So many items that others framed are looked at together: 32 MiB of their ends.
_LOOKED_ITEMS = (16 << 20) // END_BYTES


class _Reading:
    """One rank's plan while it is read."""

    def __init__(self, place: Place, planner: LoadPlanner, *, verify: bool) -> None:
        self._place = place
        self._planner = planner
        self._verify = verify
        # Writers that are not ours use the names of files again: another save may replace one between two waves.
        self._files: dict[str, tuple[str | None, int]] = {}
        self._wave = Wave(place, self._files, verify=verify)
        #: What is framed otherwise than was expected.
        self._foreign: list[Wanted] = []
        self._done: list[Wanted] = []
        #: First and end address of each memory that is read into, none of which shares any with another; sorted.
        self._spans: list[tuple[int, int]] = []

    def read(self, tensors: list[Wanted], others: list[tuple[ReadItem, _StorageInfo]]) -> None:
        for request, info in others:
            self._add_other(request, info)
        for wanted in tensors:
            self._add(wanted)
        self._read_wave()
        foreign, self._foreign = self._foreign, []
        for start in range(0, len(foreign), _LOOKED_ITEMS):
            self._read_foreign(foreign[start : start + _LOOKED_ITEMS])
        for wanted in self._done:
            self._planner.commit_tensor(wanted.request, wanted.target)

    def _read_if_full(self) -> None:
        if self._wave.temporary_bytes >= _WAVE_BYTES:
            self._read_wave()

    def _read_wave(self) -> None:
        wave, self._wave = self._wave, Wave(self._place, self._files, verify=self._verify)
        copied, others = wave.read()
        self._done += copied
        self._foreign += others

    def _add_other(self, request: ReadItem, info: _StorageInfo) -> None:
        """Adds an object that is no tensor."""
        content = self._memory_for(info, request.storage_index.fqn)

        def finish(_sums: Sequence[int]) -> None:
            plain = self._sound(request, info, content, 0)
            try:
                self._planner.load_bytes(request, io.BytesIO(plain))
            except TorchobjError:
                raise
            except _DAMAGED as error:
                where = f"{self._place.url_of(info.relative_path)} at {info.offset}"
                message = f"{where}: {request.storage_index.fqn} cannot be loaded: {type(error).__name__}: {error}"
                raise CheckpointError(message) from error

        self._wave.add(info.relative_path, [(info.offset, content)], len(content), finish)
        self._read_if_full()

    def _memory_for(self, info: _StorageInfo, name: str) -> bytearray:
        """Memory for an item; of a large one the length is compared with the size of its file first."""
        if info.length > _UNCHECKED_BYTES:
            if info.relative_path not in self._files:
                key, nothing = self._place.key(info.relative_path), list[tuple[int, bytearray]]()
                [(version, size, _)] = _torchobj.scatter([(self._place.native, key, None, nothing)], checksum=False)
                self._files[info.relative_path] = (version, size)
            size = self._files[info.relative_path][1]
            if info.offset + info.length > size:
                url = self._place.url_of(info.relative_path)
                claim = f"the metadata says that {name} has {info.length} bytes at {info.offset}"
                raise ShortFileError(f"{url}: has {size} bytes, and {claim}")
        return bytearray(info.length)

    def _sound(self, request: ReadItem, info: _StorageInfo, content: bytearray, known_bytes: int) -> bytes | bytearray:
        """What was saved as `content`, which is to hold so many bytes of a tensor; its sums compared."""
        name = f"{self._place.url_of(info.relative_path)} at {info.offset}: {request.storage_index.fqn}"
        limit = unpacked_limit(known_bytes)
        plain = untransformed(content, info, limit, name)
        check_packed(plain, limit, name)
        if self._verify:
            check_archive(plain, name)
        return plain

    def _add(self, wanted: Wanted) -> None:
        if wanted.target.numel() == 0:
            self._done.append(wanted)
        elif wanted.frame is None or not wanted.frame.payload_bytes or is_transformed(wanted.info):
            self._foreign.append(wanted)
        elif wanted.frame.payload_bytes <= _SMALL_BYTES:
            self._wave.add_small(wanted)
            self._read_if_full()
        else:
            self._add_transfer(Transfer(wanted, None, is_direct=self._is_alone(wanted)))

    def _is_alone(self, wanted: Wanted) -> bool:
        """Whether the target's memory may be read into: nothing else is, as it would be with tied weights."""
        if wanted.memory is None:
            return False
        start = wanted.memory.data_ptr()
        end = start + wanted.memory.nbytes
        place = bisect.bisect(self._spans, (start, end))
        if place and self._spans[place - 1][1] > start:
            return False
        if place < len(self._spans) and self._spans[place][0] < end:
            return False
        self._spans.insert(place, (start, end))
        return True

    def _add_transfer(self, transfer: Transfer) -> None:
        for step in transfer.steps():
            self._add_step(transfer, step)
            self._read_if_full()

    def _add_step(self, transfer: Transfer, step: Step) -> None:
        wanted = transfer.wanted

        def finish(sums: Sequence[int]) -> None:
            if not transfer.take(step, sums):
                return
            if not transfer.is_as_expected():
                self._foreign.append(wanted)
                return
            if self._verify and not transfer.is_sound():
                raise damaged(self._place, wanted)
            self._done.append(wanted)

        self._wave.add(wanted.info.relative_path, step.segments, step.temporary_bytes, finish)

    def _read_foreign(self, foreign: list[Wanted]) -> None:
        """Reads what others framed: first both ends of each item, then what these say."""
        looked: list[tuple[Wanted, bytearray, bytearray]] = []
        for wanted in foreign:
            length = 0 if is_transformed(wanted.info) else min(wanted.info.length, END_BYTES)
            head, tail = bytearray(length), bytearray(length)
            looked.append((wanted, head, tail))
            if length:
                start, end = wanted.info.offset, wanted.info.offset + wanted.info.length
                # Where both are all of the item, once.
                segments = [(start, head)] if length == wanted.info.length else [(start, head), (end - length, tail)]
                self._wave.add(wanted.info.relative_path, segments, 2 * length, lambda _sums: None)
                self._read_if_full()
        self._read_wave()
        for wanted, head, tail in looked:
            self._add_looked(wanted, bytes(head), bytes(tail))
        self._read_wave()

    def _add_looked(self, wanted: Wanted, head: bytes, tail: bytes) -> None:
        payload, expected = None, pickle_of(wanted.dtype, wanted.shape)
        if head and expected is not None:
            frame = item_of(wanted.dtype, wanted.shape)
            size = 0 if frame is None else frame.payload_bytes
            payload = payload_in(
                head, tail if len(head) < wanted.info.length else b"", wanted.info.length, expected, size
            )
        if payload is not None:
            self._add_transfer(Transfer(wanted, payload, is_direct=self._is_alone(wanted)))
            return
        content = self._memory_for(wanted.info, wanted.name)

        def finish(_sums: Sequence[int]) -> None:
            self._put_loaded(wanted, content)

        self._wave.add(wanted.info.relative_path, [(wanted.info.offset, content)], len(content), finish)
        self._read_if_full()

    def _put_loaded(self, wanted: Wanted, content: bytearray) -> None:
        """Puts a tensor that torch alone can load."""
        request, known_bytes = wanted.request, math.prod(wanted.shape) * wanted.dtype.itemsize
        plain = self._sound(request, wanted.info, content, known_bytes)
        try:
            tensor = torch.load(io.BytesIO(plain), map_location="cpu", weights_only=True)
            with torch.no_grad():
                wanted.target.copy_(narrowed(tensor, request.storage_offsets, request.lengths))
        except Exception as error:
            where = f"{self._place.url_of(wanted.info.relative_path)} at {wanted.info.offset}"
            raise CheckpointError(f"{where}: {wanted.name} cannot be loaded: {error}") from error
        self._done.append(wanted)


def read_items(
    place: Place, directory: Directory, items: list[ReadItem], planner: LoadPlanner, *, verify: bool
) -> None:
    """Reads the items of a rank into what the planner says.

    All destinations are asked of the planner first, on this thread; then everything is read in parallel, in few calls.

    Args:
        place: The checkpoint's.
        directory: Where everything lies there.
        items: What to read.
        planner: Of torch's.
        verify: Whether checksums are compared, where an item is read whole.

    Raises:
        IntegrityError: Bytes are not what was written; the message names tensor and file.
        CheckpointError: The checkpoint cannot hold what is asked for.
        ObjectChangedError: Another save has replaced a file meanwhile.
        StoreError: What could not be read.
    """
    tensors: list[Wanted] = []
    others: list[tuple[ReadItem, _StorageInfo]] = []
    with paused_collector():
        resolve = destination(planner)
        for request in items:
            if request.type is LoadItemType.BYTE_IO:
                others.append((request, directory.info(request)))
            else:
                tensors.append(directory.wanted(request, resolve))
        infos = [info for _, info in others] + [wanted.info for wanted in tensors]
        check_apart(infos, place.url)
    _Reading(place, planner, verify=verify).read(tensors, others)
