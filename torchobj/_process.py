"""Ties the native side to the end of the process. Forks it sees by itself."""

import atexit

from torchobj import _torchobj

#: How long the end of a process waits for dropped uploads to be aborted.
_FINISH_LIMIT_S = 10.0


def install() -> None:
    """Sets up what must be done at the end. Called once, at import."""
    atexit.register(_torchobj.finish, _FINISH_LIMIT_S)
