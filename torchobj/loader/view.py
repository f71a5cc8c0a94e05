"""Views of a loader for torch's iterator, and what the workers of a loader do first."""

import functools
from collections.abc import Callable
from typing import Any


def changed_view(loader: Any, **changed: Any) -> Any:
    """A shallow copy of a loader with other attributes, which torch's iterator reads once."""
    view = object.__new__(type(loader))
    view.__dict__.update(loader.__dict__, **changed)
    return view


def starting_with(
    start: Callable[[], None],
    worker_init_fn: Callable[[int], Any] | None,
    started: Callable[[], None] | None = None,
) -> Callable[[int], None]:
    """The `worker_init_fn` of a loader whose workers first call `start`, and `started` at the end."""
    return functools.partial(_start_worker, start, worker_init_fn, started)


def _start_worker(
    start: Callable[[], None],
    worker_init_fn: Callable[[int], Any] | None,
    started: Callable[[], None] | None,
    worker: int,
) -> None:
    start()
    if worker_init_fn is not None:
        worker_init_fn(worker)
    if started is not None:
        started()
