"""Existing tensors filled from a checkpoint: what fits is checked whole before the first byte is overwritten."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchobj.exceptions import ConfigError

__all__ = ["Pair", "assigned", "pairs_of"]

#: What has places of its own. Anything else is a leaf, and is replaced.
_CONTAINERS = (torch.Tensor, Mapping, list, tuple)

#: So many of the places that do not fit are named.
_NAMED = 5


class Pair(NamedTuple):
    """A tensor of the caller's, and what was loaded in its place: on meta where its bytes are still in the store."""

    path: str
    target: torch.Tensor
    source: torch.Tensor


def pairs_of(into: Any, loaded: Any, url: str) -> list[Pair]:
    """The tensors to fill, each with what was loaded for it.

    Raises:
        ConfigError: Structure, shape or dtype differ; the message names the places.
    """
    pairs: list[Pair] = []
    wrong: list[str] = []
    _match(into, loaded, "", pairs, wrong)
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ConfigError(f"{url}: into does not fit: {'; '.join(wrong[:_NAMED])}{more}")
    return pairs


def assigned(into: Any, loaded: Any) -> Any:
    """`into` with everything that is no tensor taken from `loaded`, in place where it can be."""
    if isinstance(into, torch.Tensor):
        return into
    if isinstance(into, Mapping) and isinstance(loaded, Mapping):
        for key, value in loaded.items():
            new = assigned(into[key], value)
            if new is not into[key]:
                into[key] = new  # type: ignore[index]
        return into
    if isinstance(into, list) and isinstance(loaded, list | tuple):
        into[:] = [assigned(*both) for both in zip(into, loaded, strict=True)]
        return into
    if isinstance(into, tuple) and isinstance(loaded, list | tuple):
        values = [assigned(*both) for both in zip(into, loaded, strict=True)]
        return type(into)(*values) if hasattr(into, "_fields") else type(into)(values)
    return loaded


def _match(into: Any, loaded: Any, path: str, pairs: list[Pair], wrong: list[str]) -> None:
    place = path or "the object"
    inner = path and path + "."
    if isinstance(into, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if _form(into) != _form(loaded):
            wrong.append(f"{place}: {_form(into)} here, {_form(loaded)} in the file")
        elif into.device.type == "meta":
            wrong.append(f"{place}: a tensor on meta cannot be filled")
        else:
            pairs.append(Pair(path, into, loaded))
    elif isinstance(into, Mapping) and isinstance(loaded, Mapping):
        wrong += [f"{inner}{key}: not in the file" for key in into if key not in loaded]
        wrong += [f"{inner}{key}: only in the file" for key in loaded if key not in into]
        for key in (key for key in loaded if key in into):
            _match(into[key], loaded[key], f"{inner}{key}", pairs, wrong)
    elif isinstance(into, list | tuple) and isinstance(loaded, list | tuple) and len(into) == len(loaded):
        for index, both in enumerate(zip(into, loaded, strict=True)):
            _match(*both, f"{inner}{index}", pairs, wrong)
    elif isinstance(into, _CONTAINERS) or isinstance(loaded, _CONTAINERS):
        wrong.append(f"{place}: {_kind(into)} here, {_kind(loaded)} in the file")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _form(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout} of shape {tuple(tensor.shape)}"
