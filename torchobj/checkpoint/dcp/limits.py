"""What a checkpoint may claim about itself: numbers, pickles and archives of others are checked before memory is taken.

Reads nothing. A claim that passes here is still compared with the file that it is about.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError

__all__ = ["check_apart", "check_described", "check_nesting", "checked_info", "unpacked_limit"]

#: Python's own pickler fails long before.
_DEEPEST = 1000

#: Numbers of elements and of bytes have 63 bits.
_TOO_LARGE = 1 << 63

#: What may be unpacked of an item whose size is not known. torch does not compress, but for extensions.
_UNPACKED_BYTES = 256 << 20


def check_nesting(pickle: bytes, name: str) -> None:
    """Raises where unpickling, or hashing what was unpickled, could overflow the stack.

    Raises:
        CheckpointError: It nests too deep; the message begins with `name`.
    """
    depth = _torchobj.pickle_nesting(pickle)
    if depth > _DEEPEST:
        raise CheckpointError(f"{name}: is a pickle of more than {_DEEPEST} nested objects: refused")


def check_described(metadata: Metadata) -> None:
    """Raises where metadata describes what is not a tensor or value of a checkpoint.

    Raises:
        ValueError: It does; the message names tensor or value.
    """
    # Sizes that are equal are one object, as torchobj writes them.
    checked: set[tuple[int, int]] = set()
    for name, what in metadata.state_dict_metadata.items():
        if type(what) is BytesStorageMetadata:
            continue
        if type(name) is not str or type(what) is not TensorStorageMetadata or type(what.chunks) is not list:
            raise ValueError(f"{str(name)[:200]}: is neither a tensor nor a value")
        if type(what.properties) is not TensorProperties or type(what.properties.dtype) is not torch.dtype:
            raise ValueError(f"{name}: has no dtype")
        for chunk in what.chunks:
            key = (id(chunk), id(what.size))
            if key not in checked:
                _check_chunk(name, chunk, what.size)
                checked.add(key)


def _check_chunk(name: str, chunk: Any, size: Any) -> None:
    if (
        type(chunk) is not ChunkStorageMetadata
        or not type(size) is type(chunk.sizes) is type(chunk.offsets) is torch.Size
    ):
        raise ValueError(f"{name}: has a chunk without a size")
    fits = len(size) == len(chunk.sizes) == len(chunk.offsets) and all(
        offset >= 0 and length >= 0 and offset + length <= total
        for offset, length, total in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )
    if not fits or math.prod(size) >= _TOO_LARGE >> 4:
        raise ValueError(f"{name}: has a chunk of size {tuple(chunk.sizes)} at {tuple(chunk.offsets)} of {tuple(size)}")


def checked_info(info: Any, name: str, url: str) -> _StorageInfo:
    """Where an item lies, if that can be.

    Args:
        info: What the metadata says.
        name: Of the item, for errors.
        url: Of the checkpoint, for errors.

    Raises:
        CheckpointError: It is no place in a file.
    """
    # What a pickle leaves out an object does not have.
    path, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
    if (
        type(info) is not _StorageInfo
        or type(path) is not str
        or type(offset) is not int
        or type(length) is not int
        or not 0 <= offset < _TOO_LARGE
        or not 0 <= length < _TOO_LARGE - offset
    ):
        raise CheckpointError(f"{url}: the metadata has no place in a file for {name}: offset and length are wrong")
    return info


def check_apart(infos: Iterable[_StorageInfo], url: str) -> None:
    """Raises where items share bytes without being the same: then memory for all could be many times their file.

    Raises:
        CheckpointError: Two of them do; the message names their file.
    """
    file, end = "", 0
    for path, offset, length in sorted({(info.relative_path, info.offset, info.length) for info in infos}):
        if path == file and offset < end:
            raise CheckpointError(
                f"{url}/{path}: the metadata has items there that overlap, at {offset} and before {end}"
            )
        file, end = path, offset + length


def unpacked_limit(known_bytes: int) -> int:
    """How many bytes may be unpacked of one item.

    Args:
        known_bytes: Of the tensor that it should be; 0 of a value.
    """
    return known_bytes + _UNPACKED_BYTES
