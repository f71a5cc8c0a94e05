"""The result of one check of `torchobj doctor`."""

from typing import Literal, NamedTuple

__all__ = ["Check"]


class Check(NamedTuple):
    """What a check found."""

    name: str
    """What was checked."""
    state: Literal["ok", "note", "warning", "failed"]
    """`note`: a fact; `warning`: works, but may become a problem; `failed`: does not work."""
    found: str
    """What was found, with numbers and without secrets."""
    advice: str = ""
    """The next step."""
