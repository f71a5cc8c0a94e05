"""The unpickling of `torch.load`, over storages that were read before. Reads nothing."""

import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import _weights_only_unpickler

from torchobj.checkpoint.collector import paused_collector
from torchobj.exceptions import CheckpointError

__all__ = ["MapLocation", "Restore", "refused_global", "restored_by", "storage_dtype", "unpickle"]

#: Where storages go: as `map_location` of `torch.load`.
MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None

#: Moves a storage to where it belongs, by the location that it was saved from.
Restore: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]

#: torch's own functions have no types.
_torch: Any = torch.serialization
_weights_only: Any = _weights_only_unpickler

#: Moved within torch; pickles have the old name (torch/serialization.py, `_load`).
_MOVED_MODULES = {"torch.tensor": "torch._tensor"}


def restored_by(map_location: MapLocation) -> Restore:
    """What torch makes of a `map_location`."""
    restore: Restore = _torch._get_restore_location(map_location)
    return restore


def storage_dtype(name: str) -> torch.dtype:
    """The dtype of a storage by the name of its class, as `FloatStorage`.

    Raises:
        KeyError: No class of a typed storage.
    """
    dtype: torch.dtype = _torch.StorageType(name).dtype
    return dtype


def refused_global(names: list[str]) -> str | None:
    """The first of a pickle's globals that `weights_only=True` does not allow."""
    allowed = {*_weights_only._get_allowed_globals(), *_weights_only._get_user_allowed_globals()}
    return next((name for name in names if name not in allowed), None)


class _Unpickler(pickle.Unpickler):
    """As torch's own in `torch.serialization._load`."""

    def find_class(self, module: str, name: str) -> Any:
        if isinstance(name, str) and "Storage" in name:
            try:
                return _torch.StorageType(name)
            except KeyError:
                # A class whose name has the word, and no storage's.
                pass
        return super().find_class(_MOVED_MODULES.get(module, module), name)


@paused_collector()
def unpickle(
    data: Any,
    storage_of: Callable[[str, int, str], torch.UntypedStorage],
    map_location: MapLocation,
    *,
    weights_only: bool,
) -> Any:
    """Makes the object.

    Args:
        data: The bytes of `data.pkl`.
        storage_of: Gives a storage by key, size in bytes and location; asked once for each.
        map_location: As for `torch.load`; here for tensors without storages only.
        weights_only: Whether only what torch allows is made.

    Raises:
        CheckpointError: `weights_only` refuses what the pickle holds, or this is no pickle.
    """
    storages: dict[str, Any] = {}
    typed_storage: Any = torch.storage.TypedStorage

    def persistent_load(identity: Any) -> Any:
        kind: Any
        count: Any
        _, kind, key, location, count = (part.decode("ascii") if isinstance(part, bytes) else part for part in identity)
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        known = storages.get(key)
        if known is None:
            untyped = storage_of(key, count * dtype.itemsize, location)
        elif known.dtype == dtype:
            return known
        else:
            untyped = known._untyped_storage
        typed = typed_storage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return storages.setdefault(key, typed) if known is None else typed

    kind: Any = _weights_only.Unpickler if weights_only else _Unpickler
    unpickler = kind(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    local = _torch._serialization_tls
    local.map_location = map_location
    try:
        value = unpickler.load()
    except pickle.UnpicklingError as error:
        hint = "; weights_only=False loads it, and runs what it names: only for a file that you trust"
        raise CheckpointError(f"{error}{hint if weights_only else ''}") from error
    finally:
        local.map_location = None
    validate: Any = torch._utils._validate_loaded_sparse_tensors
    # torch 2.15 is told; older ones ask their own setting.
    told = {"weights_only": weights_only} if inspect.signature(validate).parameters else {}
    validate(**told)
    return value
