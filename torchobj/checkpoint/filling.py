"""Existing tensors filled from a checkpoint: what fits is checked whole before the first byte is overwritten."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from torchobj.exceptions import ConfigError

__all__ = ["Pair", "assigned", "pairs_of"]

#: What has places of its own. Anything else is a leaf, and is replaced.
_CONTAINERS = (torch.Tensor, Mapping, list, tuple)

#: What is entered already, by identities: the caller's, what was loaded in its place, and what became of the two.
_Entered: TypeAlias = dict[tuple[int, int], tuple[Any, ...]]

#: What torch answers of a tensor that has several elements in the same place.
_OVERLAPS = 1

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
    matching = _Matching()
    matching.match(into, loaded, "")
    if wrong := matching.wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ConfigError(f"{url}: into does not fit: {'; '.join(wrong[:_NAMED])}{more}{_remedy(into, loaded)}")
    return matching.pairs


def assigned(into: Any, loaded: Any) -> Any:
    """`into` with everything that is no tensor taken from `loaded`, in place where it can be."""
    return _assigned(into, loaded, {})


def _assigned(into: Any, loaded: Any, entered: _Entered) -> Any:
    if isinstance(into, torch.Tensor):
        return into
    if not isinstance(into, Mapping | list | tuple):
        return loaded
    place = id(into), id(loaded)
    if place in entered:
        return entered[place][-1]
    entered[place] = (into, loaded, into)
    if isinstance(into, Mapping):
        for key, value in loaded.items():
            new = _assigned(into[key], value, entered)
            if new is not into[key]:
                into[key] = new  # type: ignore[index]
        return into
    values = [_assigned(*both, entered) for both in zip(into, loaded, strict=True)]
    if isinstance(into, list):
        into[:] = values
        return into
    new = type(into)(*values) if hasattr(into, "_fields") else type(into)(values)
    entered[place] = (into, loaded, new)
    return new


class _Matching:
    """Goes through both structures; each pair of containers is entered once."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.wrong: list[str] = []
        self._entered: _Entered = {}

    def match(self, into: Any, loaded: Any, path: str) -> None:
        """Finds the pairs of two parts, and what is wrong with them."""
        if isinstance(into, torch.Tensor) and isinstance(loaded, torch.Tensor):
            reason = _reason(into, loaded)
            if reason:
                self.wrong.append(f"{path or 'the object'}: {reason}")
            else:
                self.pairs.append(Pair(path, into, loaded))
        elif isinstance(into, _CONTAINERS) or isinstance(loaded, _CONTAINERS):
            both = id(into), id(loaded)
            if both not in self._entered:
                self._entered[both] = (into, loaded)
                self._match_containers(into, loaded, path)

    def _match_containers(self, into: Any, loaded: Any, path: str) -> None:
        inner = path and path + "."
        if isinstance(into, Mapping) and isinstance(loaded, Mapping):
            self.wrong += [f"{inner}{key}: not in the file" for key in into if key not in loaded]
            self.wrong += [f"{inner}{key}: only in the file" for key in loaded if key not in into]
            for key in (key for key in loaded if key in into):
                self.match(into[key], loaded[key], f"{inner}{key}")
        elif isinstance(into, list | tuple) and isinstance(loaded, list | tuple) and len(into) == len(loaded):
            for index, both in enumerate(zip(into, loaded, strict=True)):
                self.match(*both, f"{inner}{index}")
        else:
            # A module or an optimizer: what it was saved as fits what it gives now.
            remedy = (
                "; give its state_dict(), as CheckpointManager.restore does"
                if callable(getattr(into, "state_dict", None))
                else ""
            )
            self.wrong.append(f"{path or 'the object'}: {_kind(into)} here, {_kind(loaded)} in the file{remedy}")


def _reason(into: torch.Tensor, loaded: torch.Tensor) -> str:
    """Why a tensor cannot be filled; empty if it can."""
    if _form(into) != _form(loaded):
        return f"{_form(into)} here, {_form(loaded)} in the file"
    if into.device.type == "meta":
        return "a tensor on meta cannot be filled"
    if into.layout is torch.strided and torch._debug_has_internal_overlap(into) == _OVERLAPS:
        return "elements of the tensor share memory, as of one that was expanded"
    return ""


def _remedy(into: Any, loaded: Any) -> str:
    """What to do where a part of a checkpoint is wanted."""
    if not isinstance(into, Mapping) or not isinstance(loaded, Mapping) or not into.keys() < loaded.keys():
        return ""
    return f"; keys={list(into)!r} loads a part"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _form(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout} of shape {tuple(tensor.shape)}"
