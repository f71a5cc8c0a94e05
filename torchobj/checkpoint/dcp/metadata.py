"""The metadata of a distributed checkpoint: writes it for torch 2.6 and later, and reads what any of these wrote.

The unpickler accepts only the classes that metadata consists of, so loading a checkpoint executes no code from it. What
the metadata claims is checked before memory is allocated for it, and compared with the files when they are read.
"""

import collections
import copyreg
import dataclasses
import functools
import io
import math
import pathlib
import pickle
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchobj.checkpoint.archive.pickling import check_nesting
from torchobj.exceptions import CheckpointError

__all__ = ["MAX_NUMBER", "TensorRange", "check_described", "dump_metadata", "load_metadata"]

#: The highest pickle protocol of Python 3.8.
_PROTOCOL = 4

#: Number of fields of `TensorProperties` up to torch 2.14, which rejects more. torch 2.15 added the strides.
_PORTABLE_FIELDS = 5

#: torch counts elements and bytes with 63 bits.
MAX_NUMBER = (1 << 63) - 1

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"


@dataclasses.dataclass
class TensorRange(_StorageInfo):
    """The bytes of a tensor in a file of safetensors: they have no archive around them. Never part of `.metadata`."""

    version: str | None = None
    """The version of the file that has the tensor there."""


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state: tuple[Any, ...] = properties.__getstate__()
    return copyreg.__newobj__, (TensorProperties,), state[:_PORTABLE_FIELDS]  # type: ignore[attr-defined]


def dump_metadata(metadata: Metadata) -> bytes:
    """Returns the bytes of `.metadata`. Equal sizes and properties are pickled once, which makes unpickling faster."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, _PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduce_properties}
    pickler.dump(_with_shared_parts(metadata))
    return out.getvalue()


def _with_shared_parts(metadata: Metadata) -> Metadata:
    properties: dict[tuple[Any, ...], TensorProperties] = {}

    @functools.cache
    def size(equal: torch.Size) -> torch.Size:
        return equal

    @functools.cache
    def chunk(offsets: torch.Size, sizes: torch.Size) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(size(offsets), size(sizes))

    def tensor(described: TensorStorageMetadata) -> TensorStorageMetadata:
        own = described.properties
        key = (own.dtype, own.layout, own.requires_grad, own.memory_format, own.pin_memory)
        chunks = [chunk(own.offsets, own.sizes) for own in described.chunks]
        return TensorStorageMetadata(properties.setdefault(key, own), size(described.size), chunks)

    described = {
        name: tensor(what) if type(what) is TensorStorageMetadata else what
        for name, what in metadata.state_dict_metadata.items()
    }
    stored = {}
    for index, info in metadata.storage_data.items():
        shared = MetadataIndex(index.fqn, None, index.index)
        if index.offset is not None:
            # The constructor would create another `Size`.
            shared.__dict__["offset"] = size(index.offset)
        stored[shared] = info
    return dataclasses.replace(metadata, state_dict_metadata=described, storage_data=stored)


class _AnyTensorProperties(TensorProperties):
    """Accepts the state that any version of torch wrote, and becomes a `TensorProperties` of this version."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # The class first: the fields are set on the object that the reader receives.
        self.__class__ = TensorProperties  # type: ignore[assignment]
        self.__setstate__(state[:_PORTABLE_FIELDS])
        if len(state) > _PORTABLE_FIELDS and "strides" in TensorProperties.__dataclass_fields__:
            self.strides = state[_PORTABLE_FIELDS]


def _size(lengths: tuple[int, ...]) -> torch.Size:
    if type(lengths) is not tuple:
        raise TypeError("a size is not made of a tuple")
    return torch.Size(lengths)


def _from_data(kind: Any, *arguments: Any) -> Any:
    """Creates a value from data of the pickle. From a number or a range, it could have any size."""
    if not all(type(argument) in (list, tuple, bytes, str) for argument in arguments):
        raise TypeError(f"a {kind.__name__} is not made of a list")
    return kind(*arguments)


def _allowed() -> dict[tuple[str, str], Any]:
    names = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
    found: dict[tuple[str, str], Any] = {
        (_METADATA_MODULE, name): getattr(torch_metadata, name) for name in (*names, "StorageMeta")
    }
    found[_METADATA_MODULE, "_MEM_FORMAT_ENCODING"] = torch_metadata._MEM_FORMAT_ENCODING
    found[_METADATA_MODULE, "TensorProperties"] = _AnyTensorProperties
    found[_FILESYSTEM_MODULE, "_StorageInfo"] = _StorageInfo
    found[_FILESYSTEM_MODULE, "_StoragePrefix"] = filesystem._StoragePrefix
    found["torch", "Size"] = _size
    found["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    found["collections", "OrderedDict"] = collections.OrderedDict
    found["builtins", "complex"], found["builtins", "slice"] = complex, slice
    for kind in (set, frozenset, bytearray):
        found["builtins", kind.__name__] = functools.partial(_from_data, kind)
    # torch stores the checkpoint's path as it was given. Pure paths represent those of any system.
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PurePath", "PosixPath", "PurePosixPath"):
            found[module, name] = pathlib.PurePosixPath
        for name in ("WindowsPath", "PureWindowsPath"):
            found[module, name] = pathlib.PureWindowsPath
    return found


class _Unpickler(pickle.Unpickler):
    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        found = self._ALLOWED.get((module, name))
        if found is None and module == "torch":
            value = getattr(torch, name, None)
            found = value if isinstance(value, torch.dtype) else None
        if found is None:
            raise CheckpointError(f"names {module}.{name}, which the metadata of a checkpoint does not need")
        return found


def load_metadata(data: bytes, url: str) -> Metadata:
    """Parses `.metadata`.

    Args:
        data: Bytes that torch 2.6 to 2.15, s3torchconnector or `dump_metadata` wrote.
        url: URL of the metadata, for errors.

    Raises:
        CheckpointError: They are not metadata, or name a class that metadata does not need.
    """
    check_nesting(data, url)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if isinstance(metadata, Metadata):
            check_described(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{url}: {error}: refused") from None
    except Exception as error:
        raise CheckpointError(f"{url}: is not metadata of a checkpoint: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{url}: is not metadata of a checkpoint: it holds a {type(metadata).__name__}")
    return metadata


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
    if not fits or math.prod(size) > MAX_NUMBER >> 4:
        raise ValueError(f"{name}: has a chunk of size {tuple(chunk.sizes)} at {tuple(chunk.offsets)} of {tuple(size)}")
