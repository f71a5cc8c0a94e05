"""What a rank wants of a checkpoint: each request of its plan with where it lies and where it goes. Reads nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torchobj.checkpoint.dcp.item import Item, item_of, stand_in
from torchobj.checkpoint.dcp.limits import checked_info
from torchobj.exceptions import CheckpointError

__all__ = ["Directory", "Wanted"]


class Wanted:
    """A slice of a saved chunk, and the tensor that it goes to."""

    __slots__ = ("dtype", "frame", "info", "memory", "request", "shape", "target")

    def __init__(
        self, request: ReadItem, info: _StorageInfo, dtype: torch.dtype, shape: torch.Size, target: torch.Tensor
    ) -> None:
        self.request = request
        self.info = info
        #: Of the saved chunk.
        self.dtype = dtype
        self.shape = shape
        self.target = target
        #: The target's memory under a dtype that numpy has, where the bytes can go there as they are.
        self.memory = stand_in(target) if target.dtype == dtype else None
        #: How the chunk lies in the file, if torchobj or this torch wrote it; None where it is known not to.
        self.frame: Item | None = item_of(dtype, shape)
        if self.frame is not None and self.frame.length != info.length:
            self.frame = None

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.request.storage_index.fqn

    @property
    def is_whole(self) -> bool:
        """Whether the slice is all of the chunk."""
        return self.request.lengths == self.shape


class Directory:
    """Where everything lies in a checkpoint.

    Args:
        metadata: Of the checkpoint.
        url: Of the checkpoint, for errors.
    """

    def __init__(self, metadata: Metadata, url: str) -> None:
        self._described = metadata.state_dict_metadata
        self._infos: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._url = url
        self._chunks: dict[str, dict[torch.Size, torch.Size]] = {}

    def info(self, request: ReadItem) -> _StorageInfo:
        """Where what is requested lies.

        Raises:
            CheckpointError: The checkpoint does not say, or says what cannot be.
        """
        info = self._infos.get(request.storage_index)
        if info is None:
            raise CheckpointError(f"{self._url}: has no place for {request.storage_index}")
        return checked_info(info, request.storage_index.fqn, self._url)

    def wanted(self, request: ReadItem, destination: Callable[[ReadItem], torch.Tensor]) -> Wanted:
        """The request of a tensor, with its destination.

        Raises:
            CheckpointError: The checkpoint does not say where it lies, or the destination is of another size.
        """
        info = self.info(request)
        dtype, shape = self._chunk(request.storage_index)
        target = destination(request)
        # An inference tensor may be written to when it is detached. What is detached from a sparse tensor does not
        # share its number of elements.
        is_plain = type(target) is torch.Tensor and not target.requires_grad and not target.is_inference()
        if target.layout is torch.strided and not is_plain:
            target = target.detach()
        if target.size() != request.lengths:
            name, sizes = request.storage_index.fqn, f"{tuple(target.size())}, not {tuple(request.lengths)}"
            raise CheckpointError(f"{self._url}: the destination of {name} is of size {sizes}")
        return Wanted(request, info, dtype, shape, target)

    def _chunk(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the sizes of a saved chunk."""
        described: Any = self._described.get(index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            raise CheckpointError(f"{self._url}: {index.fqn} is no tensor there")
        chunks = described.chunks
        if len(chunks) == 1:
            return described.properties.dtype, chunks[0].sizes
        sizes = self._chunks.get(index.fqn)
        if sizes is None:
            sizes = self._chunks[index.fqn] = {chunk.offsets: chunk.sizes for chunk in chunks}
        if index.offset not in sizes:
            raise CheckpointError(f"{self._url}: has no chunk of {index.fqn} at {index.offset}")
        return described.properties.dtype, sizes[index.offset]
