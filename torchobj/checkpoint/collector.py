"""Python's garbage collector, kept from looking where only many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector", "settle"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps the collector from running, in all threads; for a block that computes, and hardly waits.

    The plan and the metadata of a checkpoint are some hundred thousand objects, and none of them is garbage. As they
    come, the collector looks through all objects of the process again and again, which takes longer than making them.
    A collector that is disabled anyway stays so.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Makes all objects that there are old ones, for the collector, without looking at any.

    What was made while it was paused is young, and where that is much it looks through all objects of the process as
    soon as it may: 150 ms beside torch. Objects that somebody froze stay frozen, and then nothing is done.
    """
    if gc.isenabled() and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
