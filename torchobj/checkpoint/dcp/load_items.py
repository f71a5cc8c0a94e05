"""Loads the items of one rank: resolves their destinations, hands one plan of reads to Rust, and copies what it read.

An item with the frame that this torch writes is read without its archive: up to `_SMALL_BYTES` through the buffer of a
wave, otherwise into the memory of its tensor. One in a file of safetensors has no frame. Of an item with another frame,
both ends are read first, to find the payload in its archive. torch loads what remains: values, quantized tensors, and
items that an extension transformed.
"""

import collections
import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torchobj import _torchobj
from torchobj.checkpoint.archive.device_memory import is_reachable
from torchobj.checkpoint.archive.pickling import message_of
from torchobj.checkpoint.archive.plan import TensorArchive, is_memory, tensor_archive
from torchobj.checkpoint.checkpoint_dir import CheckpointDir, is_canonical
from torchobj.checkpoint.dcp.metadata import MAX_NUMBER, TensorRange
from torchobj.checkpoint.dcp.other_formats import END_BYTES, check_archive, is_transformed, payload_in, untransformed
from torchobj.checkpoint.dcp.replicated import FramedRange, ReplicatedItems
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, IntegrityError, RangeError, TorchobjError
from torchobj.ranks.shared_read.reads import Reads, read_with
from torchobj.store.concurrency import concurrently
from torchobj.store.tensor_memory import memory_of
from torchobj.store.transfers import ByteProgress

__all__ = ["ShortFileError", "load_items", "narrowed"]

#: Payloads up to this size are read with their frames into the buffer of a wave, and copied.
_SMALL_BYTES = 16 << 10

#: A wave ends when its buffer reaches this size. Only small tensors of the CPU pass through waves, but all of a GPU:
#: then the next wave is read while one is copied.
_WAVE_BYTES = 48 << 20
_DEVICE_WAVE_BYTES = 128 << 20

#: Maximum size of a tile of a slice that is read through the buffer.
_TILE_BYTES = 16 << 20

#: Number of items whose ends are held in memory together: 32 MiB.
_MAX_ENDS = (16 << 20) // END_BYTES

#: Maximum size of an unpacked item in addition to its tensor. torch compresses nothing, except through extensions.
_UNPACKED_BYTES = 256 << 20

#: What a planner raises for bytes that are not a saved value.
_DAMAGED = (pickle.UnpicklingError, EOFError, MemoryError, OverflowError, RecursionError, ValueError)


class ShortFileError(CheckpointError, RangeError):
    """The metadata names bytes beyond the end of a file: one of the two is damaged."""


def _short_file(url: str, error: RangeError) -> ShortFileError:
    # A variable of the caller would be a reference cycle with its traceback, which keeps the targets.
    short = ShortFileError(f"{url}: the metadata names bytes that a file does not have: {error}")
    vars(short).update(vars(error))
    return short


class _TensorItem(NamedTuple):
    """A slice of a saved chunk, and its destination."""

    request: ReadItem
    info: _StorageInfo
    dtype: torch.dtype
    """Dtype of the saved chunk."""
    shape: torch.Size
    """Shape of the saved chunk."""
    target: torch.Tensor
    memory: torch.Tensor | None
    """The target, if its memory can receive the saved bytes as they are."""
    frame: TensorArchive | None
    """The archive of the chunk if torchobj or this torch wrote it; None if it is known to be another one, or none."""

    @property
    def name(self) -> str:
        return self.request.storage_index.fqn


class _Content(NamedTuple):
    """Bytes of a file that a function processes."""

    length: int
    process: Callable[[bytes], None]


class _Load:
    """The load of one rank's items."""

    def __init__(
        self,
        checkpoint: CheckpointDir,
        metadata: Metadata,
        planner: LoadPlanner,
        *,
        verify: bool,
        counted: ByteProgress,
        config: StoreConfig | None,
    ) -> None:
        self._config = config
        self._checkpoint, self._url = checkpoint, checkpoint.url
        self._counted = counted
        self._metadata = metadata
        self._planner = planner
        self._verify = verify
        #: Shapes of the chunks of a tensor, by its name and their offsets.
        self._chunks: dict[str, dict[torch.Size, torch.Size]] = {}
        #: The reads of the plan, by number.
        self._reads: list[_TensorItem | _Content] = []
        #: Numbers of those that the plan may read into the memory of their tensors.
        self._direct: set[int] = set()
        #: Tensors in another archive than expected.
        self._other: list[_TensorItem] = []
        self._loaded: list[_TensorItem] = []

    def load(self, requests: list[ReadItem], replicated: Sequence[ReplicatedItems]) -> None:
        try:
            self._load(requests, replicated)
        finally:
            # They refer to this object: without this, the tensors would live until the next garbage collection.
            self._reads.clear()

    def _load(self, requests: list[ReadItem], replicated: Sequence[ReplicatedItems]) -> None:
        infos = [self._info(request) for request in requests]
        targets = [
            None if request.type is LoadItemType.BYTE_IO else self._planner.resolve_tensor(request)
            for request in requests
        ]
        self._reads_ahead = any(target is not None and not is_reachable(target.device) for target in targets)
        checkpoint, wave_bytes = self._checkpoint, _DEVICE_WAVE_BYTES if self._reads_ahead else _WAVE_BYTES
        # Files of safetensors have no checksums.
        verify = self._verify and not all(isinstance(info, TensorRange) for info in infos)
        self._plan = _torchobj.NativeSlicePlan(checkpoint.native, checkpoint.key(""), verify, wave_bytes, _TILE_BYTES)
        items = [
            None if target is None else self._tensor(request, info, target)
            for request, info, target in zip(requests, infos, targets, strict=True)
        ]
        check_apart(infos, self._url)
        expected = sum(
            info.length if target is None else target.numel() * target.element_size()
            for info, target in zip(infos, targets, strict=True)
        )
        self._counted.expect(expected)
        left = set(range(len(items)))
        for group in replicated:
            asked = {index: item for index in group.items if (item := items[index]) is not None}
            loaded = self._load_replicated(asked, read_with(group.peers, self._url, self._config))
            done = sum(asked[index].target.nbytes for index in loaded)
            self._counted.add(done)
            expected -= done
            left -= loaded
        for index in sorted(left):
            request, info, item = requests[index], infos[index], items[index]
            if item is None:
                self._add_content(info, functools.partial(self._load_value, request, info))
            else:
                self._add(item)
        self._read()
        others, self._other = self._other, []
        for start in range(0, len(others), _MAX_ENDS):
            self._load_other(others[start : start + _MAX_ENDS])
        for item in self._loaded:
            self._planner.commit_tensor(item.request, item.target)
        self._counted.add(expected)

    def _load_replicated(self, group: Mapping[int, _TensorItem], reads: Reads) -> set[int]:
        """Reads the items of a group that can be read whole into their memory, with the ranks that read them as well.

        Returns:
            The indices of the items that are loaded.
        """
        ranges = {
            index: (item, FramedRange(item.info.offset, item.frame, memory))
            for index, item, memory in _apart(group)
            if _is_shareable(item)
        }
        if not ranges:
            return set()
        files: dict[str, list[tuple[int, Any]]] = {}
        for item, part in ranges.values():
            files.setdefault(item.info.relative_path, []).extend(part.ranges())
        keys = {name: self._checkpoint.key(name) for name in files}
        infos = [item.info for item, _ in ranges.values()]
        versions = {info.relative_path: info.version if isinstance(info, TensorRange) else None for info in infos}
        native = self._checkpoint.native
        for name, outcome in concurrently(
            lambda name: native.head(keys[name])[1], [n for n in keys if not versions[n]]
        ):
            if isinstance(outcome, Exception):
                raise outcome
            versions[name] = outcome
        jobs = [(native, keys[name], versions[name], segments) for name, segments in files.items()]
        sums = reads.read(jobs, checksum=self._verify, arrived=self._counted.arrived)
        of_file = {name: iter(of_job) for name, of_job in zip(files, sums, strict=True)}
        loaded = set()
        for index, (item, part) in ranges.items():
            crc32 = next(of_file[item.info.relative_path], 0)
            for _ in part.ranges()[1:]:
                next(of_file[item.info.relative_path], 0)
            if part.has_other_frame():
                continue
            if self._verify and part.is_damaged(crc32):
                raise self._damaged(item)
            if not item.target.is_inference():
                torch.autograd.graph.increment_version(item.target)
            self._loaded.append(item)
            loaded.add(index)
        return loaded

    def _damaged(self, item: _TensorItem) -> IntegrityError:
        message = "damaged: its CRC-32 is not that of the saved bytes; load another checkpoint"
        return IntegrityError(f"{self._name(item.info, item.name)}: {message}")

    def _info(self, request: ReadItem) -> _StorageInfo:
        """Returns file, offset and length of a requested item.

        Raises:
            CheckpointError: The metadata has none, or they are not a range of a file.
        """
        name, info = request.storage_index.fqn, self._metadata.storage_data.get(request.storage_index)
        if info is None:
            raise CheckpointError(f"{self._url}: the metadata names no file for {name}")
        # An unpickled object lacks fields that the pickle omits.
        path, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
        if (
            not isinstance(info, _StorageInfo)
            or type(path) is not str
            or type(offset) is not int
            or type(length) is not int
            or not 0 <= offset <= MAX_NUMBER
            or not 0 <= length <= MAX_NUMBER - offset
            or not is_canonical(path)
        ):
            raise CheckpointError(f"{self._url}: the metadata has no valid file, offset and length for {name}")
        return info

    def _tensor(self, request: ReadItem, info: _StorageInfo, target: torch.Tensor) -> _TensorItem:
        """Returns a requested tensor with its destination.

        Raises:
            CheckpointError: The metadata does not describe it, or the destination has another size.
        """
        dtype, shape = self._chunk(request.storage_index)
        # A detached inference tensor can be written to. A detached sparse tensor would not share new elements.
        is_plain = type(target) is torch.Tensor and not target.requires_grad and not target.is_inference()
        if target.layout is torch.strided and not is_plain:
            target = target.detach()
        if target.size() != request.lengths:
            name, sizes = request.storage_index.fqn, f"{tuple(target.size())}, not {tuple(request.lengths)}"
            raise CheckpointError(f"{self._url}: the destination of {name} is of size {sizes}")
        memory = target if target.dtype == dtype and is_memory(target) else None
        frame = None if isinstance(info, TensorRange) else tensor_archive(dtype, shape)
        is_expected = frame is not None and frame.length == info.length
        return _TensorItem(request, info, dtype, shape, target, memory, frame if is_expected else None)

    def _chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """Returns dtype and shape of a saved chunk."""
        described: Any = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointError(f"{self._url}: {index.fqn} is not a tensor in the checkpoint")
        chunks = described.chunks
        if len(chunks) == 1:
            return described.properties.dtype, chunks[0].sizes
        sizes = self._chunks.get(index.fqn)
        if sizes is None:
            sizes = self._chunks[index.fqn] = {chunk.offsets: chunk.sizes for chunk in chunks}
        if index.offset not in sizes:
            raise CheckpointError(f"{self._url}: has no chunk of {index.fqn} at {index.offset}")
        return described.properties.dtype, sizes[index.offset]

    def _add(self, item: _TensorItem) -> None:
        frame, info = item.frame, item.info
        if item.target.numel() == 0:
            self._loaded.append(item)
        elif isinstance(info, TensorRange):
            if info.length <= _SMALL_BYTES:
                self._reads.append(item)
                self._plan.add_array(info.relative_path, info.offset, None, info.length)
            else:
                self._add_slice(item, info.offset, None, 0)
        elif frame is None or not frame.payload_bytes or is_transformed(info):
            self._other.append(item)
        elif frame.payload_bytes <= _SMALL_BYTES:
            self._reads.append(item)
            self._plan.add_array(info.relative_path, info.offset, frame.before, frame.payload_bytes)
        else:
            self._add_slice(item, info.offset, frame.before, 0)

    def _add_slice(self, item: _TensorItem, offset: int, before: bytes | None, crc32: int) -> None:
        request, memory = item.request, None if item.memory is None else memory_of(item.memory)
        if memory is not None:
            self._direct.add(len(self._reads))
        box = (item.shape, request.storage_offsets, request.lengths, item.dtype.itemsize)
        self._reads.append(item)
        self._plan.add_slice(item.info.relative_path, offset, before, crc32, *box, memory)

    def _add_content(
        self, info: _StorageInfo, process: Callable[[bytes], None], start: int = 0, length: int | None = None
    ) -> None:
        content = _Content(info.length if length is None else length, process)
        self._reads.append(content)
        self._plan.add_array(info.relative_path, info.offset + start, None, content.length)

    def _read(self) -> None:
        """Executes all reads of the plan."""
        if not self._reads_ahead:
            while (wave := self._next_wave()) is not None:
                self._copy_wave(wave)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="torchobj-device") as reader:
            reading = reader.submit(self._next_wave)
            while (wave := reading.result()) is not None:
                reading = reader.submit(self._next_wave)
                self._copy_wave(wave)

    def _next_wave(self) -> _torchobj.NativeWave | None:
        try:
            return self._plan.read(self._counted.arrived)
        except RangeError as error:
            raise _short_file(self._checkpoint.url, error) from error

    def _copy_wave(self, wave: _torchobj.NativeWave) -> None:
        for number in wave.damaged:
            read = self._reads[number]
            assert isinstance(read, _TensorItem)  # noqa: S101  the plan knows no CRC-32 of other contents
            raise self._damaged(read)
        buffer = wave.buffer
        view, views = memoryview(buffer), dict[torch.dtype, torch.Tensor]()
        tiles: Any = itertools.chain(zip(wave.arrays, wave.starts, itertools.repeat(None)), wave.tiles)
        for number, start, tile in tiles:
            read = self._reads[number]
            if isinstance(read, _Content):
                read.process(bytes(view[start : start + read.length]))
                continue
            # One view of the buffer for each dtype: a view of a part of it takes a quarter of the time.
            saved = views.get(read.dtype)
            if saved is None:
                saved = views[read.dtype] = torch.frombuffer(buffer, dtype=read.dtype)
            _copy(read, saved, start // read.dtype.itemsize, tile)
        for number in wave.complete:
            read = self._reads[number]
            if isinstance(read, _TensorItem):
                self._loaded.append(read)
                if number in self._direct and not read.target.is_inference():
                    torch.autograd.graph.increment_version(read.target)
        self._other += (
            read for read in map(self._reads.__getitem__, wave.other_frame) if isinstance(read, _TensorItem)
        )

    def _name(self, info: _StorageInfo, name: str) -> str:
        return f"{self._checkpoint.url_of(info.relative_path)} at {info.offset}: {name}"

    def _load_other(self, others: list[_TensorItem]) -> None:
        """Loads tensors in any archive: reads both ends of each, and then what these locate."""
        ends: list[list[bytes]] = [[] for _ in others]
        for item, parts in zip(others, ends, strict=True):
            length = min(item.info.length, END_BYTES)
            for start in () if is_transformed(item.info) else sorted({0, item.info.length - length}):
                self._add_content(item.info, parts.append, start, length)
        self._read()
        for item, parts in zip(others, ends, strict=True):
            payload, expected = None, tensor_archive(item.dtype, item.shape)
            if expected is not None and any(parts):
                payload = payload_in(parts[0], b"".join(parts[1:]), item.info.length, expected)
            if payload is not None:
                self._add_slice(item, item.info.offset + payload.offset, None, payload.crc32)
            else:
                self._add_content(item.info, functools.partial(self._load_tensor, item))
        self._read()

    def _unpacked(self, info: _StorageInfo, name: str, content: bytes, known_bytes: int) -> bytes:
        """Returns what was saved as `content`, with at most about `known_bytes` of a tensor; compares its sums."""
        limit = known_bytes + _UNPACKED_BYTES
        plain = untransformed(content, info, limit, self._name(info, name))
        check_archive(plain, limit, self._name(info, name), verify=self._verify)
        return plain

    def _load_value(self, request: ReadItem, info: _StorageInfo, content: bytes) -> None:
        name = request.storage_index.fqn
        plain = self._unpacked(info, name, content, 0)
        try:
            self._planner.load_bytes(request, io.BytesIO(plain))
        except TorchobjError:
            raise
        except _DAMAGED as error:
            message = f"{self._name(info, name)} cannot be loaded: {type(error).__name__}: {message_of(error)}"
            raise CheckpointError(message) from error

    def _load_tensor(self, item: _TensorItem, content: bytes) -> None:
        """Loads a tensor that only torch can load."""
        plain = self._unpacked(item.info, item.name, content, math.prod(item.shape) * item.dtype.itemsize)
        request = item.request
        try:
            tensor = torch.load(io.BytesIO(plain), map_location="cpu", weights_only=True)
            with torch.no_grad():
                item.target.copy_(narrowed(tensor, request.storage_offsets, request.lengths))
        except Exception as error:
            raise CheckpointError(
                f"{self._name(item.info, item.name)} cannot be loaded: {message_of(error)}"
            ) from error
        self._loaded.append(item)


def _apart(group: Mapping[int, _TensorItem]) -> Iterator[tuple[int, _TensorItem, Any]]:
    """Yields index, item and memory of the items that have memory on the CPU, and share it with no other item."""
    found = [(index, item, item.memory) for index, item in group.items() if item.memory is not None]
    last_end = 0
    for index, item, memory in sorted(found, key=lambda each: each[2].data_ptr()):
        if memory.data_ptr() >= last_end:
            yield index, item, memory_of(memory)
            last_end = memory.data_ptr() + memory.nbytes


def _is_shareable(item: _TensorItem) -> bool:
    """Returns whether the bytes of a whole saved tensor are those of the target's memory, and are not few."""
    nbytes, info = item.target.nbytes, item.info
    is_framed = item.frame is not None and item.frame.payload_bytes == nbytes and not is_transformed(info)
    return nbytes > _SMALL_BYTES and item.request.lengths == item.shape and (isinstance(info, TensorRange) or is_framed)


_Tile = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]


def _copy(item: _TensorItem, saved: torch.Tensor, first: int, tile: _Tile | None) -> None:
    """Copies the chunk of an item, or a tile of its slice, whose first element is `first` of `saved`."""
    request, target = item.request, item.target if item.memory is None else item.memory
    if tile is not None:
        shape, inner, outer, lengths = tile
        target = narrowed(target, outer, lengths)
    elif item.memory is not None and request.lengths == item.shape:
        target.copy_(saved.as_strided(item.shape, target.stride(), first))
        return
    else:
        shape, inner, lengths = item.shape, request.storage_offsets, request.lengths
    rows = saved.narrow(0, first, math.prod(shape)).view(tuple(shape))
    target.copy_(narrowed(rows, inner, lengths))


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Returns a slice of a tensor, which shares its memory."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, length)
    return tensor


def check_apart(infos: Iterable[_StorageInfo], url: str) -> None:
    """Raises if two different items overlap: memory for all items could then be many times the size of their file.

    Raises:
        CheckpointError: The message names the file.
    """
    # Numbers only: tuples of many items would be work for the garbage collector.
    files: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for info in infos:
        lengths = files[info.relative_path]
        if lengths.get(info.offset) and info.length not in (0, lengths[info.offset]):
            raise _overlap(f"{url}/{info.relative_path}", info.offset, info.offset + max(info.length, 1))
        lengths[info.offset] = lengths.get(info.offset) or info.length
    for path, lengths in files.items():
        end = 0
        for offset in sorted(lengths):
            if offset < end:
                raise _overlap(f"{url}/{path}", offset, end)
            end = offset + lengths[offset]


def _overlap(file: str, offset: int, end: int) -> CheckpointError:
    return CheckpointError(f"{file}: items overlap, at {offset} and before {end}")


def load_items(
    checkpoint: CheckpointDir,
    metadata: Metadata,
    items: list[ReadItem],
    planner: LoadPlanner,
    *,
    replicated: Sequence[ReplicatedItems] = (),
    config: StoreConfig | None = None,
    verify: bool,
    counted: ByteProgress,
) -> None:
    """Loads the items of a rank into the destinations of its planner.

    Asks the planner for all destinations first, on this thread. Then reads everything in parallel, in few calls.

    Args:
        checkpoint: Folder of the checkpoint.
        metadata: Metadata of the checkpoint, with a table of items.
        items: Items to load.
        planner: Planner of torch's.
        replicated: Items that other ranks of this machine load as well.
        config: Settings of the store, for these.
        verify: Compare the checksums of items that are read whole.
        counted: Receives the number of bytes that have arrived.

    Raises:
        IntegrityError: Bytes differ from what was written; the message names tensor and file.
        CheckpointError: The checkpoint does not have an item, or has an invalid one.
        ObjectChangedError: Another save replaced a file during the load.
        StoreError: A request failed.
    """
    _Load(checkpoint, metadata, planner, verify=verify, counted=counted, config=config).load(items, replicated)
