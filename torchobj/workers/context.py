"""Sets the value of a context variable within a block."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")


@contextlib.contextmanager
def setting(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Within the block, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
