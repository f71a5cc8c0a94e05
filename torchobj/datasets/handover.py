"""Buffers that cross from a DataLoader worker to the trainer as references to the arena, not as bytes."""

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torchobj import _torchobj
from torchobj._torchobj import Buffer


def _refuse(message: str) -> NoReturn:
    raise BufferError(message)


def _reduce(buffer: Buffer) -> Any:
    try:
        handed = _torchobj.hand(buffer)
    except BufferError as error:
        # Raised by the trainer: a worker's queue would drop what cannot be pickled, and the trainer wait for it.
        return _refuse, (str(error),)
    return buffer.__reduce__() if handed is None else (_torchobj.adopt, handed)


if sys.platform == "linux":
    # The pickler that DataLoader workers send samples by.
    ForkingPickler.register(Buffer, _reduce)
