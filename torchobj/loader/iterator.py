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
from torchobj.loader.iterable_state import BatchWithState, IterablePass
from torchobj.loader.order.position import PassPosition
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


class Progress:
    """The progress of one pass, as seen by the training loop.

    It belongs to the loader and not to the iterator, because workers stop when the loop drops the iterator.
    """

    def __init__(self, initial: dict[str, Any]) -> None:
        #: The state before the first batch was requested.
        self.initial = initial
        #: Number of requests for an item of the sampler or for a batch.
        self.requested = 0
        #: Positions after the batches that torch has requested and not returned, with their numbers of samples.
        self.dispatched: deque[tuple[PassPosition, int]] = deque()
        #: Position after the last batch that was returned; None before the pass has started.
        self.mark: PassPosition | None = None
        #: Number of batches returned, including those skipped on resume.
        self.batches = 0
        self.ended = False

    def dispatch(self, mark: PassPosition, samples: int) -> None:
        """Records that torch received the item before `mark`, with `samples` indices."""
        if self.mark is None and mark.own is None:
            # The order is drawn from here on.
            self.mark = mark._replace(batches=mark.batches - 1)
        self.dispatched.append((mark, samples))

    def advance(self) -> int | None:
        """Records that a batch, or its error, was returned. Returns its number of samples; None if unknown."""
        self.batches += 1
        if not self.dispatched:
            return None
        self.mark, samples = self.dispatched.popleft()
        return samples


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
        progress: Updated with each batch.
        iterable: Receives the states that arrive with the batches of an iterable dataset.
        batches_to_replay: Number of batches that are read and dropped first, for a dataset without a state.
    """

    def __init__(
        self,
        inner: Any,
        loader: Any,
        progress: Progress,
        *,
        started: float | None,
        iterable: IterablePass | None,
        batches_to_replay: int,
    ) -> None:
        super().__init__(inner, loader, started=started)
        self._progress, self._iterable = progress, iterable
        self._replayed, self._left = batches_to_replay, batches_to_replay

    def __next__(self) -> Any:
        progress = self._progress
        progress.requested += 1
        requested = progress.requested
        if requested == 1 and self._iterable is not None:
            self._iterable.count()
        try:
            return super().__next__()
        except StopIteration:
            progress.ended = True
            if self._iterable is not None:
                self._iterable.end()
            raise
        except BaseException:
            # torch requests another batch only when one has arrived: this one counts as returned.
            if progress.requested != requested:
                progress.advance()
            raise

    def _replay(self) -> None:
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

    def _next(self) -> Any:
        self._replay()
        return self._next_tracked()

    def _next_tracked(self) -> Any:
        while isinstance(batch := super()._next(), BatchWithState):
            if batch.state is not None and self._iterable is not None:
                self._iterable.record(batch)
                return batch.batch
        return batch

    def _count(self, batch: Any) -> int:
        samples = self._progress.advance()
        return super()._count(batch) if samples is None else samples
