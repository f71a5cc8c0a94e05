"""States of objects that are not torchobj's, as one value of a loader's state. Knows no loader.

`torch.distributed.checkpoint` flattens dicts and lists, and restores only what has the names that it saved. A state
whose keys come and go is packed, so that it has one name at every moment.
"""

import copy
import io
from typing import Any

import torch

from torchobj.exceptions import ConfigError

__all__ = ["packed", "unpacked"]


def packed(state: Any) -> Any:
    """A state as bytes; itself where `torch.load(weights_only=True)` refuses what it holds.

    Such a state is as before: whether it is loaded is decided where the checkpoint is.
    """
    out = io.BytesIO()
    try:
        torch.save(state, out)
        data = out.getvalue()
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # noqa: BLE001  what pickling a state of the user's raises is anything
        return state
    return data


def unpacked(state: Any, name: str) -> Any:
    """A copy of what `packed` was given. Runs no code that the state names.

    Args:
        state: What `packed` returned.
        name: Of the field of the loader's state, for errors.

    Raises:
        ConfigError: The bytes are damaged, or name a class that `torch.load(weights_only=True)` refuses.
    """
    if not isinstance(state, bytes):
        return copy.deepcopy(state)
    try:
        return torch.load(io.BytesIO(state), weights_only=True)
    except Exception as error:
        raise ConfigError(f"{name}: {len(state)} bytes of the state cannot be read: {error}") from error
