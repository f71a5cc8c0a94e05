"""Warns once if a plain DataLoader reads batches without announcing them.

A loader that announces, or whose look-ahead is disabled, disables the warning: in the workers that it starts, which
inherit this module's state or receive it with the dataset, and in its own process if it has no workers. If the warning
is enabled when batches are read, they are read for a DataLoader of torch that is not attached.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from torchobj.warn_once import FORKED, warn_once

#: Number of batches before the warning, because interactive use reads a few.
_MIN_BATCHES = 3

#: Whether a loader that announces started this process, or runs in it.
_disabled = False
_batches = 0


def disable() -> None:
    """Disables the warning in this process and in the workers that it starts."""
    global _disabled  # noqa: PLW0603  state of the process
    _disabled = True


def is_disabled() -> bool:
    """Whether the warning is disabled."""
    return _disabled


@contextlib.contextmanager
def disabled_in_workers(num_workers: int) -> Iterator[None]:
    """Disables the warning in workers that are started in the context. Without workers, also in this process."""
    global _disabled  # noqa: PLW0603  state of the process
    before, _disabled = _disabled, True
    try:
        yield
    finally:
        _disabled = before or num_workers == 0


def note_batch(dataset: Any) -> None:
    """Records that a DataLoader reads a batch of `dataset` that was not announced as far as is known."""
    global _batches  # noqa: PLW0603  state of the process
    if _disabled or FORKED.has("announcement"):
        return
    worker = torch.utils.data.get_worker_info()
    if worker is not None and not (worker.id == 0 and _objects_are_known(worker.dataset, dataset)):
        return
    _batches += 1
    if _batches == _MIN_BATCHES:
        warn_once(
            FORKED,
            "batches are read only when they are needed, because the DataLoader does not announce them. Use "
            "torchobj.DataLoader or torchobj.attach(loader) to read ahead. With Accelerate call "
            "torchobj.attach(accelerator.prepare(loader)), because prepare returns another loader, also for a "
            "torchobj.DataLoader. Pass lookahead=0 to silence this warning.",
            key="announcement",
        )


def _objects_are_known(outer: Any, dataset: Any) -> bool:
    """Whether the objects of the samples are known; they are not for wrappers outside of torch and torchobj."""
    return outer is dataset or type(outer).__module__.startswith("torch.") or hasattr(outer, "objects_at")
