"""Checks the bodies of control requests. `control_api` serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .state import State

# A control request's function: takes the state and the parsed body, returns what is answered as JSON.
Handler = Callable[[State, object], object]
# By method and name, the part of the URL after /_control/.
Handlers = Mapping[tuple[str, str], Handler]


class ControlError(ValueError):
    """An invalid control request."""


def fields_of(given: object, **types: tuple[type, ...]) -> dict[str, object]:
    """Returns a JSON object whose fields are all known and of the given types; raises ControlError otherwise."""
    if not isinstance(given, dict):
        raise ControlError("the body must be a JSON object")
    for name, value in given.items():
        if name not in types or not isinstance(value, types[name]):
            raise ControlError(f"{name}={value!r}: must be one of {sorted(types)}, and of its type")
    return given
