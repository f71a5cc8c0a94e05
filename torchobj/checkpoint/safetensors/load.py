"""`torchobj.load` of safetensors: reads tensors in parallel, directly into their final memory."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from torchobj.checkpoint.archive import device_memory, entries
from torchobj.checkpoint.archive.pickling import MapLocation, restored_by
from torchobj.checkpoint.matching import TensorOutline, pairs_of
from torchobj.checkpoint.safetensors.file import TensorRead, read
from torchobj.checkpoint.safetensors.header import StoredTensor
from torchobj.checkpoint.safetensors.weights import Weights, open_weights
from torchobj.config import StoreConfig
from torchobj.ranks.shared_read.reads import Reads
from torchobj.store.transfers import ByteProgress

__all__ = ["load", "tensor_of"]

logger = logging.getLogger("torchobj")


def load(
    url: str,
    map_location: MapLocation,
    *,
    keys: Sequence[str] | None,
    into: Any,
    counted: ByteProgress,
    config: StoreConfig | None,
    reads: Reads,
) -> Any:
    """`torchobj.load` of a file, an index or a folder. Arguments and errors are those of `torchobj.load`."""
    weights = open_weights([url], None if keys is None else entries.checked_keys(keys), config)
    logger.debug("%s: not verified: files of safetensors have no checksums", url)
    return _new(weights, map_location, counted, reads) if into is None else _fill(weights, into, url, counted, reads)


def tensor_of(storage: torch.UntypedStorage, stored: StoredTensor) -> torch.Tensor:
    """Returns the tensor whose bytes are a storage."""
    empty: Any = torch.empty(0, dtype=stored.dtype, device=storage.device)
    tensor: torch.Tensor = empty.set_(storage, 0, stored.shape)
    return tensor


def _new(
    weights: Weights, map_location: MapLocation, counted: ByteProgress, reads: Reads
) -> "OrderedDict[str, torch.Tensor]":
    restore = restored_by(map_location)
    device = torch.device("cpu")
    if map_location is None or isinstance(map_location, str | bytes | torch.device | dict):
        # Before anything is read: torch raises an error here if a GPU is missing.
        device = restore(device_memory.storage_of(0), "cpu").device
    storages = {
        name: device_memory.storage_of(stored.end - stored.start, device)
        for name, (_, stored) in weights.tensors.items()
    }
    if device.type != "meta":
        read(
            [
                TensorRead(file, stored.start, device_memory.bytes_of(storages[name]))
                for name, (file, stored) in weights.tensors.items()
            ],
            counted,
            reads,
        )
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    # As torch has the versions of modules in `_metadata` of a state dict.
    state.metadata = weights.metadata  # type: ignore[attr-defined]
    for name, (_, stored) in weights.tensors.items():
        storage = storages.pop(name)
        # On a device: it was read to where it belongs.
        state[name] = tensor_of(restore(storage, "cpu") if storage.device.type == "cpu" else storage, stored)
    return state


def _fill(weights: Weights, into: Any, url: str, counted: ByteProgress, reads: Reads) -> Any:
    outline = {name: TensorOutline(stored.dtype, tuple(stored.shape)) for name, (_, stored) in weights.tensors.items()}
    pairs = pairs_of(into, outline, url)
    direct, copied, last_end = [], [], 0
    with torch.no_grad():
        for pair in sorted(pairs, key=lambda pair: _address(pair.target)):
            torch.autograd.graph.increment_version(pair.target)
            file, stored = weights.tensors[pair.path]
            if not pair.target.numel():
                continue
            address = _address(pair.target)
            if address and address >= last_end:
                target = pair.target.detach().reshape(-1).view(torch.uint8)
                direct.append(TensorRead(file, stored.start, target))
                last_end = address + len(target)
            else:
                copied.append((pair.target, file, stored))
        read(direct, counted, reads)
        for target, file, stored in copied:
            storage = device_memory.storage_of(stored.end - stored.start)
            read([TensorRead(file, stored.start, device_memory.bytes_of(storage))], counted, reads)
            target.copy_(tensor_of(storage, stored))
    return into


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor whose memory is its elements in their order; 0 for other tensors."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) else 0
