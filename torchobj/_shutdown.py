"""Stops background work when the process exits. Forks are handled in Rust."""

import atexit
import logging
import multiprocessing
import shlex
import sys
import threading
from collections.abc import Sequence
from multiprocessing import util

from torchobj import _torchobj
from torchobj.config import credentials

logger = logging.getLogger("torchobj")

#: Maximum time for which the exit of the process waits until uploads that have not ended are aborted.
FINISH_TIMEOUT_S = 10.0

#: Priority of the last finalizer of multiprocessing, whose queues have -5.
_LAST = -1000


def register() -> None:
    """Registers the functions to call at exit. Called once, at import."""
    # Handlers run in reverse order: aborting an upload at exit may need credentials.
    atexit.register(credentials.close)
    atexit.register(end)
    # Forked children of multiprocessing end without the handlers of atexit.
    util.register_after_fork(end, _register_in_child)
    if multiprocessing.parent_process() is not None:
        _register_in_child(end)


def _register_in_child(_: object) -> None:
    # After the finalizers of others, which may use stores.
    util.Finalize(None, _end_child, exitpriority=_LAST)


def _end_child() -> None:
    """Ends the process once its threads have ended: multiprocessing would wait for them after its finalizers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        end()


def end() -> None:
    """Ends the calls of other threads, and waits until uploads are aborted. Warns of those that are not."""
    _torchobj.end_calls()
    for url, upload_id, is_named in _torchobj.finish(FINISH_TIMEOUT_S):
        if not is_named:
            logger.warning("%s", left_behind(url, upload_id))


def left_behind(url: str, upload_id: str | None, options: Sequence[str] = ()) -> str:
    """What to know about an upload that the process leaves in the store.

    Args:
        url: URL of its object.
        upload_id: Its id, if the store has responded to its beginning.
        options: Options of the command line that it was begun with.
    """
    upload = "an upload" if upload_id is None else f"upload {upload_id}"
    command = shlex.join(["torchobj", "uploads", "list", *options, url])
    return f"{upload} of {url} was not aborted, its parts may stay in the bucket; `{command}` lists it"


def finish_dropped() -> None:
    """Waits until dropped uploads are aborted, if the interpreter is finalizing: exit functions have run by then."""
    if sys.is_finalizing():
        _torchobj.finish(FINISH_TIMEOUT_S)
