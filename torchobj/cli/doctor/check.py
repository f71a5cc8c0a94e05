"""What a check of `torchobj doctor` found."""

from typing import Literal, NamedTuple

#: How the check of credentials begins if requests have none.
UNSIGNED = "no credentials are used"


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
