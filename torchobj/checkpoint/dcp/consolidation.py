"""Joins the shards of a folder of safetensors into files of whole tensors, in bounded memory.

Ranges of all shards are read in parallel into a block of consecutive bytes of a file. It is sent while the next one is
read.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.load_items import load_items, narrowed
from torchobj.checkpoint.dcp.removal import DistributedDir
from torchobj.checkpoint.dcp.save_items import ItemFile, close_files
from torchobj.checkpoint.safetensors.header import encoded
from torchobj.store.transfers import ByteProgress

__all__ = ["consolidate"]

#: Size of a block, unless one element is larger.
_BLOCK_BYTES = 64 << 20

#: Maximum size of the blocks that are being sent.
_SENT_BYTES = 128 << 20


class _Tile(NamedTuple):
    """A box of a tensor whose elements follow each other in the file of the whole tensor."""

    name: str
    chunk: ChunkStorageMetadata
    nbytes: int


class _Destinations(DefaultLoadPlanner):
    """Loads into given tensors, by the indices of their chunks."""

    def __init__(self, tensors: dict[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the part of a tensor that an item is read into."""
        return narrowed(self._tensors[read_item.dest_index], read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: the tensor is a view."""


def consolidate(
    shards: CheckpointDir,
    metadata: Metadata,
    folder: DistributedDir,
    name_of: Callable[[str], str],
    sizes: dict[str, int],
) -> dict[str, str]:
    """Writes the files of whole tensors.

    Args:
        shards: Folder of the shards.
        metadata: Their metadata.
        folder: Where the files are written.
        name_of: Returns the name of the file of a tensor.
        sizes: Receives the size of each file in bytes, by name, before it is written.

    Returns:
        The name of the file of each tensor, by the name of the tensor.

    Raises:
        CheckpointError: A shard is damaged.
        StoreError: A request failed. The file that was being written does not exist.
    """
    files: dict[str, dict[str, torch.Tensor]] = {}
    described: Any
    for name, described in metadata.state_dict_metadata.items():
        tensor = torch.empty(described.size, dtype=described.properties.dtype, device="meta")
        files.setdefault(name_of(name), {})[name] = tensor
    for file_name, tensors in sorted(files.items()):
        header, order = encoded(tensors, {"format": "pt"})
        sizes[file_name] = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        file = ItemFile(folder, file_name, _SENT_BYTES, ByteProgress(None))
        try:
            file.add_bytes(memoryview(header))
            for block in _blocks(tile for name in order for tile in _tiles(name, tensors[name])):
                file.add_tensor(_read(shards, metadata, block))
            close_files([file])
        except BaseException:
            file.abort()
            raise
    return {name: file for file, tensors in sorted(files.items()) for name in tensors}


def _blocks(tiles: Iterator[_Tile]) -> Iterator[list[_Tile]]:
    block: list[_Tile] = []
    size = 0
    for tile in tiles:
        if block and size + tile.nbytes > _BLOCK_BYTES:
            yield block
            block, size = [], 0
        block.append(tile)
        size += tile.nbytes
    if block:
        yield block


def _tiles(name: str, tensor: torch.Tensor) -> Iterator[_Tile]:
    """Yields the tiles of a tensor in the order of their bytes."""
    if not tensor.nbytes:
        return
    for offsets, sizes in _boxes(tuple(tensor.shape), tensor.element_size()):
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        yield _Tile(name, chunk, math.prod(sizes) * tensor.element_size())


def _boxes(shape: tuple[int, ...], width: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offsets and shape of boxes of at most `_BLOCK_BYTES`."""
    if not shape:
        yield (), ()
        return
    row_bytes = math.prod(shape[1:]) * width
    if row_bytes > _BLOCK_BYTES:
        for row in range(shape[0]):
            for offsets, sizes in _boxes(shape[1:], width):
                yield (row, *offsets), (1, *sizes)
        return
    rows = _BLOCK_BYTES // row_bytes
    for row in range(0, shape[0], rows):
        yield (row, *(0 for _ in shape[1:])), (min(rows, shape[0] - row), *shape[1:])


def _read(shards: CheckpointDir, metadata: Metadata, block: list[_Tile]) -> torch.Tensor:
    """Returns the bytes of consecutive tiles."""
    memory = torch.empty(sum(tile.nbytes for tile in block), dtype=torch.uint8)
    destinations, items, at = {}, list[ReadItem](), 0
    for name, chunk, nbytes in block:
        described: Any = metadata.state_dict_metadata[name]
        # Files have the tensors of larger dtypes first: a tile is aligned.
        tensor = memory[at : at + nbytes].view(described.properties.dtype).view(chunk.sizes)
        destinations[MetadataIndex(name, chunk.offsets)] = tensor
        items += create_read_items_for_chunk_list(name, described, [chunk])
        at += nbytes
    load_items(shards, metadata, items, _Destinations(destinations), verify=False, counted=ByteProgress(None))
    return memory
