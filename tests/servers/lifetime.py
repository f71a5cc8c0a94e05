"""When a server process ends: at the end of its stdin. Leaves ending the servers themselves to their modules.

The pipe on stdin closes when the test process ends in whatever way, so nothing that was started outlives it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

# linux/prctl.h
_PR_SET_PDEATHSIG = 1


def when_stdin_ends(call: Callable[[], object]) -> None:
    """Calls the function once, from another thread, when stdin is at its end."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        call()

    # A daemon: a server that ends for another reason must not wait for its stdin.
    threading.Thread(target=watch, name="stdin", daemon=True).start()


async def until_stdin_ends() -> None:
    """Returns when stdin is at its end."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    when_stdin_ends(lambda: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends; for use between fork and exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
