"""Python's garbage collector, kept from looking where only many objects are made that stay."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector", "settle"]

#: So many objects are looked at in a few milliseconds.
_MUCH = 20_000

#: How often the collector had looked through everything when `settle` last did something.
_settled_after = -1


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the collector for a block that computes and hardly waits, if the main thread runs the block.

    The plan and the metadata of a checkpoint are some hundred thousand objects, and none of them is garbage. As they
    come, the collector looks through all objects of the process again and again, which takes longer than making them.
    A collector that is disabled stays disabled. In other threads, such as the one of a background save, nothing is
    changed: the switch is one for the process, and the trainer may use it meanwhile.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Makes all objects that there are old ones, for the collector, without looking at any.

    Called while it is paused: what was made meanwhile is young, and where that is much it looks through all objects of
    the process as soon as it may, 150 ms beside torch. Nothing is done where it is little, or where somebody froze
    objects, which then stay so; nor a second time before the collector has looked through everything again, by which
    garbage that became old is found. Threads other than the main thread change nothing.
    """
    global _settled_after  # noqa: PLW0603  the collector is one of the process
    if threading.current_thread() is not threading.main_thread():
        return
    full_collections = gc.get_stats()[2]["collections"]
    if gc.get_count()[0] < _MUCH or full_collections == _settled_after or gc.get_freeze_count():
        return
    _settled_after = full_collections
    gc.freeze()
    gc.unfreeze()
