"""Sends buffers from a DataLoader worker to the trainer as references to the arena instead of bytes."""

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchobj import _torchobj
from torchobj._torchobj import Buffer


def _reduce(buffer: Buffer) -> Any:
    offered = _torchobj.offer(buffer)
    return buffer.__reduce__() if offered is None else (_torchobj.adopt, offered)


if sys.platform == "linux":
    # The pickler with which DataLoader workers send samples.
    ForkingPickler.register(Buffer, _reduce)
