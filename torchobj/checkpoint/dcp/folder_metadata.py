"""The metadata of a folder of safetensors: which file has which part of each tensor. Reads headers only.

Files of torch's `HuggingFaceStorageWriter` and of `StorageWriter` say where their parts are in their tensors. In other
files each tensor is whole. All of this is untrusted: the parts must cover each tensor, each element once.
"""

import itertools
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from torchobj import _torchobj
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.metadata import MAX_NUMBER, TensorRange, check_described
from torchobj.checkpoint.safetensors import names
from torchobj.checkpoint.safetensors.file import SafetensorsFile
from torchobj.checkpoint.safetensors.header import StoredTensor
from torchobj.checkpoint.safetensors.json_text import JsonText
from torchobj.checkpoint.safetensors.weights import open_weights
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError
from torchobj.store.concurrency import concurrently

__all__ = ["check_unchanged", "file_metadata", "folder_metadata"]

#: Names in the metadata of a file (torch 2.15, torch/distributed/checkpoint/_hf_utils.py).
_PARTS, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

#: The shape of the whole tensor, by which a folder without its last parts is known to be incomplete. torch ignores it.
_SHAPE = "global_shape"

#: A mesh of N dimensions shards a tensor by N rounds of cuts.
_MAX_CUTS = 16

_Index = tuple[int, ...]


def file_metadata(items: Mapping[str, WriteItem]) -> dict[str, str]:
    """Returns the metadata of a file with parts of tensors, given by the names of the tensors."""
    parts = {}
    for name, item in items.items():
        data: Any = item.tensor_data
        parts[name] = {_OFFSETS: list(data.chunk.offsets), _SHAPE: list(data.size)}
    return {_PARTS: json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}


class _Part(NamedTuple):
    """A part of a tensor, in a file."""

    file: SafetensorsFile
    stored: StoredTensor
    start: _Index
    """Where it starts in the tensor."""
    shape: _Index | None
    """The shape of the tensor, if the file has it."""

    @property
    def end(self) -> _Index:
        return tuple(start + length for start, length in zip(self.start, self.stored.shape, strict=True))


def folder_metadata(checkpoint: CheckpointDir, config: StoreConfig | None) -> Metadata | None:
    """Returns the metadata of a folder of safetensors: of the files that its index names, or of `model.safetensors`,
    or else of all files.

    Args:
        checkpoint: The folder.
        config: Settings of the store.

    Returns:
        The metadata; None if the folder has no such file.

    Raises:
        CheckpointError: A file is not one of safetensors, or is damaged; or the parts of a tensor do not cover it.
        StoreError: A request failed.
    """
    files = _files_of(checkpoint, config)
    tensors: dict[str, list[_Part]] = {}
    for part in itertools.chain.from_iterable(map(_parts_of, files)):
        tensors.setdefault(part.stored.name, []).append(part)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, TensorRange] = {}
    for name, parts in tensors.items():
        try:
            size, used = _checked(parts)
            chunks = [ChunkStorageMetadata(torch.Size(part.start), torch.Size(part.stored.shape)) for part in used]
            properties = TensorProperties(dtype=used[0].stored.dtype)
            described[name] = TensorStorageMetadata(properties, torch.Size(size), chunks)
            check_described(Metadata({name: described[name]}))
        except ValueError as error:
            urls = ", ".join(part.file.url for part in parts[:3])
            raise CheckpointError(f"{checkpoint.url}: {reprlib.repr(name)}: {error}: in {urls}") from None
        for part, chunk in zip(used, chunks, strict=True):
            path = part.file.url.removeprefix(f"{checkpoint.url}/")
            place = part.stored.start, part.stored.end - part.stored.start
            stored[MetadataIndex(name, chunk.offsets)] = TensorRange(path, *place, version=part.file.version)
    return Metadata(described, storage_data=stored) if files else None


def check_unchanged(checkpoint: CheckpointDir, infos: Iterable[_StorageInfo | None]) -> None:
    """Checks that files of safetensors were not replaced since their headers were read: a save keeps their names.

    Args:
        checkpoint: The folder.
        infos: Items that were loaded, in files of any format.

    Raises:
        ObjectChangedError: A file was replaced.
    """
    versions = {info.relative_path: info.version for info in infos if isinstance(info, TensorRange)}
    # A byte of each, of this version only.
    jobs = [
        (checkpoint.native, checkpoint.key(name), version, [(0, bytearray(1))]) for name, version in versions.items()
    ]
    _torchobj.scatter(jobs, checksum=False)


def _files_of(checkpoint: CheckpointDir, config: StoreConfig | None) -> list[SafetensorsFile]:
    listed = sorted(info.key for info in checkpoint.objects("", "/"))
    for name in (names.INDEX, names.WHOLE):
        if name in listed:
            weights = open_weights([checkpoint.url_of(name)], None, config)
            return list(dict.fromkeys(file for file, _ in weights.tensors.values()))

    def opened(name: str) -> SafetensorsFile:
        return SafetensorsFile(checkpoint.native, checkpoint.key(name), checkpoint.url_of(name))

    files = {}
    for name, outcome in concurrently(opened, (name for name in listed if name.endswith(".safetensors"))):
        if isinstance(outcome, Exception):
            raise outcome
        files[name] = outcome
    return [files[name] for name in sorted(files)]


def _parts_of(file: SafetensorsFile) -> Iterator[_Part]:
    """Yields the parts of tensors that a file has.

    Raises:
        CheckpointError: Its metadata does not say where they are.
    """
    text = file.metadata.get(_PARTS)
    try:
        places = _places(text, file.tensors) if text else {}
    except CheckpointError as error:
        raise CheckpointError(f"{file.url}: its {_PARTS} is damaged: {error}") from None
    for name, stored in file.tensors.items():
        yield _Part(file, stored, *places.get(name, ((0,) * len(stored.shape), None)))


def _places(text: str, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[_Index, _Index | None]]:
    """Returns where the part of each tensor starts, and the shape of the whole tensor if it is known."""
    parts = JsonText(text.encode())
    places = {}
    # Each value is checked as it is parsed: all of them could take many times the memory of the text.
    for name, part in parts.members(lambda _: parts.value()):
        if name in tensors:
            places[name] = _place(part, tensors[name])
    parts.end()
    for name in tensors:
        if name not in places:
            raise CheckpointError(f"it does not have {reprlib.repr(name)}")
    return places


def _place(part: Any, stored: StoredTensor) -> tuple[_Index, _Index | None]:
    """Returns where a part starts in its tensor, and the shape of the tensor if it is known."""
    start: Any = part.get(_OFFSETS) if isinstance(part, dict) else None
    shape: Any = part.get(_SHAPE) if isinstance(part, dict) else None
    for sizes in [start] if shape is None else [start, shape]:
        if (
            not isinstance(sizes, list)
            or len(sizes) != len(stored.shape)
            or not all(type(size) is int and 0 <= size <= MAX_NUMBER >> 1 for size in sizes)
        ):
            raise CheckpointError(f"{reprlib.repr(stored.name)}: {reprlib.repr(part)}, for shape {stored.shape}")
    return tuple(start), None if shape is None else tuple(shape)


def _checked(parts: Sequence[_Part]) -> tuple[_Index, Sequence[_Part]]:
    """Returns the shape of a tensor, and its parts without empty ones.

    Raises:
        ValueError: They are not parts of one tensor, or do not cover it.
    """
    shapes = {part.shape for part in parts} - {None}
    kinds = {(part.stored.dtype, len(part.start)) for part in parts}
    if len(kinds) > 1 or len(shapes) > 1:
        raise ValueError("has parts of several tensors")
    size = shapes.pop() if shapes else tuple(map(max, zip(*(part.end for part in parts), strict=True)))
    assert size is not None  # noqa: S101  None was removed
    filled = [part for part in parts if 0 not in part.stored.shape]
    if not filled and 0 in size:
        return size, parts[:1]
    if not _covers([(part.start, part.end) for part in filled], (0,) * len(size), size):
        raise ValueError(f"its {len(parts)} parts do not cover its shape {size} once: files are missing, or too many")
    return size, filled


def _covers(boxes: Sequence[tuple[_Index, _Index]], start: _Index, end: _Index, cuts: int = _MAX_CUTS) -> bool:
    """Returns whether boxes, given as starts and ends, cover a box, each element once.

    Only if `cuts` rounds of cuts through a whole box separate them, as each sharding does.
    """
    if len(boxes) < 2 or not cuts:
        return list(boxes) == [(start, end)]
    for dimension in range(len(start)):
        groups = list(_groups(boxes, dimension))
        if len(groups) > 1:
            ends = [start[dimension], *(last for _, last, _ in groups)]
            starts = [*(first for first, _, _ in groups), end[dimension]]
            return starts == ends and all(
                _covers(group, _with(start, dimension, first), _with(end, dimension, last), cuts - 1)
                for first, last, group in groups
            )
    return False


def _groups(
    boxes: Iterable[tuple[_Index, _Index]], dimension: int
) -> Iterator[tuple[int, int, list[tuple[_Index, _Index]]]]:
    """Yields groups of boxes whose ranges in a dimension have elements in common: first, end, and the boxes."""
    group: list[tuple[_Index, _Index]] = []
    first = last = 0
    for box in sorted(boxes, key=lambda box: box[0][dimension]):
        if group and box[0][dimension] >= last:
            yield first, last, group
            group = []
        if not group:
            first = last = box[0][dimension]
        group.append(box)
        last = max(last, box[1][dimension])
    if group:
        yield first, last, group


def _with(index: _Index, dimension: int, value: int) -> _Index:
    return (*index[:dimension], value, *index[dimension + 1 :])
