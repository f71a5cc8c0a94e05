"""Batches of bytes of different lengths, and the default collation of readers and buffers."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from torchobj._torchobj import Buffer, ObjectReader

__all__ = ["RaggedBatch"]


class RaggedBatch:
    """The bytes of several objects.

    A batch that a DataLoader built from readers references the memory that each object was read into. The first access
    to `data`, `pin_memory` and `to` copy the objects into one tensor.

    Args:
        data: uint8, shape (total bytes,).
        offsets: int64, shape (objects + 1,), on the CPU: object `i` is `data[offsets[i]:offsets[i + 1]]`.
        urls: URLs of the objects.

    Example:
        >>> batch = RaggedBatch(torch.arange(5, dtype=torch.uint8), torch.tensor([0, 2, 5]), ["a", "b"])
        >>> len(batch), batch[1].tolist(), batch[-2].tolist()
        (2, [2, 3, 4], [0, 1])
    """

    def __init__(self, data: torch.Tensor, offsets: torch.Tensor, urls: Sequence[str]) -> None:
        self._data: torch.Tensor | None = data
        self._buffers: list[Buffer] = []
        self.offsets, self.urls = offsets, list(urls)

    @classmethod
    def of_buffers(cls, buffers: Sequence[Buffer], urls: Sequence[str]) -> "RaggedBatch":
        """A batch that references the given buffers without a copy."""
        batch = cls.__new__(cls)
        lengths = torch.tensor([0, *map(len, buffers)], dtype=torch.int64, device="cpu")
        batch._data, batch._buffers = None, list(buffers)
        batch.offsets, batch.urls = lengths.cumsum(0), list(urls)
        return batch

    @property
    def data(self) -> torch.Tensor:
        """All bytes, concatenated: uint8, shape (total bytes,)."""
        if self._data is None:
            self._data, self._buffers = self._gathered(pin_memory=False), []
        return self._data

    def _gathered(self, *, pin_memory: bool) -> torch.Tensor:
        data = torch.empty(int(self.offsets[-1]), dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
        # Not with torch, which splits a copy of 110 KiB among threads that then spin.
        into = data.numpy()
        for buffer, start, end in zip(self._buffers, self.offsets.tolist(), self.offsets[1:].tolist(), strict=False):
            into[start:end] = numpy.asarray(buffer)
        return data

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> torch.Tensor:
        """The bytes of one object: uint8, shape (bytes,), sharing the memory of the batch."""
        try:
            position = range(len(self))[operator.index(index)]
        except IndexError:
            raise IndexError(f"object {index} of a batch of {len(self)}") from None
        if self._data is not None:
            return self._data[int(self.offsets[position]) : int(self.offsets[position + 1])]
        buffer = self._buffers[position]
        if not len(buffer):
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def __repr__(self) -> str:
        device = "cpu" if self._data is None else self._data.device
        return f"RaggedBatch({len(self)} objects, {int(self.offsets[-1])} bytes, {device})"

    def pin_memory(self) -> "RaggedBatch":
        """The batch with its data in pinned memory. Called by a DataLoader with `pin_memory=True`."""
        data = self._gathered(pin_memory=True) if self._data is None else self._data.pin_memory()
        return RaggedBatch(data, self.offsets, self.urls)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "RaggedBatch":  # noqa: FBT001, FBT002  torch's own signature
        """The batch with its data on `device`; the offsets stay on the CPU, where they are used."""
        return RaggedBatch(self.data.to(device, non_blocking=non_blocking), self.offsets, self.urls)


def _collate_readers(batch: Sequence[ObjectReader], **_: Any) -> RaggedBatch:
    """Builds a `RaggedBatch` from readers whose bytes are in memory."""
    buffers = [reader.buffer or Buffer(reader.read()) for reader in batch]
    return RaggedBatch.of_buffers(buffers, [reader.url for reader in batch])


def _collate_buffers(batch: Sequence[Buffer], **_: Any) -> list[Buffer]:
    """Builds a list of the undecoded fields of samples, as torch does of bytes."""
    return list(batch)


default_collate_fn_map[ObjectReader] = _collate_readers
default_collate_fn_map[Buffer] = _collate_buffers
