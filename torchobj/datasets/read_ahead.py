"""Reads objects ahead, in an order that the caller gives.

In the process that owns the prefetcher, and in its DataLoader workers, the next objects are announced within this
process's share of the memory budget, and the prefetcher reads them. Elsewhere a thread reads the next few objects.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader
from torchobj.datasets.dataset_reader import DatasetReader, Key, ManifestReader
from torchobj.datasets.listing import Listing
from torchobj.datasets.memory_budget import AHEAD_SHARE, budget_bytes
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.sharding import Order, in_order
from torchobj.manifest import Manifest

#: Number of objects per request to the prefetcher.
_GROUP_OBJECTS = 32

#: Share of the announced bytes that a worker requests at a time, and holds until they are used.
_GROUP_SHARE = 0.25

#: Number of objects announced per message, so that the first message of an epoch is fast.
_MESSAGE_OBJECTS = 1024

#: Number of iterators that share the part of this process, because a mixture reads from them in turn.
_iterators: ContextVar[int] = ContextVar("torchobj_iterators", default=1)

IndexedReader = tuple[int, ObjectReader | Exception]

#: Objects that are read by one call, and the memory that they need in bytes.
Group = tuple[list[Key], int]


def read_listed(reader: ManifestReader, order: Order, kind: ReaderConstructor) -> Iterator[IndexedReader]:
    """Readers of the objects of a manifest in this order, with their indices; exceptions in place of objects that
    cannot be read.
    """
    if not kind.whole:
        yield from ((index, reader.open(index, kind)) for index in map(int, order))
        return
    for indices, found in read_ahead(reader, lambda limit: _groups(reader, order, int(limit * _GROUP_SHARE))):
        # pop() drops the reference to a reader once it is used.
        readers = found
        readers.reverse()
        pid = os.getpid()
        for position, index in enumerate(indices):
            if os.getpid() != pid:
                # In a forked child: the parent reads other objects into this memory once it has used it.
                pid, readers = os.getpid(), reader.read(indices[position:])[::-1]
            yield index, readers.pop()


def read_while_listing(
    listing: Listing, pages: "_torchobj.ManifestPages", kind: ReaderConstructor, begin: int
) -> Iterator[IndexedReader]:
    """Readers of the objects of a listing in progress, from number `begin` on, page by page in its order."""
    before = 0
    for page in pages:
        skipped = min(len(page), max(0, begin - before))
        for index, reader in read_listed(listing.reader_of(Manifest(page)), in_order(len(page))[skipped:], kind):
            yield before + index, reader
        before += len(page)
    listing.keep(pages)


def read_ahead(
    reader: DatasetReader[Key], groups: Callable[[int], Iterator[Group[Key]]], max_bytes: int | None = None
) -> Iterator[tuple[list[Key], list[Any]]]:
    """Reads groups of objects in order, and announces those that follow within this process's part of the budget.

    Args:
        reader: Reads the objects.
        groups: Returns the groups, given the number of bytes read ahead.
        max_bytes: Maximum number of bytes read ahead. None: the part of the budget.

    Yields:
        Each group with its readers, or exceptions in place of objects that cannot be read.
    """
    source = reader.source()
    iterator = None if source is None else _torchobj.SourceIterator(source)
    share = _ahead_bytes(budget_bytes() if iterator is None else iterator.budget())
    limit = share if max_bytes is None else min(share, max_bytes)
    if iterator is None:
        return _in_threads(reader, groups(limit))
    return _announced(iterator, groups(limit), limit)


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


def _announced(
    iterator: "_torchobj.SourceIterator", groups: Iterator[Group[Any]], limit: int
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Reads groups of objects, of which at most `limit` bytes are announced and not read."""
    pending: collections.deque[Group[Any]] = collections.deque()
    announced = 0
    while True:
        to_announce: list[Any] = []
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
        keys, size = pending.popleft()
        announced -= size
        yield keys, iterator.read(keys, to_announce)


def _groups(reader: ManifestReader, order: Order, max_bytes: int) -> Iterator[Group[int]]:
    """The objects of each request."""
    source = reader.source()
    group: list[int] = []
    size = 0
    for start in range(0, len(order), _GROUP_OBJECTS):
        indices = order[start : start + _GROUP_OBJECTS].tolist()
        charges = [0] * len(indices) if source is None else source.charges(indices)
        for index, charge in zip(indices, charges, strict=True):
            if group and (len(group) == _GROUP_OBJECTS or size + charge > max_bytes):
                yield group, size
                group, size = [], 0
            group.append(index)
            size += charge
    if group:
        yield group, size


def _in_threads(reader: DatasetReader[Key], groups: Iterator[Group[Key]]) -> Iterator[tuple[list[Key], list[Any]]]:
    """Reads groups of objects in order, each while the one before it is used."""
    before: tuple[list[Key], Future[list[Any]]] | None = None
    for keys, _ in groups:
        following = (keys, _in_a_thread(reader, keys))
        if before is not None:
            yield before[0], before[1].result()
        before = following
    if before is not None:
        yield before[0], before[1].result()


def _in_a_thread(reader: DatasetReader[Key], keys: list[Key]) -> "Future[list[Any]]":
    """Reads in a daemon thread: threads of an executor would delay Ctrl-C and the exit of the process."""
    future: Future[list[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(reader.read(keys))
        except BaseException as error:  # noqa: BLE001  raised when the result is read
            future.set_exception(error)

    threading.Thread(target=run, name="torchobj-iterable", daemon=True).start()
    return future
