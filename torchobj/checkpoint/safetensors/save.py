"""Plans a file of safetensors, byte for byte that of `safetensors.torch.save_file`. Sends nothing."""

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchobj.checkpoint.archive.device_memory import check_memory
from torchobj.checkpoint.archive.plan import Hole, Plan
from torchobj.checkpoint.safetensors.header import encoded
from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["checked", "plan_of"]


def checked(tensors: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors to save.

    Raises:
        ConfigError: This is not a dict of dense, contiguous tensors.
        CheckpointError: Tensors share memory, or their memory was freed.
    """
    if not isinstance(tensors, Mapping):
        hint = ": pass its state_dict()" if isinstance(tensors, torch.nn.Module) else ""
        raise ConfigError(
            f"expected a dict of tensors by name for safetensors, but got a {type(tensors).__name__}{hint}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            got = reprlib.repr(tensor) if isinstance(tensor, int | float | str) else f"a {type(tensor).__name__}"
            raise ConfigError(f"{name}: expected a tensor, but got {got}; only .pt files have others")
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if is_wrapper:
            raise ConfigError(f"{name}: a {type(tensor).__name__}: save the tensor that it wraps, as by full_tensor()")
        if tensor.layout is not torch.strided:
            raise ConfigError(f"{name}: a sparse tensor, which safetensors does not support; .to_dense() converts it")
        if tensor.is_meta:
            raise ConfigError(f"{name}: a tensor on meta has no bytes")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ConfigError(
                f"{name}: a non contiguous tensor, or a view that conjugates or negates, which safetensors does not "
                "support; .resolve_conj().resolve_neg().contiguous() copies it"
            )
        check_memory(tensor, name)
    _check_sharing(tensors)
    return dict(tensors)


def _check_sharing(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that no two tensors have a byte in common."""
    spans = sorted((str(tensor.device), tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.nbytes)
    end, owner = ("", 0), ""
    for device, start, name in spans:
        if device == end[0] and start < end[1]:
            raise CheckpointError(
                f"some tensors share memory: {owner} and {name}: a file of safetensors would have them twice, and they "
                "would no longer be shared when it is loaded; drop one of them, or .clone() it"
            )
        end, owner = (device, start + tensors[name].nbytes), name


def plan_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> Plan:
    """Plans the file of `checked` tensors.

    Raises:
        ConfigError: A name, a dtype or the metadata cannot be in a file.
    """
    header, names = encoded(tensors, metadata)
    holes, at = [], len(header)
    for name in names:
        if tensors[name].nbytes:
            holes.append(Hole(at, _storage_of(tensors[name])))
            at += tensors[name].nbytes
    # A literal precedes each hole.
    literals = [(0, header), *((hole.start, b"") for hole in holes[1:])]
    return Plan(literals, holes, [], at, list(tensors.values()))


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns a storage of a tensor's bytes, which shares its memory."""
    storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
    if storage.nbytes() == tensor.nbytes:
        return storage
    untyped: Any = storage
    part: torch.UntypedStorage = untyped[start : start + tensor.nbytes]
    return part
