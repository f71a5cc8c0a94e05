"""Stops a server process at the end of its stdin. Each server's module stops the server itself.

The pipe on stdin closes however the test process ends, so that no started server outlives it.
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
    """Calls the function once, from another thread, at the end of stdin."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        call()

    # A daemon thread: a server that stops for another reason must not wait for its stdin.
    threading.Thread(target=watch, name="stdin", daemon=True).start()


async def until_stdin_ends() -> None:
    """Returns at the end of stdin."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    when_stdin_ends(lambda: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


def die_with_parent(sent: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends; called between fork and exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)
