"""What torch's iterator reads of a loader for one pass, with what torchobj adds: built once, applied at one place."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class PassSetup:
    """The dataset, the collate function and the first calls of workers of one pass, each with what was added to it.

    Args:
        loader: The loader of the pass.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.collate_fn: Callable[[Any], Any] = loader.collate_fn
        self._first: list[Callable[[], None]] = []
        self._last: list[Callable[[], None]] = []

    def call_in_workers(self, first: Callable[[], None], last: Callable[[], None] | None = None) -> None:
        """Adds a call of each worker before those that were added, and one after them.

        The `worker_init_fn` of the loader is called in between.
        """
        self._first.insert(0, first)
        if last is not None:
            self._last.append(last)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the loader has the attributes of this pass. torch's iterator reads them once."""
        loader, dataset = self.loader, self.loader.dataset
        before = loader.collate_fn, loader.worker_init_fn
        loader.collate_fn = self.collate_fn
        if self._first:
            loader.worker_init_fn = functools.partial(_start_worker, self._first, loader.worker_init_fn, self._last)
        # torch refuses an assignment of the dataset.
        loader.__dict__["dataset"] = self.dataset
        try:
            yield
        finally:
            loader.__dict__["dataset"] = dataset
            loader.collate_fn, loader.worker_init_fn = before


def _start_worker(
    first: Sequence[Callable[[], None]],
    worker_init_fn: Callable[[int], Any] | None,
    last: Sequence[Callable[[], None]],
    worker: int,
) -> None:
    for call in first:
        call()
    if worker_init_fn is not None:
        worker_init_fn(worker)
    for call in last:
        call()
