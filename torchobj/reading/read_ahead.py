"""Reads objects ahead, in an order that the caller gives.

In the process that owns the prefetcher, and in its DataLoader workers, the next objects are announced within this
process's share of the memory budget, and the prefetcher reads them. Elsewhere a thread reads the next few objects.
"""

import collections
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

import torch.utils.data

from torchobj import _torchobj
from torchobj.reading.reader import DatasetReader, Key
from torchobj.workers.context import setting
from torchobj.workers.memory_budget import AHEAD_SHARE, budget_bytes
from torchobj.workers.shared_values import of_loader

#: Number of objects announced per message, so that the first message of an epoch is fast.
_MESSAGE_OBJECTS = 1024

#: Number of iterators that share the part of this process, because a mixture reads from them in turn.
_iterators: ContextVar[int] = ContextVar("torchobj_iterators", default=1)

#: Number of forks from the process that imported this module to this one.
_forks = 0


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  state of the process
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

_Item = TypeVar("_Item")


class Group(NamedTuple, Generic[Key]):
    """Objects that are read by one call."""

    keys: list[Key]
    size: int
    """The memory that they need, in bytes."""
    content: Any = None
    """What the caller reads them for."""


def grouped(sized: Iterable[tuple[_Item, int]], max_items: int, max_bytes: int) -> Iterator[tuple[list[_Item], int]]:
    """Groups of consecutive items, which are given with their sizes, with the size of each group. An item that is
    larger than `max_bytes` is a group.
    """
    group: list[_Item] = []
    total = 0
    for item, size in sized:
        if group and (len(group) == max_items or total + size > max_bytes):
            yield group, total
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group, total


def read_ahead(
    reader: DatasetReader[Key], groups: Callable[[int], Iterator[Group[Key]]], max_bytes: int | None = None
) -> Iterator[tuple[Group[Key], Iterator[Any]]]:
    """Reads groups of objects in order, and announces those that follow within this process's part of the budget.

    Args:
        reader: Reads the objects.
        groups: Returns the groups, given the number of bytes read ahead.
        max_bytes: Maximum number of bytes read ahead. None: the part of the budget.

    Yields:
        Each group with an iterator of its readers, or exceptions in place of objects that cannot be read. A forked
        child reads the rest of the group again.
    """
    source = reader.source()
    iterator = None if source is None else _torchobj.SourceIterator(source)
    share = _ahead_bytes(budget_bytes() if iterator is None else iterator.budget())
    limit = share if max_bytes is None else min(share, max_bytes)
    if iterator is None:
        read = _in_threads(reader, groups(limit))
    else:
        read = _announced(iterator, groups(limit), limit, by_budget=limit == share)
    return ((group, _readers(reader, group.keys, found, _forks)) for group, found in read)


def _readers(reader: DatasetReader[Key], keys: list[Key], found: list[Any], forks: int) -> Iterator[Any]:
    """The readers, read after this number of forks. One that is used is not referenced here."""
    found.reverse()
    for number in range(len(keys)):
        if _forks != forks:
            # The parent reads other objects into this memory once it has used it.
            forks, found = _forks, reader.read(keys[number:])[::-1]
        yield found.pop()


def _ahead_bytes(budget: int) -> int:
    """The part of the memory budget, in bytes, that an iterator may announce: its share of that of its process."""
    worker = torch.utils.data.get_worker_info()
    return int(budget * AHEAD_SHARE / (1 if worker is None else worker.num_workers) / _iterators.get())


def sharing(iterators: int) -> AbstractContextManager[None]:
    """Within the block, iterators that start to read are some of `iterators` from which a mixture reads in turn."""
    return setting(_iterators, _iterators.get() * iterators)


def _announced(
    iterator: "_torchobj.SourceIterator", groups: Iterator[Group[Any]], limit: int, *, by_budget: bool
) -> Iterator[tuple[Group[Any], list[Any]]]:
    """Reads groups of objects, of which at most `limit` bytes are announced and not read. With `by_budget` this limit
    is that of the memory budget.
    """
    pending: collections.deque[Group[Any]] = collections.deque()
    announced = 0
    while True:
        to_announce: list[Any] = []
        while len(to_announce) < _MESSAGE_OBJECTS and (not pending or announced < limit):
            group = next(groups, None)
            if group is None:
                break
            if pending:
                to_announce += group.keys
            pending.append(group)
            announced += group.size
        if not pending:
            return
        if by_budget and announced >= limit and (counters := of_loader()) is not None:
            counters.limited.add(len(pending[0].keys))
        group = pending.popleft()
        announced -= group.size
        yield group, iterator.read(group.keys, to_announce)


def _in_threads(reader: DatasetReader[Key], groups: Iterator[Group[Key]]) -> Iterator[tuple[Group[Key], list[Any]]]:
    """Reads groups of objects in order, each while the one before it is used."""
    begun = ((group, _in_a_thread(reader, group.keys), _forks) for group in groups)
    for each, _ in itertools.pairwise(itertools.chain(begun, [None])):
        if each is not None:
            group, reading, forks = each
            # A forked child does not have the thread.
            yield group, reading.result() if forks == _forks else reader.read(group.keys)


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
