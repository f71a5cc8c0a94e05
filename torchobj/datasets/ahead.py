"""Reads objects in a known order, ahead of who uses them. What order that is, is the caller's affair.

In the process that owns the prefetcher, and in its DataLoader workers, what comes next is announced as far as this
process's share of the budget goes; the prefetcher reads it. Elsewhere a thread reads the next few objects.
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
from torchobj.datasets.readers import ReaderConstructor
from torchobj.datasets.share import Order, in_order
from torchobj.memory import AHEAD_SHARE

#: Objects that are asked for at once: one message to the prefetcher serves so many.
_GROUP_OBJECTS = 32

#: Of what a worker announces, how much is asked for at once, and held until it is used.
_GROUP_SHARE = 0.25

#: Objects that are announced by one message: the first of an epoch is not to take long.
_MESSAGE_OBJECTS = 1024

Reading = tuple[int, ObjectReader | Exception]


def read_ahead(listing: Listing, order: Order, kind: ReaderConstructor) -> Iterator[Reading]:
    """Readers of objects, in this order, each with its number; an exception in place of what cannot be read."""
    manifest = listing.manifest()
    source = listing.source(manifest)
    if not kind.whole:
        return ((index, *listing.readers([index], kind)) for index in map(int, order))
    if source is None:
        return _by_threads(listing, order, kind)
    return _announced(source, order)


def read_while_listing(
    listing: Listing, pages: "_torchobj.ManifestPages", kind: ReaderConstructor, begin: int
) -> Iterator[Reading]:
    """Readers of the objects of a listing that is being made, from number `begin` on, page by page in its order."""
    before = 0
    for page in pages:
        skipped = min(len(page), max(0, begin - before))
        for index, reader in read_ahead(listing.of_page(page), in_order(len(page))[skipped:], kind):
            yield before + index, reader
        before += len(page)
    listing.keep(pages)


def _announced(source: "_torchobj.NativeSource", order: Order) -> Iterator[Reading]:
    iteration = _torchobj.NativeIteration(source)
    worker = torch.utils.data.get_worker_info()
    limit = iteration.budget() * AHEAD_SHARE / (1 if worker is None else worker.num_workers)
    groups = _groups(source, order, int(limit * _GROUP_SHARE))
    pending: collections.deque[tuple[list[int], int]] = collections.deque()
    announced = 0
    while True:
        fresh: list[int] = []
        while len(fresh) < _MESSAGE_OBJECTS and (not pending or announced < limit):
            group = next(groups, None)
            if group is None:
                break
            if pending:
                fresh += group[0]
            pending.append(group)
            announced += group[1]
        if not pending:
            return
        wanted, size = pending.popleft()
        announced -= size
        readers = iteration.read(wanted, fresh, True)  # noqa: FBT003  native, by position
        yield from _one_by_one(wanted, readers)


def _groups(source: "_torchobj.NativeSource", order: Order, most_bytes: int) -> Iterator[tuple[list[int], int]]:
    """What is asked for at once, with the memory that it takes."""
    group: list[int] = []
    size = 0
    for start in range(0, len(order), _GROUP_OBJECTS):
        indices = order[start : start + _GROUP_OBJECTS].tolist()
        for index, charge in zip(indices, source.charges(indices), strict=True):
            if group and (len(group) == _GROUP_OBJECTS or size + charge > most_bytes):
                yield group, size
                group, size = [], 0
            group.append(index)
            size += charge
    if group:
        yield group, size


def _one_by_one(indices: list[int], readers: list[Any]) -> Iterator[Reading]:
    # Nothing here holds what is used already.
    readers.reverse()
    for index in indices:
        yield index, readers.pop()


def _by_threads(listing: Listing, order: Order, kind: ReaderConstructor) -> Iterator[Reading]:
    coming: tuple[list[int], Future[list[Any]]] | None = None
    for start in range(0, len(order) + _GROUP_OBJECTS, _GROUP_OBJECTS):
        indices = order[start : start + _GROUP_OBJECTS].tolist()
        asked = (indices, _read_in_a_thread(listing, indices, kind)) if indices else None
        if coming is not None:
            yield from _one_by_one(coming[0], coming[1].result())
        coming = asked


def _read_in_a_thread(listing: Listing, indices: list[int], kind: ReaderConstructor) -> "Future[list[Any]]":
    """Reads in a thread for which nobody has to wait: an executor's is waited for by Ctrl-C and by the end."""
    coming: Future[list[Any]] = Future()

    def read() -> None:
        try:
            coming.set_result(listing.readers(indices, kind, return_errors=True))
        except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
            coming.set_exception(error)

    threading.Thread(target=read, name="torchobj-iterable", daemon=True).start()
    return coming
