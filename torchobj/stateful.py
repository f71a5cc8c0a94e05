"""Recognises objects with a state, such as models, optimizers and loaders."""

from typing import Any

__all__ = ["is_stateful"]


def is_stateful(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
