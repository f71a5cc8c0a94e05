"""The bytes that `torch.save` writes around one tensor of a checkpoint: a zip archive, built without torch.save.

What it builds is what torch 2.15 writes, byte for byte but for the serialization id, which is a constant here. Offsets
in an archive are counted from its own start, so that it can stand anywhere in a file. Does no I/O.
"""

import functools
import math
import struct
import sys
import zlib
from typing import NamedTuple

import torch

__all__ = ["DESCRIPTOR_MARK", "Item", "descriptor_bytes", "item_of", "pickle_of", "stand_in"]

#: Before the checksum of a record, behind its bytes.
DESCRIPTOR_MARK = b"PK\x07\x08"

#: Sizes and offsets from here on stand in zip64 fields (caffe2/serialize/inline_container.cc, miniz.h).
_LARGE = 0xFFFF_FFFF

#: Records begin at multiples of it (torch.utils.serialization.config.save.storage_alignment).
_ALIGNMENT = 64

#: So far behind the payload no field of an archive turns into zip64 that was none at its end.
_CLOSING_BYTES = 1024

#: torch makes a hash of the names and checksums of it, which no reader looks at; this is one of its own.
_SERIALIZATION_ID = b"1572819951185464302604104301264830192137"

#: How many archives are remembered: as many as a large model has shapes.
_REMEMBERED = 4096

_LOCAL = struct.Struct("<4s5H3I2H")
_SIZES = struct.Struct("<II")
_CHECKED_SIZES = struct.Struct("<III")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4sQ2H2I4Q4sIQI4s4H2IH")


class _Dtype(NamedTuple):
    """How torch pickles a tensor of one dtype."""

    start: bytes
    """The pickle before the number of elements, or of bytes."""
    end: bytes
    """The pickle behind the strides."""
    end_of_scalar: bytes
    """The same where the shape is empty: fewer tuples are remembered by then."""
    item_bytes: int
    counts_bytes: bool
    """Whether the storage is counted in bytes."""
    stand_in: torch.dtype | None
    """The dtype of the same width by which numpy sees such memory; None where numpy has the dtype itself."""


#: The classes of torch's typed storages, by the names of dtypes. Any other dtype has an untyped one.
_TYPED = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "bfloat16": "BFloat16",
    "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
}
_UNTYPED = (
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SEEN_BY_NUMPY = {*_TYPED, "uint16", "uint32", "uint64"} - {"bfloat16"}


def _dtype(name: str) -> _Dtype:
    typed = name in _TYPED
    storage = f"torch\n{_TYPED[name]}Storage" if typed else "torch.storage\nUntypedStorage"
    start = (
        f"\x80\x02ctorch._utils\n_rebuild_tensor_v{2 if typed else 3}\nq\x00((X\x07\x00\x00\x00storageq\x01c{storage}\n"
        "q\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
    )

    def end(memo: int) -> bytes:
        own = "" if typed else f"ctorch\n{name}\nq{chr(memo + 2)}"
        last = memo + (2 if typed else 3)
        ordered = f"\x89ccollections\nOrderedDict\nq{chr(memo)})Rq{chr(memo + 1)}"
        return f"{ordered}{own}tq{chr(last)}Rq{chr(last + 1)}.".encode("latin-1")

    width = getattr(torch, name).itemsize
    stand_in = None if name in _SEEN_BY_NUMPY else _STAND_INS[width]
    return _Dtype(start.encode("latin-1"), end(8), end(6), width, not typed, stand_in)


_DTYPES = {getattr(torch, name): _dtype(name) for name in (*_TYPED, *_UNTYPED) if hasattr(torch, name)}
if sys.byteorder != "little":
    _DTYPES = {}


def stand_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor, under a dtype that numpy has; None where its memory is not what `item_of` has a frame for.

    Such a tensor is a plain one of a dtype that is known, on the CPU and contiguous.

    Args:
        tensor: Any tensor, detached.

    Returns:
        A tensor of the same shape, or None. Shares the memory of `tensor`.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if (
        dtype is None
        or type(tensor) is not torch.Tensor
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    return tensor if dtype.stand_in is None else tensor.view(dtype.stand_in)


def descriptor_bytes(payload_bytes: int) -> int:
    """The length of what stands behind a payload: mark, checksum, and the size twice; behind an empty one nothing."""
    if payload_bytes == 0:
        return 0
    return 24 if payload_bytes >= _LARGE else 16


class Item(NamedTuple):
    """The bytes of an archive around a tensor's own, and around their checksum, which stands there twice.

    Joined it is `before`, payload, `DESCRIPTOR_MARK`, checksum, `middle`, checksum, `after`; without a payload it is
    `before` alone.
    """

    before: bytes
    payload_bytes: int
    middle: bytes
    after: bytes
    length: int
    """Bytes of all of it."""


@functools.lru_cache(_REMEMBERED)
def item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Item | None:
    """The archive around a contiguous tensor.

    Args:
        dtype: Of the tensor.
        shape: Of the tensor: a `torch.Size` will do.

    Returns:
        Its bytes, or None for a dtype whose archive is not known here.
    """
    known = _DTYPES.get(dtype)
    if known is None:
        return None
    size = math.prod(shape) * known.item_bytes
    return _archive(_pickle(known, shape), size)


def pickle_of(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes | None:
    """The pickle of a contiguous tensor that owns the whole of storage 0; None for an unknown dtype."""
    known = _DTYPES.get(dtype)
    return None if known is None else _pickle(known, shape)


def _pickle(dtype: _Dtype, shape: tuple[int, ...]) -> bytes:
    elements = math.prod(shape)
    count = _number(elements * dtype.item_bytes if dtype.counts_bytes else elements)
    if not shape:
        return dtype.start + count + b"tq\x05QK\x00))" + dtype.end_of_scalar
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length or 1
    strides.reverse()
    return b"".join(
        (dtype.start, count, b"tq\x05QK\x00", _tuple(shape), b"q\x06", _tuple(strides), b"q\x07", dtype.end)
    )


def _number(value: int) -> bytes:
    """A number, not negative, as protocol 2 has it."""
    if value < 1 << 8:
        return b"K" + value.to_bytes(1)
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    width = value.bit_length() // 8 + 1
    return b"\x8a" + width.to_bytes(1) + value.to_bytes(width, "little")


def _tuple(values: "tuple[int, ...] | list[int]") -> bytes:
    numbers = b"".join([_number(value) for value in values])
    return numbers + b"\x85\x86\x87"[len(values) - 1 : len(values)] if len(values) <= 3 else b"(" + numbers + b"t"


def _local(name: bytes, size: int, offset: int) -> bytes:
    """The header of a record, with padding up to the record's bytes."""
    zip64 = b""
    if size >= _LARGE:
        zip64 += struct.pack("<QQ", size, 0)
    if offset >= _LARGE:
        zip64 += struct.pack("<Q", offset)
    if zip64:
        zip64 = struct.pack("<HH", 1, len(zip64)) + zip64
    # torch counts the head of the zip64 fields in each case where it pads.
    start = offset + 30 + len(name) + 4 + len(zip64)
    padding = -start % _ALIGNMENT
    extra = zip64 + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return _LOCAL.pack(b"PK\x03\x04", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _flags(size: int) -> int:
    """Names are UTF-8; and there is a descriptor, but behind an empty record."""
    return 0x0808 if size else 0x0800


def _descriptor(crc32: int, size: int, offset: int) -> bytes:
    sizes = "<IQQ" if size >= _LARGE or offset >= _LARGE else "<III"
    return DESCRIPTOR_MARK + struct.pack(sizes, crc32, size, size)


def _entry(name: bytes, crc32: int, size: int, offset: int) -> bytes:
    """The entry of a record in the archive's directory."""
    zip64 = b""
    if size >= _LARGE:
        zip64 += struct.pack("<QQ", size, size)
    if offset >= _LARGE:
        zip64 += struct.pack("<Q", offset)
    if zip64:
        zip64 = struct.pack("<HH", 1, len(zip64)) + zip64
    flags, size, offset = _flags(size), min(size, _LARGE), min(offset, _LARGE)
    lengths = (len(name), len(zip64), 0, 0, 0)
    return _ENTRY.pack(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc32, size, size, *lengths, 0, offset) + name + zip64


def _end(directory_bytes: int, offset: int) -> bytes:
    """The end of an archive of seven records whose directory begins at `offset`."""
    return _END.pack(
        *(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, 7, 7, directory_bytes, offset),
        *(b"PK\x06\x07", 0, offset + directory_bytes, 1),
        *(b"PK\x05\x06", 0, 0, 7, 7, directory_bytes, min(offset, _LARGE), 0),
    )


def _record(name: bytes, content: bytes, offset: int) -> tuple[bytes, bytes]:
    """A record with its header and descriptor, and its entry in the directory."""
    crc32, size = zlib.crc32(content), len(content)
    whole = _local(name, size, offset) + content + _descriptor(crc32, size, offset)
    return whole, _entry(name, crc32, size, offset)


_PICKLE = b"archive/data.pkl"
_PICKLE_HEADER = _local(_PICKLE, 1, 0)
_DATA = b"archive/data/0"
_FIRST = ((b"archive/.format_version", b"1"), (b"archive/.storage_alignment", b"64"), (b"archive/byteorder", b"little"))
_LAST = ((b"archive/version", b"3\n"), (b"archive/.data/serialization_id", _SERIALIZATION_ID))


class _Opening(NamedTuple):
    """What stands between the pickle's descriptor and the payload."""

    records: bytes
    entries: bytes
    data_offset: int
    """Where the header of the payload begins."""
    payload_offset: int


@functools.lru_cache(_REMEMBERED)
def _opening(pickle_bytes: int, payload_bytes: int) -> _Opening:
    """What the length of the pickle decides, and that of the payload where it is 0 or `_LARGE`; any other is 1."""
    start = offset = len(_PICKLE_HEADER) + pickle_bytes + descriptor_bytes(1)
    records, entries = b"", b""
    for name, content in _FIRST:
        record, entry = _record(name, content, offset)
        records, entries, offset = records + record, entries + entry, offset + len(record)
    records += _local(_DATA, payload_bytes, offset)
    return _Opening(records, entries, offset, start + len(records))


def _closing(offset: int) -> tuple[bytes, tuple[int, ...]]:
    """The records behind the payload, which ends at `offset`, and where each begins."""
    records, starts = b"", []
    for name, content in _LAST:
        starts.append(offset + len(records))
        records += _record(name, content, starts[-1])[0]
    return records, tuple(starts)


#: The same where no number is large: then only the place in a line of 64 bytes counts.
_near_closing = functools.lru_cache(_ALIGNMENT)(_closing)


# What is the same in the directories of all archives that are neither empty nor large, around sums and offsets.
_PICKLE_START, _PICKLE_END = _entry(_PICKLE, 0, 1, 0)[:16], _entry(_PICKLE, 0, 1, 0)[28:]
_DATA_START, _DATA_END = _entry(_DATA, 0, 1, 0)[:16], _entry(_DATA, 0, 1, 0)[28:42]
_LAST_ENTRIES = [_entry(name, zlib.crc32(content), len(content), 0)[:42] for name, content in _LAST]
_DIRECTORY_BYTES = sum(46 + len(name) for name in (_PICKLE, _DATA, *(name for name, _ in (*_FIRST, *_LAST))))
_END_START = _end(_DIRECTORY_BYTES, 0)[:48]
_LOCATOR, _END_LAST = _end(_DIRECTORY_BYTES, 0)[56:64], _end(_DIRECTORY_BYTES, 0)[72:92]
_AFTER = struct.Struct(f"<II14sI{len(_DATA)}s42sI{len(_LAST[0][0])}s42sI{len(_LAST[1][0])}s48sQ8sQ20sIH")


def _archive(pickle: bytes, size: int) -> Item:
    crc32, length = zlib.crc32(pickle), len(pickle)
    opening = _opening(length, size if size >= _LARGE else min(size, 1))
    pickle_sums = _CHECKED_SIZES.pack(crc32, length, length)
    before = b"".join((_PICKLE_HEADER, pickle, DESCRIPTOR_MARK, pickle_sums, opening.records))
    behind = len(before) + size + descriptor_bytes(size)
    if size == 0 or behind + _CLOSING_BYTES >= _LARGE:
        return _rare_archive(before, size, _entry(_PICKLE, crc32, length, 0) + opening.entries, opening.data_offset)
    place = behind % _ALIGNMENT
    records, (version, serialization_id) = _near_closing(place)
    middle = b"".join(
        (_SIZES.pack(size, size), records, _PICKLE_START, pickle_sums, _PICKLE_END, opening.entries, _DATA_START)
    )
    moved, offset = behind - place, behind + len(records)
    after = _AFTER.pack(
        *(size, size, _DATA_END, opening.data_offset, _DATA),
        *(_LAST_ENTRIES[0], version + moved, _LAST[0][0], _LAST_ENTRIES[1], serialization_id + moved, _LAST[1][0]),
        *(_END_START, offset, _LOCATOR, offset + _DIRECTORY_BYTES, _END_LAST, offset, 0),
    )
    return Item(before, size, middle, after, len(before) + size + 12 + len(middle) + len(after))


def _rare_archive(before: bytes, size: int, entries: bytes, data_offset: int) -> Item:
    """An archive with an empty payload, or one so large that zip64 fields are needed."""
    behind = len(before) + size + descriptor_bytes(size)
    records, starts = _closing(behind)
    data = _entry(_DATA, 0, size, data_offset)
    # The checksum stands at byte 16 of an entry.
    first = entries + data[:16]
    after = data[20:]
    for (name, content), start in zip(_LAST, starts, strict=True):
        after += _entry(name, zlib.crc32(content), len(content), start)
    after += _end(len(first) + 4 + len(after), behind + len(records))
    if size == 0:
        whole = before + records + first + bytes(4) + after
        return Item(whole, 0, b"", b"", len(whole))
    middle = _descriptor(0, size, 0)[8:] + records + first
    return Item(before, size, middle, after, len(before) + size + 12 + len(middle) + len(after))
