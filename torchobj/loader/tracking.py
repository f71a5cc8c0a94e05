"""States of an iterable dataset, taken and restored in the process that iterates over it. Saves nothing.

torch's workers return batches, and nothing of the dataset that they were read from. So the loader gives torch's
iterator a `TrackedDataset` in place of its dataset, and a collation that adds to each batch the state behind it
(`Stamped`): the state belongs to the batch that it came with, whatever workers read ahead. A worker of a resumed pass
gets its own state with the dataset.

torch asks workers for batches in turn, from worker 0 on. A pass that was saved behind a batch of worker 2 goes on with
worker 3: workers 0 to 2 first return a placeholder batch, which the loader drops.

Some datasets reset their state when a pass ends, and the fetch of a partial last batch already draws the
`StopIteration`. So a state records whether its pass had ended: a resumed pass yields nothing of such a worker.
"""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.utils.data

from torchobj.stateful import is_stateful

__all__ = ["PassState", "Stamped", "TrackedDataset", "collating", "starting"]

_NOTHING = object()


class PassState(NamedTuple):
    """Where one process is in its pass over a dataset. Either state is None where there is no such method."""

    within: bool
    """Whether the pass goes on; False: the next one begins."""
    dataset: Any
    """What `dataset.state_dict()` returned."""
    iterator: Any
    """What that of its iterator did, where it is another object."""
    ended: bool = False
    """Whether the iterator had raised `StopIteration`. Earlier states lack it."""


class Stamped(NamedTuple):
    """A batch, and where its worker is behind it. A named tuple: torch pins the memory of its elements."""

    batch: Any
    worker: int
    """Number of the worker."""
    state: bytes | None
    """A pickled `PassState`; None for a placeholder batch."""


class TrackedDataset(torch.utils.data.IterableDataset[Any]):
    """A dataset whose state is taken from outside while it is iterated over.

    Args:
        dataset: An iterable dataset.
        states: Where each process begins its first pass: one for each worker, or one for the process of the loop.
        skipped: Workers below this number first yield a placeholder batch.
        batch_samples: Samples of a batch.
        drop_last: Whether torch drops a partial last batch of each worker.
    """

    def __init__(
        self,
        dataset: Any,
        states: list[PassState | None],
        skipped: int,
        batch_samples: int,
        *,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self._states, self._skipped, self._batch_samples = states, skipped, batch_samples
        self._most_dropped = batch_samples - 1 if drop_last else 0
        self._iterator: Any = None
        #: Called once, in the process of the loop, before the dataset is given its state.
        self.before_begin: Callable[[], None] | None = None
        self._samples: _Samples | None = None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        if self.before_begin is not None:
            self.before_begin()
            self.before_begin = None
        state, skips = self._states[number], number < self._skipped
        # The next pass of a worker that stays begins at its start.
        self._states, self._skipped = [None] * len(self._states), 0
        self._iterator = None
        self._iterator = _begun(self.dataset, state, self._most_dropped)
        self._samples = _Samples(self._iterator, self._batch_samples if skips else 0)
        return self._samples

    def state(self) -> PassState | None:
        """Where the pass is that was begun last in this process; None where nothing of it has a state."""
        own = self._iterator if self._iterator is not self.dataset and is_stateful(self._iterator) else None
        if own is None and not is_stateful(self.dataset):
            return None
        dataset = self.dataset.state_dict() if is_stateful(self.dataset) else None
        iterator = None if own is None else own.state_dict()
        ended = self._samples is not None and self._samples.ended
        return PassState(within=True, dataset=dataset, iterator=iterator, ended=ended)


class _Samples(Iterator[Any]):
    """The samples of a pass, after `placeholders`. Records the end.

    No generator: one ends with the first exception of a sample.
    """

    def __init__(self, iterator: Iterator[Any], placeholders: int) -> None:
        self._iterator, self._placeholders = iterator, placeholders
        self.ended = False

    def __next__(self) -> Any:
        if self._placeholders:
            self._placeholders -= 1
            return _NOTHING
        try:
            return next(self._iterator)
        except StopIteration:
            self.ended = True
            raise


def _begun(dataset: Any, state: PassState | None, most_dropped: int) -> Any:
    """An iterator of `dataset`, at `state`. See `_end_pass` for `most_dropped`."""
    if state is None:
        return iter(dataset)
    if state.within and not state.ended:
        return _loaded(dataset, state)
    _end_pass(dataset, state._replace(within=False), most_dropped)
    # Nothing is left of a pass that goes on; the next one begins where the dataset is now.
    return iter(()) if state.within else iter(dataset)


def _end_pass(dataset: Any, state: PassState, most_dropped: int) -> None:
    """Puts `dataset` where it was at the end of the pass of `state`: `iter` begins the next pass.

    Args:
        dataset: An iterable dataset.
        state: Of that end, or of the last full batch before it.
        most_dropped: Maximum number of samples that the pass drew behind its last full batch and dropped.
    """
    iterator = _loaded(dataset, state)
    with _undrawn():
        for _ in range(1 if state.ended else most_dropped + 1):
            try:
                next(iterator)
            except StopIteration:
                # The dataset continues from its state, and is at the end now.
                return
            except Exception:  # noqa: BLE001, S112  raised again when the next pass draws this sample
                continue
    # The dataset started over by itself: it has yielded samples of the next pass.
    _load(dataset, state)


def _loaded(dataset: Any, state: PassState) -> Any:
    _load(dataset, state)
    iterator = iter(dataset)
    if state.within and state.iterator is not None and is_stateful(iterator):
        iterator.load_state_dict(copy.deepcopy(state.iterator))
    return iterator


def _load(dataset: Any, state: PassState) -> None:
    # A copy: a dataset may go on to work with what it is given.
    if state.dataset is not None and is_stateful(dataset):
        dataset.load_state_dict(copy.deepcopy(state.dataset))


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def collating(dataset: TrackedDataset, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes batches in a worker: `collate_fn`, with the state of `dataset` behind each."""
    return functools.partial(_collate, dataset, collate_fn)


def _collate(dataset: TrackedDataset, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    info = torch.utils.data.get_worker_info()
    assert info is not None  # noqa: S101  called in workers only
    if (samples[0] if type(samples) is list and samples else samples) is _NOTHING:
        return Stamped(None, info.id, None)
    batch = collate_fn(samples)
    state = dataset.state()
    # By value: torch's queues would send the memory of each tensor of the state through a file of its own.
    return batch if state is None else Stamped(batch, info.id, pickle.dumps(state, pickle.HIGHEST_PROTOCOL))


def starting(worker_init_fn: Callable[[int], Any] | None) -> Callable[[int], None]:
    """What a worker calls first: `worker_init_fn`, which finds the dataset itself in `get_worker_info()`."""
    return functools.partial(_start, worker_init_fn)


def _start(worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, TrackedDataset):
        # It refuses to be assigned to.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)
