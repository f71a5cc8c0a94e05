"""Batches of raw bytes of different lengths, and how torch's default collation makes them of readers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from torchobj._torchobj import ObjectReader

__all__ = ["RaggedBatch"]


class RaggedBatch:
    """The bytes of several objects, one behind the other.

    Args:
        data: uint8, shape (total bytes,).
        offsets: int64, shape (objects + 1,), on the CPU: object `i` is `data[offsets[i]:offsets[i + 1]]`.
        urls: The objects' URLs.

    Example:
        >>> batch = RaggedBatch(torch.arange(5, dtype=torch.uint8), torch.tensor([0, 2, 5]), ["a", "b"])
        >>> len(batch), batch[1].tolist(), batch[-2].tolist()
        (2, [2, 3, 4], [0, 1])
    """

    def __init__(self, data: torch.Tensor, offsets: torch.Tensor, urls: Sequence[str]) -> None:
        self.data, self.offsets, self.urls = data, offsets, list(urls)

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> torch.Tensor:
        """The bytes of one object: uint8, shape (bytes,), sharing the memory of `data`."""
        position = range(len(self))[index]
        return self.data[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def __repr__(self) -> str:
        return f"RaggedBatch({len(self)} objects, {self.data.numel()} bytes, {self.data.device})"

    def pin_memory(self) -> "RaggedBatch":
        """The batch with its data in pinned memory; what a DataLoader with `pin_memory` calls."""
        return RaggedBatch(self.data.pin_memory(), self.offsets, self.urls)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "RaggedBatch":  # noqa: FBT001, FBT002  torch's own signature
        """The batch with its data on `device`; the offsets stay on the CPU, where they are used."""
        return RaggedBatch(self.data.to(device, non_blocking=non_blocking), self.offsets, self.urls)


def collate_readers(
    batch: Sequence[ObjectReader],
    *,
    collate_fn_map: dict[type, Callable[..., Any]] | None = None,  # noqa: ARG001  torch passes it
) -> RaggedBatch:
    """Makes a `RaggedBatch` of readers whose bytes are here."""
    lengths = torch.tensor([0, *(len(reader.getbuffer()) for reader in batch)], dtype=torch.int64)
    offsets = lengths.cumsum(0)
    data = torch.empty(int(offsets[-1]), dtype=torch.uint8)
    for reader, start, end in zip(batch, offsets.tolist(), offsets[1:].tolist(), strict=False):
        if start < end:
            data[start:end] = torch.frombuffer(reader, dtype=torch.uint8)
    return RaggedBatch(data, offsets, [reader.url for reader in batch])


default_collate_fn_map[ObjectReader] = collate_readers
