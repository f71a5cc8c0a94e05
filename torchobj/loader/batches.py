"""What a loader gives the training loop: torch's iterator, with the place of the last batch that was handed out. Which
batches there are is torch's affair.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchobj.exceptions import ConfigError
from torchobj.loader.iterables import IterablePass
from torchobj.loader.state import Mark
from torchobj.loader.stats import Meter
from torchobj.loader.tracking import Stamped

__all__ = ["Batches", "Progress", "samples_in"]


def samples_in(batch: Any, batch_size: int | None, *, collated_by_default: bool) -> int:
    """How many samples a batch has; `batch_size` where that cannot be told.

    Torch's default collation makes lists, tuples and mappings of tensors that have one row for each sample. A list of
    any other collation, as of `collate_fn=list`, has one item for each sample.
    """
    if batch_size is None:
        return 1
    found = batch
    while isinstance(found, (Mapping, tuple, list)) and found:
        first = next(iter(found.values())) if isinstance(found, Mapping) else found[0]
        if isinstance(first, (str, bytes)) or (isinstance(found, list) and not collated_by_default):
            break
        found = first
    try:
        count = len(found)
    except TypeError:
        return batch_size
    return min(count, batch_size)


class Progress:
    """How far one pass has come, as the training loop sees it.

    The loader keeps it, and not the iterator: workers end when the loop drops that.
    """

    def __init__(self, initial: dict[str, Any]) -> None:
        #: The state before the first batch was asked for.
        self.initial = initial
        #: How often torch asked the sampler, and the loop for a batch.
        self.asked = 0
        #: The places behind the batches that torch asked for and did not hand out, and the samples in each.
        self.dispatched: deque[tuple[Mark, int]] = deque()
        #: The place behind the last one that was; None before the pass has begun.
        self.mark: Mark | None = None
        #: Batches that were handed out, with those that were passed over.
        self.batches = 0
        self.ended = False

    def dispatch(self, mark: Mark, samples: int) -> None:
        """Torch got the item in front of `mark`, so many indices."""
        if self.mark is None and mark.own is None:
            # From now on the order is drawn.
            self.mark = mark._replace(batches=mark.batches - 1)
        self.dispatched.append((mark, samples))

    def advance(self) -> int | None:
        """A batch was handed out, or the loop got its error. Returns its number of samples; None if unknown."""
        self.batches += 1
        if not self.dispatched:
            return None
        self.mark, samples = self.dispatched.popleft()
        return samples


class Batches(Iterator[Any]):
    """The batches of one pass; any other attribute is that of torch's iterator.

    Args:
        inner: torch's iterator.
        progress: What is kept up to date.
        meter: Counts what is handed out.
        samples_in: How many samples a batch of a dataset without a sampler has.
        started: When workers began to be started for this pass; None where none were.
        iterable: Told of the states that come with the batches of an iterable dataset.
        replayed: Number of batches that are read and dropped before the first: of a dataset without a state.
    """

    def __init__(
        self,
        inner: Any,
        progress: Progress,
        meter: Meter,
        *,
        samples_in: Callable[[Any], int],
        started: float | None = None,
        iterable: IterablePass | None = None,
        replayed: int = 0,
    ) -> None:
        self._inner, self._progress, self._iterable = inner, progress, iterable
        self._replayed, self._left = replayed, replayed
        self._meter, self._samples_in, self._started = meter, samples_in, started
        self._ends_workers = started is not None and not getattr(inner, "_persistent_workers", False)
        self._handed_at: float | None = None

    def __next__(self) -> Any:
        progress = self._progress
        progress.asked += 1
        asked, asked_at = progress.asked, time.perf_counter()
        try:
            self._replay()
            batch = self._next()
        except StopIteration:
            progress.ended = True
            if self._ends_workers and self._started is None:
                self._started = asked_at
            self._handed_at = self._ended(asked_at, 0)
            raise
        except BaseException:
            # torch asks for another batch when one has come, and only then: this one's turn is over.
            if progress.asked != asked:
                progress.advance()
            raise
        samples = progress.advance()
        self._handed_at = self._ended(asked_at, self._samples_in(batch) if samples is None else samples)
        return batch

    def _replay(self) -> None:
        while self._left:
            try:
                self._next()
            except StopIteration:
                raise ConfigError(
                    f"batches={self._replayed}: of the state; the iterable dataset now ends after "
                    f"{self._replayed - self._left}, and what follows cannot be found: resume with a dataset that "
                    "yields the same samples again, or that has state_dict and load_state_dict"
                ) from None
            self._left -= 1

    def _next(self) -> Any:
        while isinstance(batch := next(self._inner), Stamped):
            if batch.state is not None and self._iterable is not None:
                self._iterable.hand_out(batch)
                return batch.batch
        return batch

    def _ended(self, asked_at: float, samples: int) -> float:
        started, self._started = self._started, None
        return self._meter.ended(asked_at, self._handed_at, samples, started=started)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)
