"""Checks what the metadata of a checkpoint claims, before memory is allocated for it. Does no I/O.

A claim that passes is still compared with the file.
"""

import collections
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

from torchobj.checkpoint.keys import is_canonical
from torchobj.exceptions import CheckpointError

__all__ = ["check_apart", "check_described", "checked_info", "unpacked_limit"]

#: torch counts elements and bytes with 63 bits.
_TOO_LARGE = 1 << 63

#: Maximum unpacked size of an item of unknown size. torch compresses nothing, except through extensions.
_UNPACKED_BYTES = 256 << 20


def check_described(metadata: Metadata) -> None:
    """Raises if metadata describes something else than tensors and values of a checkpoint.

    Raises:
        ValueError: The message names the entry.
    """
    # Equal sizes are one object in metadata of torchobj.
    checked: set[tuple[int, int]] = set()
    for name, what in metadata.state_dict_metadata.items():
        if type(what) is BytesStorageMetadata:
            continue
        if type(name) is not str or type(what) is not TensorStorageMetadata or type(what.chunks) is not list:
            raise ValueError(f"{str(name)[:200]}: is neither a tensor nor a value")
        if type(what.properties) is not TensorProperties or type(what.properties.dtype) is not torch.dtype:
            raise ValueError(f"{name}: has no dtype")
        # The chunks may be a part of the tensor, in what a rank saved by itself. No chunk at all would load silently.
        if not what.chunks and (type(what.size) is not torch.Size or 0 not in what.size or min(what.size) < 0):
            raise ValueError(f"{name}: has no chunks")
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
    """Returns `info` if it is a valid range of a file.

    Args:
        info: File, offset and length of an item, from the metadata.
        name: Name of the item, for errors.
        url: URL of the checkpoint, for errors.

    Raises:
        CheckpointError: It is not a range of a file.
    """
    # An unpickled object lacks fields that the pickle omits.
    path, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
    if (
        type(info) is not _StorageInfo
        or type(path) is not str
        or type(offset) is not int
        or type(length) is not int
        or not 0 <= offset < _TOO_LARGE
        or not 0 <= length < _TOO_LARGE - offset
        or not is_canonical(path)
    ):
        raise CheckpointError(f"{url}: the metadata has no valid file, offset and length for {name}")
    return info


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


def unpacked_limit(known_bytes: int) -> int:
    """Returns the maximum unpacked size of an item.

    Args:
        known_bytes: Size of its tensor; 0 for a value.
    """
    return known_bytes + _UNPACKED_BYTES
