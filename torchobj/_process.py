"""Ties the native side to the life of the process: forks, the logger, the end."""

import atexit
import contextlib
import logging
import os

from torchobj import _torchobj

logger = logging.getLogger("torchobj")
logger.addHandler(logging.NullHandler())

#: How long the end of a process waits for dropped uploads to be aborted.
_FINISH_LIMIT_S = 10.0


def _after_fork_in_child() -> None:
    for descriptor in _torchobj.after_fork_in_child():
        # Raw: the objects that own these sockets belong to a runtime whose threads do not exist here.
        with contextlib.suppress(OSError):
            os.close(descriptor)


def install() -> None:
    """Registers what must be done at a fork and at the end. Called once, at import."""
    os.register_at_fork(
        before=_torchobj.before_fork, after_in_parent=_torchobj.after_fork_in_parent, after_in_child=_after_fork_in_child
    )
    atexit.register(_torchobj.finish, _FINISH_LIMIT_S)
