"""The iterators that loaders return: torch's iterator, with statistics and the position of the last batch that it
returned. torch decides which batches there are.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import default_collate

from torchobj.exceptions import ConfigError
from torchobj.loader.import_timer import Imported, imported
from torchobj.loader.iterable_state import TrackedPass
from torchobj.loader.order.position import Order, within_pass
from torchobj.stateful import Position
from torchobj.telemetry.ranges import profiled

_NOTHING = object()

#: Maximum number of containers within each other in which the rows of a batch are looked for: one may contain itself.
_MAX_NESTED = 16


def samples_in(batch: Any, batch_size: int | None, *, collated_by_default: bool, is_batched: bool = False) -> int:
    """Number of samples of a batch, at most `batch_size`; `batch_size` if it cannot be determined.

    Without `batch_size` it is one sample, or, if it is of a batch sampler, a batch of any size.

    torch's default collation returns lists, tuples and mappings of tensors with one row per sample. A list from any
    other collation, such as `collate_fn=list`, has one item per sample.
    """
    if batch_size is None and not is_batched:
        return 1
    try:
        count = len(_rows_of(batch, collated_by_default=collated_by_default))
    except Exception:  # noqa: BLE001  a batch of users may raise anything at any access
        return batch_size or 1
    return min(count, batch_size or count)


def _rows_of(batch: Any, *, collated_by_default: bool) -> Any:
    """What has one row or item per sample of a batch."""
    found = batch
    for _ in range(_MAX_NESTED):
        if not isinstance(found, (Mapping, tuple, list)):
            break
        first = next(iter(found.values() if isinstance(found, Mapping) else found), _NOTHING)
        is_of_samples = isinstance(found, list) and not collated_by_default
        if first is _NOTHING or isinstance(first, (str, bytes)) or is_of_samples:
            break
        found = first
    return found


class LoaderPass:
    """One pass of a loader, as the training loop sees it: the number of batches that were returned, and the position
    after the last one.

    It belongs to the loader and not to the iterator, because workers stop when the loop drops the iterator.

    Args:
        start: The position before the first batch was requested.
    """

    def __init__(self, start: Position) -> None:
        self._start = start
        #: Number of batches returned, including those skipped on resume.
        self.batches: int = start["batches"]
        #: Number of requests for an item of the sampler or for a batch.
        self.requested = 0
        self.ended = False
        # The sampler, and the origin of its order, once an item of it was requested. Not the order, whose iterator may
        # have the indices of all samples.
        self._sampler: Any = None
        self._origin: Position | None = None
        self._has_state = False
        # The state of the order after the last batch that was returned, if there is one.
        self._state: Any = None
        # The states after the batches that torch has requested and not returned, with their numbers of samples.
        self._dispatched: deque[tuple[Any, int]] = deque()

    def dispatch(self, order: Order, samples: int, state: Any) -> None:
        """Records that torch received an item of `samples` indices, and the state of the order after it."""
        if self._origin is None:
            assert order.origin is not None  # noqa: S101  an item was drawn
            self._sampler, self._origin, self._has_state = order.sampler, order.origin, order.has_state
            self.batches = order.origin["batches"]
        self._dispatched.append((state, samples))

    def advance(self) -> int | None:
        """Records that a batch, or its error, was returned. Returns its number of samples; None if unknown."""
        self.batches += 1
        if not self._dispatched:
            return None
        self._state, samples = self._dispatched.popleft()
        return samples

    def position(self) -> Position:
        """The position in the order of a sampler after the last batch that was returned."""
        if self._origin is None or (self._has_state and self._state is None):
            return self._start
        return within_pass(self._sampler, self._origin, self.batches, self._state)


class MeteredIterator(Iterator[Any]):
    """The batches of one pass, counted. Other attributes are those of torch's iterator.

    Args:
        inner: torch's iterator.
        loader: The loader, whose `_meter` counts the batches. The iterator may be of a copy of it.
        started: Time at which workers began to be started for this pass; None if none were started.
    """

    def __init__(self, inner: Any, loader: Any, *, started: float | None) -> None:
        self._inner, self._meter, self._started = inner, loader._meter, started
        self._batch_size, self._collated_by_default = loader.batch_size, loader.collate_fn is default_collate
        self._is_batched = loader.batch_sampler is not None
        workers = getattr(inner, "_num_workers", 0)
        self._meter.begin(workers)
        self._reads_here = not workers
        self._ends_workers = started is not None and not getattr(inner, "_persistent_workers", False)
        self._returned_at: float | None = None

    def __next__(self) -> Any:
        requested_at, before = time.perf_counter(), imported()
        try:
            with profiled("torchobj.next_batch"):
                batch = self._next()
        except StopIteration:
            if self._ends_workers and self._started is None:
                self._started = requested_at
            self._record(requested_at, before, 0)
            raise
        self._record(requested_at, before, self._count(batch))
        return batch

    def _next(self) -> Any:
        if self._reads_here:
            with self._meter.reading():
                return next(self._inner)
        return next(self._inner)

    def _count(self, batch: Any) -> int:
        """The number of samples of the batch that is returned."""
        by_default, is_batched = self._collated_by_default, self._is_batched
        return samples_in(batch, self._batch_size, collated_by_default=by_default, is_batched=is_batched)

    def _record(self, requested_at: float, before: Imported, samples: int) -> None:
        started, self._started = self._started, None
        self._returned_at = self._meter.record(
            requested_at, self._returned_at, samples, started=started, importing=imported().since(before)
        )

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


class LoaderIterator(MeteredIterator):
    """The batches of one pass, with the position of the last one.

    Args:
        inner, loader, started: As for `MeteredIterator`.
        loader_pass: Updated with each batch.
        tracked: Receives the positions that arrive with the batches of an iterable dataset.
        replayed: Number of batches that are read and dropped first, for a dataset without a state.
    """

    def __init__(
        self,
        inner: Any,
        loader: Any,
        loader_pass: LoaderPass,
        *,
        started: float | None,
        tracked: TrackedPass | None,
        replayed: int,
    ) -> None:
        super().__init__(inner, loader, started=started)
        self._pass, self._tracked, self._replayed, self._left = loader_pass, tracked, replayed, replayed

    def __next__(self) -> Any:
        current, tracked = self._pass, self._tracked
        current.requested += 1
        requested = current.requested
        if requested == 1 and tracked is not None:
            tracked.count()
        try:
            return super().__next__()
        except StopIteration:
            current.ended = True
            if tracked is not None:
                tracked.end()
            raise
        except BaseException:
            # torch requests another batch only when one has arrived: this one counts as returned.
            if current.requested != requested:
                current.advance()
            raise

    def _next(self) -> Any:
        while self._left:
            try:
                self._next_tracked()
            except StopIteration:
                raise ConfigError(
                    f"batches={self._replayed}: in the state; the iterable dataset now ends after "
                    f"{self._replayed - self._left}: resume with a dataset that yields the same samples again, or that "
                    "has state_dict and load_state_dict"
                ) from None
            self._left -= 1
        return self._next_tracked()

    def _next_tracked(self) -> Any:
        if self._tracked is None or self._reads_here:
            return super()._next()
        while True:
            worker, position, batch = super()._next()
            # None of a placeholder.
            if position is not None:
                self._tracked.record(worker, position)
                return batch

    def _count(self, batch: Any) -> int:
        samples = self._pass.advance()
        return super()._count(batch) if samples is None else samples
