"""Reads objects ahead, in an order that the caller gives.

In the process that owns the prefetcher, and in its DataLoader workers, the next objects are announced within this
process's share of the memory budget, and the prefetcher reads them. Elsewhere a thread reads the next few objects.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.datasets.listing import Listing
from torchobj.datasets.memory_budget import AHEAD_SHARE, budget_bytes
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.ref_reader import RefReader
from torchobj.datasets.sharding import Order, in_order

#: Number of objects per request to the prefetcher.
_GROUP_OBJECTS = 32

#: Share of the announced bytes that a worker requests at a time, and holds until they are used.
_GROUP_SHARE = 0.25

#: Number of objects announced per message, so that the first message of an epoch is fast.
_MESSAGE_OBJECTS = 1024

#: Number of iterators that share the part of this process, because a mixture reads from them in turn.
_iterators: ContextVar[int] = ContextVar("torchobj_iterators", default=1)

IndexedReader = tuple[int, ObjectReader | Exception]
T = TypeVar("T")


def read_ahead(listing: Listing, order: Order, kind: ReaderConstructor) -> Iterator[IndexedReader]:
    """Readers of objects in this order, with their numbers; exceptions in place of objects that cannot be read."""
    manifest = listing.manifest()
    source = listing.source(manifest)
    if not kind.whole:
        return ((index, *listing.readers([index], kind)) for index in map(int, order))
    if source is None:
        return _read_in_threads(listing, order, kind)
    return _read_announced(source, order)


def read_while_listing(
    listing: Listing, pages: "_torchobj.ManifestPages", kind: ReaderConstructor, begin: int
) -> Iterator[IndexedReader]:
    """Readers of the objects of a listing in progress, from number `begin` on, page by page in its order."""
    before = 0
    for page in pages:
        skipped = min(len(page), max(0, begin - before))
        for index, reader in read_ahead(listing.for_page(page), in_order(len(page))[skipped:], kind):
            yield before + index, reader
        before += len(page)
    listing.keep(pages)


def _read_announced(source: "_torchobj.NativeSource", order: Order) -> Iterator[IndexedReader]:
    iteration = _torchobj.NativeIteration(source)

    def read(indices: list[int], ahead: list[int]) -> list[Any]:
        return iteration.read(indices, ahead, True)  # noqa: FBT003  native, by position

    limit = _ahead_bytes(iteration.budget())
    for indices, readers in _in_announced_groups(read, _groups(source, order, int(limit * _GROUP_SHARE)), limit):
        yield from _pair(indices, readers)


def read_refs_ahead(
    reader: RefReader, groups: Callable[[int], Iterator[tuple[list[ObjectRef], int]]], max_bytes: int | None = None
) -> Iterator[tuple[list[ObjectRef], list[ObjectReader | Exception]]]:
    """Reads groups of objects in order, and announces those that follow within this process's part of the budget.

    Args:
        reader: Reads the objects.
        groups: Returns the groups, with the memory that each needs in bytes, given the number of bytes read ahead.
        max_bytes: Maximum number of bytes read ahead. None: the part of the budget.
    """
    iteration = reader.iteration()
    share = _ahead_bytes(budget_bytes() if iteration is None else iteration.budget())
    limit = share if max_bytes is None else min(share, max_bytes)
    if iteration is None:
        return _in_threads(reader.read, (refs for refs, _ in groups(limit)))
    return _in_announced_groups(iteration.read, groups(limit), limit)


def _ahead_bytes(budget: int) -> int:
    """The part of the memory budget, in bytes, that an iterator may announce: its share of that of its process."""
    worker = torch.utils.data.get_worker_info()
    return int(budget * AHEAD_SHARE / (1 if worker is None else worker.num_workers) / _iterators.get())


@contextlib.contextmanager
def sharing(iterators: int) -> Iterator[None]:
    """Within the block, iterators that start to read are some of `iterators` from which a mixture reads in turn."""
    token = _iterators.set(_iterators.get() * iterators)
    try:
        yield
    finally:
        _iterators.reset(token)


def _in_announced_groups(
    read: Callable[[list[T], list[T]], list[Any]], groups: Iterator[tuple[list[T], int]], limit: float
) -> Iterator[tuple[list[T], list[Any]]]:
    """Reads groups of objects in order, and announces those that follow.

    Args:
        read: Announces its second argument and returns the readers of its first.
        groups: Objects that are read by one call, and the memory that they need in bytes.
        limit: Maximum number of bytes that are announced and not read.
    """
    pending: collections.deque[tuple[list[T], int]] = collections.deque()
    announced = 0
    while True:
        to_announce: list[T] = []
        while len(to_announce) < _MESSAGE_OBJECTS and (not pending or announced < limit):
            group = next(groups, None)
            if group is None:
                break
            if pending:
                to_announce += group[0]
            pending.append(group)
            announced += group[1]
        if not pending:
            return
        objects, size = pending.popleft()
        announced -= size
        yield objects, read(objects, to_announce)


def _groups(source: "_torchobj.NativeSource", order: Order, max_bytes: int) -> Iterator[tuple[list[int], int]]:
    """The objects of each request, with the memory that they need in bytes."""
    group: list[int] = []
    size = 0
    for start in range(0, len(order), _GROUP_OBJECTS):
        indices = order[start : start + _GROUP_OBJECTS].tolist()
        for index, charge in zip(indices, source.charges(indices), strict=True):
            if group and (len(group) == _GROUP_OBJECTS or size + charge > max_bytes):
                yield group, size
                group, size = [], 0
            group.append(index)
            size += charge
    if group:
        yield group, size


def _pair(indices: list[int], readers: list[Any]) -> Iterator[IndexedReader]:
    # pop() drops the reference to a reader once it is used.
    readers.reverse()
    for index in indices:
        yield index, readers.pop()


def _read_in_threads(listing: Listing, order: Order, kind: ReaderConstructor) -> Iterator[IndexedReader]:
    starts = range(0, len(order), _GROUP_OBJECTS)
    groups = (order[start : start + _GROUP_OBJECTS].tolist() for start in starts)
    for indices, readers in _in_threads(lambda indices: listing.readers(indices, kind, return_errors=True), groups):
        yield from _pair(indices, readers)


def _in_threads(read: Callable[[list[T]], list[Any]], groups: Iterator[list[T]]) -> Iterator[tuple[list[T], list[Any]]]:
    """Reads groups of objects in order, each while the one before it is used."""
    before: tuple[list[T], Future[list[Any]]] | None = None
    for group in groups:
        following = (group, _in_a_thread(read, group))
        if before is not None:
            yield before[0], before[1].result()
        before = following
    if before is not None:
        yield before[0], before[1].result()


def _in_a_thread(read: Callable[[list[T]], list[Any]], group: list[T]) -> "Future[list[Any]]":
    """Reads in a daemon thread: threads of an executor would delay Ctrl-C and the exit of the process."""
    future: Future[list[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(read(group))
        except BaseException as error:  # noqa: BLE001  raised when the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="torchobj-iterable", daemon=True).start()
    return future
