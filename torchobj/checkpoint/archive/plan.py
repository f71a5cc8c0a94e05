"""Plans the file of a `torch.save` without the bytes of its tensors: literals and holes. Sends nothing.

torch pickles the object and writes its archive with holes in place of storages (`torch.serialization.skip_data`). The
pickler's calls for persistent ids give the storage of each hole, by the name of its record, such as `data/7`.
"""

import contextlib
import functools
import io
import math
import mmap
import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchobj.checkpoint.archive import zip_archive
from torchobj.checkpoint.archive.device_memory import check_memory
from torchobj.exceptions import CheckpointError

__all__ = ["Field", "Hole", "Plan", "PlanError", "TensorArchive", "is_memory", "plan_of", "tensor_archive"]

#: Average size up to which copying a storage is faster than planning a hole for it, and maximum size of all copies.
_SMALL_BYTES, _COPIED_BYTES = 8 << 10, 16 << 20

#: Number of cached archives of single tensors; a large model has this many shapes.
_CACHED_ARCHIVES = 4096

#: Tensors of these dtypes consist of more than their memory.
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)

#: Types of most objects in a pickle, which are pickled by value.
_WITHOUT_IDENTITY = {str, int, float, bool, bytes, type(None), tuple, list, dict, type}

#: From mman.h; Python has a name for it since 3.13.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class PlanError(CheckpointError):
    """torch's file has an unexpected layout, so that it cannot be planned; the object itself can be saved."""


class Hole(NamedTuple):
    """The place of a storage in the file."""

    start: int
    storage: torch.UntypedStorage


class Field(NamedTuple):
    """Four bytes for the CRC-32 of a storage."""

    start: int
    hole: int
    """Start of the storage's hole."""


class Plan(NamedTuple):
    """A file: its literals, its holes and its CRC-32 fields, each sorted by offset."""

    literals: list[tuple[int, bytes]]
    holes: list[Hole]
    fields: list[Field]
    size: int
    tensors: list[torch.Tensor]
    """The tensors of the object."""

    def pieces(self) -> Iterator[bytes | Hole | Field]:
        """Yields the file from its first byte to its last; literals are cut around fields."""
        # A literal ends where a hole starts, or the file ends.
        literals = iter([*self.literals, (self.size, b"")])
        start, literal = next(literals)
        at = start
        marks: list[Hole | Field] = sorted([*self.holes, *self.fields], key=lambda mark: mark.start)
        for mark in marks:
            if mark.start > at:
                yield literal[at - start : mark.start - start]
            yield mark
            if isinstance(mark, Hole):
                start, literal = next(literals)
                at = start
            else:
                at = mark.start + 4
        if at < self.size:
            yield literal[at - start :]


class _Recorder:
    """A file that keeps what is written to it, and the ranges that a seek skips."""

    def __init__(self) -> None:
        self.literals: list[tuple[int, bytearray]] = []
        self.holes: dict[int, int] = {}
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.literals or self.literals[-1][0] + len(self.literals[-1][1]) != self.size:
            self.literals.append((self.size, bytearray()))
        self.literals[-1][1].extend(view)
        self.size += len(view)
        return len(view)

    def seek(self, distance: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or distance < 0:
            raise io.UnsupportedOperation(f"seek({distance}, {whence})")
        self.holes[self.size] = distance
        self.size += distance
        return self.size

    def flush(self) -> None:
        """Does nothing."""


class _Pickling:
    """A pickle module for torch: the standard pickler, which also records the tensors and storages.

    Data are skipped from the end of pickling on, not before: so tensors are reduced as usual.
    """

    def __init__(self, stack: contextlib.ExitStack, copied_bytes: int, location: str | None) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.tensors: list[torch.Tensor] = []
        self.done, self.skips = False, True
        pickling = self

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                inner = cls.persistent_id

                def persistent_id(pickler: Any, value: Any) -> Any:
                    # Called for every object: torch has identities for storages only.
                    if type(value) in _WITHOUT_IDENTITY:
                        return None
                    if isinstance(value, torch.Tensor):
                        check_memory(value)
                        pickling.tensors.append(value)
                    identity = inner(pickler, value)
                    if identity is not None:
                        untyped = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
                        pickling.storages[identity[2]] = untyped
                        # "storage", type, key, location, number of elements.
                        identity = identity if location is None else (*identity[:3], location, identity[4])
                    return identity

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

            def dump(self, value: Any) -> None:
                super().dump(value)
                pickling.done = True
                sizes = [storage.nbytes() for storage in pickling.storages.values()]
                pickling.skips = sum(sizes) > min(copied_bytes, len(sizes) * _SMALL_BYTES)
                if pickling.skips:
                    stack.enter_context(torch.serialization.skip_data())

        self.module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler)


def plan_of(value: Any, *, copies_small: bool = False, checksum: bool = True, location: str | None = None) -> Plan:
    """Plans the file that `torch.save` would write.

    Args:
        value: Anything that `torch.save` accepts.
        copies_small: Whether to copy storages into the literals, if they are small on average, and if torch computes
            their CRC-32 where `checksum` asks for it.
        checksum: Whether the CRC-32 of storages in holes are fields of the plan.
        location: Device of all storages in the file, such as `cpu`; None for their own.

    Raises:
        PlanError: The layout of this torch's file, or of this value, is unknown.
        CheckpointError: The memory of a tensor was freed.
        Exception: Pickling failed.
    """
    recorder = _Recorder()
    may_copy = copies_small and checksum and torch.serialization.get_crc32_options()
    with contextlib.ExitStack() as stack:
        pickling = _Pickling(stack, _COPIED_BYTES if may_copy else 0, location)
        try:
            torch.save(value, recorder, pickle_module=pickling.module)  # type: ignore[arg-type]
        except Exception as error:
            if pickling.done:
                raise PlanError(f"torch could not write a plan: {error}") from error
            raise
    literals = [(start, bytes(literal)) for start, literal in recorder.literals]
    # Holes are also possible without `skips`: the caller may have enabled skip_data.
    if not pickling.skips and not recorder.holes:
        return Plan(literals, [], [], recorder.size, pickling.tensors)
    try:
        holes, fields = _match(recorder, literals, pickling.storages)
    except CheckpointError as error:
        raise PlanError(str(error)) from error
    return Plan(literals, holes, fields if checksum else [], recorder.size, pickling.tensors)


def _match(
    recorder: _Recorder, literals: list[tuple[int, bytes]], storages: dict[str, torch.UntypedStorage]
) -> tuple[list[Hole], list[Field]]:
    """Returns holes and fields according to the directory that torch wrote; everything must be consistent."""
    records = zip_archive.records_in(literals[-1][1] if literals else b"", recorder.size)
    # The local header of a hole is at the end of the literal before it.
    literal_starts = {start + len(literal): (start, literal) for start, literal in literals}
    holes, fields = [], []
    for key, storage in storages.items():
        record = records.pop(f"data/{key}", None)
        if record is None or record.size != storage.nbytes():
            raise PlanError(f"data/{key}: its size in the archive differs from that of the storage")
        if not record.size:
            continue
        start, literal = literal_starts.get(record.payload, (0, b""))
        header = literal[record.header - start : record.header - start + zip_archive.LOCAL_HEADER_BYTES]
        if recorder.holes.pop(record.payload, None) != record.size or len(header) != zip_archive.LOCAL_HEADER_BYTES:
            raise PlanError(f"{record.name}: its hole is not at the offset of its bytes")
        if zip_archive.payload_of(record, header) != record.payload:
            raise PlanError(f"{record.name}: its local header has an unexpected length")
        if storage.device.type == "meta":
            raise PlanError(f"{record.name}: a storage on meta has no bytes")
        holes.append(Hole(record.payload, storage))
        in_descriptor = zip_archive.crc32_of_descriptor(record.payload, record.size)
        fields += [Field(in_descriptor, record.payload), Field(record.crc32_field, record.payload)]
    if recorder.holes:
        raise PlanError(f"{len(recorder.holes)} holes belong to no storage")
    return sorted(holes, key=lambda hole: hole.start), sorted(fields)


class TensorArchive(NamedTuple):
    """The archive of one tensor, without the tensor's bytes and its two copies of their CRC-32.

    The parts in order are `before`, payload, `DESCRIPTOR_MARK`, CRC-32, `middle`, CRC-32, `after`; for an empty tensor
    `before` only. Offsets in the archive are relative to its own start, so that it can be anywhere in a file.
    """

    before: bytes
    payload_bytes: int
    middle: bytes
    after: bytes
    length: int
    """Size of the whole archive in bytes."""
    pickle: bytes
    """Content of its record `data.pkl`."""


@functools.lru_cache(_CACHED_ARCHIVES)
def tensor_archive(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorArchive | None:
    """Returns the archive that this torch writes for a contiguous tensor with a storage of its own.

    Args:
        dtype: The tensor's dtype.
        shape: The tensor's shape, such as a `torch.Size`.

    Returns:
        The archive, or None if it cannot be planned: then `torch.save` has to write the tensor.
    """
    try:
        tensor = _reserved(dtype, shape)
        planned = None if dtype in _QUANTIZED else plan_of(tensor)
        records = {} if planned is None else zip_archive.records_in(planned.literals[-1][1], planned.size)
    except (CheckpointError, OSError, OverflowError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    if planned is None or "data.pkl" not in records or not 1 <= len(planned.literals) <= 2:
        return None
    before = planned.literals[0][1]
    pickled = records["data.pkl"]
    data = before[pickled.payload : pickled.payload + pickled.size]
    if not tensor.nbytes:
        return TensorArchive(before, 0, b"", b"", planned.size, data)
    [(start, behind)], [in_descriptor, in_directory] = planned.literals[1:], planned.fields
    if not behind.startswith(zip_archive.DESCRIPTOR_MARK):
        return None
    middle = behind[in_descriptor.start - start + 4 : in_directory.start - start]
    return TensorArchive(before, tensor.nbytes, middle, behind[in_directory.start - start + 4 :], planned.size, data)


def _reserved(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor over reserved addresses, which takes no memory until it is accessed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def is_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's bytes are contiguous memory on the CPU, in the form that `tensor_archive` expects.

    False for subclasses, which may keep their elements elsewhere.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)
    )
