"""Runs calls that wait for a store concurrently, for operations without a call for many objects."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["call_each", "concurrently"]

#: Maximum number of concurrent calls. Each releases the GIL; the store limits its requests itself.
MAX_CALLS = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def concurrently(
    function: Callable[[_Item], _Result], items: Iterable[_Item], max_calls: int = MAX_CALLS, *, waits: bool = True
) -> Iterator[tuple[_Item, _Result | Exception]]:
    """Calls a function with each item, up to `max_calls` at a time, and yields items with results as they complete.

    An exception is yielded in place of a result. If the caller stops, calls that did not start are not made, and the
    running ones are waited for, unless `waits` is false. A single call at a time is made in this thread.

    Example:
        >>> sorted(concurrently(len, ["a", "bcd"]))
        [('a', 1), ('bcd', 3)]
    """
    remaining = iter(items)
    first = list(itertools.islice(remaining, 2))
    queue = itertools.chain(first, remaining)
    if max_calls == 1 or len(first) < 2:
        for item in queue:
            yield item, _outcome(function, item)
        return
    pool = ThreadPoolExecutor(max_calls, "torchobj-concurrently")
    running: dict[Future[_Result | Exception], _Item] = {}
    try:
        for item in itertools.islice(queue, max_calls):
            running[pool.submit(_outcome, function, item)] = item
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                item = running.pop(future)
                for next_item in itertools.islice(queue, 1):
                    running[pool.submit(_outcome, function, next_item)] = next_item
                yield item, future.result()
    finally:
        pool.shutdown(waits, cancel_futures=True)


def call_each(function: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Calls a function with each item concurrently. Raises the first error; calls that did not start are not made."""
    for _, outcome in concurrently(function, items):
        if isinstance(outcome, Exception):
            raise outcome


def _outcome(function: Callable[[_Item], _Result], item: _Item) -> _Result | Exception:
    try:
        return function(item)
    except Exception as error:  # noqa: BLE001  the caller decides
        return error
