"""Runs calls that wait for the store concurrently, for operations of fsspec without a call for many objects."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["concurrently"]

#: Maximum number of concurrent calls. Each releases the GIL; the store limits its requests itself.
MAX_CALLS = 16

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def concurrently(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[tuple[_Item, _Result | Exception]]:
    """Calls a function with each item, up to `MAX_CALLS` at a time, and yields items with results as they complete.

    An exception is yielded in place of a result. If the caller stops, calls that did not start are not made.

    Example:
        >>> sorted(concurrently(len, ["a", "bcd"]))
        [('a', 1), ('bcd', 3)]
    """
    remaining = iter(items)
    first = list(itertools.islice(remaining, 2))
    if len(first) < 2:
        for item in first:
            yield item, _outcome(function, item)
        return
    with ThreadPoolExecutor(MAX_CALLS, "torchobj-fsspec") as pool:
        running: dict[Future[_Result | Exception], _Item] = {}
        queue = itertools.chain(first, remaining)
        try:
            for item in itertools.islice(queue, MAX_CALLS):
                running[pool.submit(_outcome, function, item)] = item
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    item = running.pop(future)
                    for next_item in itertools.islice(queue, 1):
                        running[pool.submit(_outcome, function, next_item)] = next_item
                    yield item, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _outcome(function: Callable[[_Item], _Result], item: _Item) -> _Result | Exception:
    try:
        return function(item)
    except Exception as error:  # noqa: BLE001  the caller decides
        return error
