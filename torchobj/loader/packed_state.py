"""Packs the states of samplers and datasets of other libraries into a single value of a loader's state.

`torch.distributed.checkpoint` flattens dicts and lists, and restores only names that it saved. A state whose keys vary
is packed, so that it always has the same name.
"""

import copy
import io
from typing import Any

import torch

from torchobj.exceptions import ConfigError

__all__ = ["packed", "unpacked"]


def packed(state: Any) -> Any:
    """The state as bytes, or unchanged if `torch.load(weights_only=True)` refuses its contents.

    An unchanged state is left to the checkpoint, which decides whether it can be loaded.
    """
    out = io.BytesIO()
    try:
        torch.save(state, out)
        data = out.getvalue()
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # noqa: BLE001  pickling an object of the user can raise anything
        return state
    return data


def unpacked(state: Any, name: str) -> Any:
    """A copy of the state that `packed` was given. Executes no code that the state names.

    Args:
        state: The return value of `packed`.
        name: Name of the field in the loader's state, for error messages.

    Raises:
        ConfigError: The bytes are damaged, or name a class that `torch.load(weights_only=True)` refuses.
    """
    if not isinstance(state, bytes):
        return copy.deepcopy(state)
    try:
        return torch.load(io.BytesIO(state), weights_only=True)
    except Exception as error:
        # The message of torch is a paragraph with colours about its arguments, which the caller does not have.
        reason = type(error).__name__
        raise ConfigError(f"{name}: {len(state)} bytes of the state cannot be read: {reason}") from error
