"""Recognises objects with a state, such as models, optimizers and loaders, and takes a state that may not be needed."""

import copy
from typing import Any, NamedTuple, Self

from torchobj.exceptions import TorchobjError

__all__ = ["FailedState", "checked", "is_stateful", "state_if_possible"]


def is_stateful(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class FailedState(NamedTuple):
    """In place of a state that could not be taken."""

    reason: str
    """What was raised, by which object."""

    @classmethod
    def of(cls, value: Any, error: Exception) -> Self:
        """The failed state of an object whose `state_dict` raised, or returned what cannot be copied."""
        return cls(f"state_dict of {type(value).__name__} raised {type(error).__name__}: {error}")


def state_if_possible(value: Any) -> Any:
    """A copy of the state of an object, for a caller that may not need it: a `FailedState` if `state_dict` raises, or
    returns what cannot be copied.
    """
    try:
        return copy.deepcopy(value.state_dict())
    except Exception as error:  # noqa: BLE001  raised when the state is requested
        return FailedState.of(value, error)


def checked(state: Any) -> Any:
    """A state that was taken.

    Raises:
        TorchobjError: It is a `FailedState`.
    """
    if isinstance(state, FailedState):
        raise TorchobjError(state.reason)
    return state
