"""What a state may hold: looked at when it is saved, as a restore may come after a crash. Changes nothing."""

import collections
import functools
import logging
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchobj.checkpoint.pickling import refused_global
from torchobj.exceptions import ConfigError

__all__ = ["check_whole", "warn_of_refused"]

logger = logging.getLogger("torchobj")

#: What every restore takes.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Tensor)
_CONTAINERS = (dict, collections.OrderedDict, collections.Counter, list, tuple, set)


def check_whole(state: Any) -> None:
    """Raises where a tensor is divided among ranks: one file would have the part of one of them.

    Args:
        state: With states in the places of objects.

    Raises:
        ConfigError: One is; it is named.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for name, value in _parts(state, ""):
        parts = _ranks_of(value) if isinstance(value, torch.Tensor) else 1
        if parts > 1:
            raise ConfigError(f"{name} is sharded over {parts} ranks; use CheckpointManager(..., sharded=True)")


def warn_of_refused(state: Any) -> None:
    """Says in the log which values a restore with `weights_only=True` will refuse; once for each entry.

    Args:
        state: With states in the places of objects.
    """
    for name, value in _parts(state, ""):
        kind = type(value)
        if (
            kind not in _PLAIN
            and kind not in _CONTAINERS
            and not isinstance(value, torch.Tensor)
            and _is_refused(value)
        ):
            _warn(name, f"{kind.__module__}.{kind.__qualname__}")


@functools.cache
def _warn(name: str, kind: str) -> None:
    logger.warning("restore needs weights_only=False for entry %r (%s)", name, kind)


def _is_refused(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ != "numpy":
        return refused_global([f"{kind.__module__}.{kind.__qualname__}"]) is not None
    # No class of its own stands for it in a pickle. An array's elements say nothing more.
    data = pickle.dumps(value[:0] if getattr(value, "ndim", 0) else value, protocol=2)
    names = [str(argument).replace(" ", ".") for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"]
    return refused_global(names) is not None


def _ranks_of(tensor: torch.Tensor) -> int:
    """Among how many ranks a tensor is divided."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # noqa: PLC0415  with torch.distributed only
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(tensor, ShardedTensor):
        return torch.distributed.get_world_size(tensor._process_group)
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return int(torch.Size(size for placement, size in sizes if not placement.is_replicate()).numel())
    return 1


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in a state, with its name."""
    yield name, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _parts(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple | set) and type(value) not in _PLAIN:
        for number, inner in enumerate(value):
            yield from _parts(inner, f"{name}.{number}")
