"""Stops background work when the process exits. Forks are handled in Rust."""

import atexit
import sys

from torchobj import _torchobj
from torchobj.config import credentials

#: Maximum time for which the exit of the process waits until dropped uploads are aborted.
_FINISH_TIMEOUT_S = 10.0


def register() -> None:
    """Registers the functions to call at exit. Called once, at import."""
    # Handlers run in reverse order: aborting an upload at exit may need credentials.
    atexit.register(credentials.close)
    atexit.register(_torchobj.finish, _FINISH_TIMEOUT_S)


def finish_dropped() -> None:
    """Waits until dropped uploads are aborted, if the interpreter is finalizing: exit functions have run by then."""
    if sys.is_finalizing():
        _torchobj.finish(_FINISH_TIMEOUT_S)
