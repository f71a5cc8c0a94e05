"""Reads objects ahead, in an order that the caller gives.

In the process that owns the prefetcher, and in its DataLoader workers, the next objects are announced within this
process's share of the memory budget, and the prefetcher reads them. Elsewhere a thread reads the next few objects.
"""

import collections
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader
from torchobj.datasets.listing import Listing
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.sharding import Order, in_order
from torchobj.memory import AHEAD_SHARE

#: Number of objects per request to the prefetcher.
_GROUP_OBJECTS = 32

#: Share of the announced bytes that a worker requests at a time, and holds until they are used.
_GROUP_SHARE = 0.25

#: Number of objects announced per message, so that the first message of an epoch is fast.
_MESSAGE_OBJECTS = 1024

IndexedReader = tuple[int, ObjectReader | Exception]


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
    worker = torch.utils.data.get_worker_info()
    limit = iteration.budget() * AHEAD_SHARE / (1 if worker is None else worker.num_workers)
    groups = _groups(source, order, int(limit * _GROUP_SHARE))
    pending: collections.deque[tuple[list[int], int]] = collections.deque()
    announced = 0
    while True:
        to_announce: list[int] = []
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
        indices, size = pending.popleft()
        announced -= size
        readers = iteration.read(indices, to_announce, True)  # noqa: FBT003  native, by position
        yield from _pair(indices, readers)


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
    future: tuple[list[int], Future[list[Any]]] | None = None
    for start in range(0, len(order) + _GROUP_OBJECTS, _GROUP_OBJECTS):
        indices = order[start : start + _GROUP_OBJECTS].tolist()
        requested = (indices, _read_in_a_thread(listing, indices, kind)) if indices else None
        if future is not None:
            yield from _pair(future[0], future[1].result())
        future = requested


def _read_in_a_thread(listing: Listing, indices: list[int], kind: ReaderConstructor) -> "Future[list[Any]]":
    """Reads in a daemon thread: threads of an executor would delay Ctrl-C and the exit of the process."""
    future: Future[list[Any]] = Future()

    def read() -> None:
        try:
            future.set_result(listing.readers(indices, kind, return_errors=True))
        except BaseException as error:  # noqa: BLE001  raised when the result is read
            future.set_exception(error)

    threading.Thread(target=read, name="torchobj-iterable", daemon=True).start()
    return future
