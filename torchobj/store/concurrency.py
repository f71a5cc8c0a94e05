"""Runs calls that wait for a store concurrently, for operations without a call for many objects."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

from torchobj import _torchobj

__all__ = ["CallPool", "call_each", "concurrently"]

#: Maximum number of concurrent calls. Each releases the GIL; the store limits its requests itself.
MAX_CALLS = 16

#: Pools of the main thread, which has ended when the interpreter waits for their threads.
_of_main_thread: "weakref.WeakSet[CallPool]" = weakref.WeakSet()


def _cancel_at_exit() -> None:
    for pool in list(_of_main_thread):
        pool.cancel()


# Before the interpreter waits for the threads of all executors: functions run in reverse order of their registration.
threading._register_atexit(_cancel_at_exit)  # type: ignore[attr-defined]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CallPool(ThreadPoolExecutor):
    """An executor whose running calls of stores end, and abort their uploads, when it is left by an interrupt.

    Its calls end as well with those of the thread that makes it, if that is one of another `CallPool`.

    Args:
        max_calls: Maximum number of concurrent calls.
        name: Prefix of the names of its threads.
    """

    def __init__(self, max_calls: int, name: str) -> None:
        self._cancellation = _torchobj.Cancellation()
        super().__init__(max_calls, name, initializer=self._cancellation.enter)
        if threading.current_thread() is threading.main_thread():
            _of_main_thread.add(self)

    def cancel(self) -> None:
        """Ends the running calls of stores: they raise SystemExit, as do further ones in the same threads."""
        self._cancellation.cancel()

    def leave(self, error: BaseException | None, *, waits: bool = True) -> None:
        """Starts no further calls, and waits for the running ones. An interrupt ends these."""
        if error is not None and not isinstance(error, (Exception, GeneratorExit)):
            self.cancel()
        self.shutdown(waits, cancel_futures=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)


def concurrently(
    function: Callable[[_Item], _Result], items: Iterable[_Item], max_calls: int = MAX_CALLS, *, waits: bool = True
) -> Iterator[tuple[_Item, _Result | Exception]]:
    """Calls a function with each item, up to `max_calls` at a time, and yields items with results as they complete.

    An exception is yielded in place of a result. If the caller stops, calls that did not start are not made, and the
    running ones are waited for, unless `waits` is false. An interrupt ends them, and aborts their uploads. A single
    call at a time is made in this thread.

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
    pool = CallPool(max_calls, "torchobj-concurrently")
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
    except BaseException as error:
        pool.leave(error, waits=waits)
        raise
    pool.leave(None)


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
