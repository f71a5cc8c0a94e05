"""Ties the native side to the life of the process: the logger, and the end. Forks it sees by itself."""

import atexit
import logging

from torchobj import _torchobj

#: How long the end of a process waits for dropped uploads to be aborted.
_FINISH_LIMIT_S = 10.0


def install() -> None:
    """Sets up the logger, and what must be done at the end. Called once, at import."""
    logging.getLogger("torchobj").addHandler(logging.NullHandler())
    atexit.register(_torchobj.finish, _FINISH_LIMIT_S)
