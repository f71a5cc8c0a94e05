"""Recognises objects with a state, such as models, optimizers and loaders, takes a state that may not be needed, and
loads states. What torchobj resumes itself has a `Position` instead.
"""

import copy
from typing import Any, NamedTuple, Self

from torchobj.exceptions import ConfigError, TorchobjError

__all__ = ["FailedState", "Position", "checked", "is_stateful", "load_state", "state_if_possible"]

#: Where a pass is, as plain values, with what it depends on. What can be resumed returns one by `position()`, and
#: starts at it by `start(position)`.
Position = dict[str, Any]


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


def load_state(value: Any, state: Any) -> None:
    """Loads a copy of a state into an object; None: none was saved, and the object is left as it is.

    Raises:
        ConfigError: The object has no state.
    """
    if state is None:
        return
    if not is_stateful(value):
        raise ConfigError(
            f"position of the state: contains the state of a dataset; a {type(value).__name__} has no state_dict and "
            "load_state_dict"
        )
    # A copy, because an object may modify the one it is given.
    value.load_state_dict(copy.deepcopy(state))
