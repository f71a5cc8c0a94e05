"""Says, once, that batches are read which nobody announced, and what to do about it.

A loader that announces, or that was told not to, makes itself known: to the workers that it starts, who inherit what is
noted here or get it with the dataset, and to its own process where it has no workers. Who then reads batch after batch,
and knows of no such loader, reads for a DataLoader of torch's that nothing is attached to.
"""

import contextlib
import logging
import mmap
from collections.abc import Iterator
from typing import Any

import torch.utils.data

logger = logging.getLogger("torchobj")

#: The batch that is told of: a few are read without a look-ahead by whoever tries a dataset out.
_PATIENCE = 3

#: Whether a loader that needs not be told started this process, or runs in it.
_known = False
_batches = 0
#: Whether it was said; shared with workers that are forked, of which there are new ones each epoch.
_said = mmap.mmap(-1, 1)


def know() -> None:
    """Nothing is to be said in this process any more, and in no worker that it starts."""
    global _known  # noqa: PLW0603  one a process
    _known = True


def is_known() -> bool:
    """Whether nothing is to be said here."""
    return _known


@contextlib.contextmanager
def known(num_workers: int) -> Iterator[None]:
    """While a loader starts workers: nothing is to be said in them. Without workers: nor here, from now on."""
    global _known  # noqa: PLW0603  one a process
    before, _known = _known, True
    try:
        yield
    finally:
        _known = before or num_workers == 0


def note_batch(dataset: Any) -> None:
    """A DataLoader reads a batch of `dataset` that, for all that is known, was not announced."""
    global _batches  # noqa: PLW0603  one a process
    if _known or _said[0]:
        return
    worker = torch.utils.data.get_worker_info()
    if worker is not None and not (worker.id == 0 and _is_seen_through(worker.dataset, dataset)):
        return
    _batches += 1
    if _batches == _PATIENCE:
        _said[0] = 1
        logger.warning(
            "batches are read only when they are needed, since the DataLoader does not announce them: use "
            "torchobj.DataLoader, or torchobj.attach(loader), to have them read ahead; with lookahead=0 it is not, and "
            "this is not said"
        )


def _is_seen_through(outer: Any, dataset: Any) -> bool:
    """Whether the samples' objects can be known; a wrapper of the user's own tells nothing of them."""
    return outer is dataset or type(outer).__module__.startswith("torch.") or hasattr(outer, "objects_at")
