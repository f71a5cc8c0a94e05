"""Takes and restores the state of an iterable dataset in the process that iterates over it. Saves nothing.

torch's workers return batches, but no state of their dataset. The loader therefore replaces the dataset of torch's
iterator by a `TrackedDataset`, and adds to each batch the state after it (`BatchWithState`). A state belongs to its
batch, however far workers have read ahead. In a resumed pass each worker receives its own state with the dataset.

torch requests batches from the workers in turn, starting with worker 0. A pass that was saved after a batch of worker 2
continues with worker 3: workers 0 to 2 first return a placeholder batch, which the loader drops.

Some datasets reset their state at the end of a pass, and fetching a partial last batch already raises `StopIteration`.
A state therefore records whether its pass had ended; such a worker yields nothing in the resumed pass.
"""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.utils.data

from torchobj.datasets.passes import UNCOUNTED, in_epoch
from torchobj.datasets.shared_values import SharedNumber
from torchobj.loader.sampler_state import preserved_rng
from torchobj.stateful import is_stateful

__all__ = ["BatchWithState", "PassState", "TrackedDataset", "collate_with_state", "init_worker"]

_NOTHING = object()


class PassState(NamedTuple):
    """The position of one process in its pass over a dataset. A state is None if the object has no `state_dict`."""

    within: bool
    """Whether the pass continues; False: the next pass starts."""
    dataset: Any
    """The return value of `dataset.state_dict()`."""
    iterator: Any
    """The same for its iterator, if that is another object."""
    ended: bool
    """Whether the iterator had raised `StopIteration`."""


class BatchWithState(NamedTuple):
    """A batch, and the position of its worker after it. A named tuple, because torch pins the memory of its
    elements.
    """

    batch: Any
    worker: int
    """Number of the worker."""
    state: bytes | None
    """A pickled `PassState`; None for a placeholder batch."""


class TrackedDataset(torch.utils.data.IterableDataset[Any]):
    """Wraps a dataset so that its state can be taken during an iteration.

    Args:
        dataset: An iterable dataset.
        states: Start of the first pass of each process: one state per worker, or one for the process of the loop.
        skipped: Workers below this number first yield a placeholder batch.
        batch_samples: Number of samples per batch.
        drop_last: Whether torch drops a partial last batch of each worker.
        epoch: The epoch of a pass; None if the loader does not count them.
    """

    def __init__(
        self,
        dataset: Any,
        states: list[PassState | None],
        skipped: int,
        batch_samples: int,
        *,
        drop_last: bool,
        epoch: SharedNumber | None,
    ) -> None:
        self.dataset, self._epoch = dataset, epoch
        self._states, self._skipped, self._batch_samples = states, skipped, batch_samples
        self._max_dropped = batch_samples - 1 if drop_last else 0
        self._iterator: Any = None
        self._samples: _Samples | None = None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        state, skips = self._states[number], number < self._skipped
        # The next pass of a persistent worker starts at the beginning.
        self._states, self._skipped = [None] * len(self._states), 0
        self._iterator = None
        epoch = UNCOUNTED if self._epoch is None else self._epoch.get()
        with in_epoch(epoch):
            self._iterator = _iterator_at(self.dataset, state, self._max_dropped)
        self._samples = _Samples(self._iterator, self._batch_samples if skips else 0, epoch)
        return self._samples

    def state(self) -> PassState | None:
        """The position of the pass that was started last in this process; None if neither object has a state."""
        own = self._iterator if self._iterator is not self.dataset and is_stateful(self._iterator) else None
        if own is None and not is_stateful(self.dataset):
            return None
        dataset = self.dataset.state_dict() if is_stateful(self.dataset) else None
        iterator = None if own is None else own.state_dict()
        ended = self._samples is not None and self._samples.ended
        return PassState(within=True, dataset=dataset, iterator=iterator, ended=ended)


class _Samples(Iterator[Any]):
    """The samples of a pass of `epoch`, after `placeholders`. Records the end.

    Not a generator, which would end with the first exception of a sample.
    """

    def __init__(self, iterator: Iterator[Any], placeholders: int, epoch: int) -> None:
        self._iterator, self._placeholders, self._epoch = iterator, placeholders, epoch
        self.ended = False

    def __next__(self) -> Any:
        if self._placeholders:
            self._placeholders -= 1
            return _NOTHING
        try:
            if self._epoch != UNCOUNTED:
                return next(self._iterator)
            # A wrapper may start the pass of its dataset at the first sample.
            with in_epoch(UNCOUNTED):
                return next(self._iterator)
        except StopIteration:
            self.ended = True
            raise


def _iterator_at(dataset: Any, state: PassState | None, max_dropped: int) -> Any:
    """An iterator of `dataset`, at `state`. See `_end_pass` for `max_dropped`."""
    if state is None:
        return iter(dataset)
    if state.within and not state.ended:
        return _loaded(dataset, state)
    _end_pass(dataset, state._replace(within=False), max_dropped)
    # Nothing is left of a pass that had ended; the next pass starts from the current state of the dataset.
    return iter(()) if state.within else iter(dataset)


def _end_pass(dataset: Any, state: PassState, max_dropped: int) -> None:
    """Restores `dataset` to the end of the pass of `state`, so that `iter` starts the next pass.

    Args:
        dataset: An iterable dataset.
        state: The state at that end, or after the last full batch before it.
        max_dropped: Maximum number of samples that were drawn after the last full batch and dropped.
    """
    iterator = _loaded(dataset, state)
    with preserved_rng(None):
        for _ in range(1 if state.ended else max_dropped + 1):
            try:
                next(iterator)
            except StopIteration:
                # The dataset continues from its state, and is at the end now.
                return
            except Exception:  # noqa: BLE001, S112  raised again when the next pass draws this sample
                continue
    # The dataset restarted by itself and has yielded samples of the next pass.
    _load(dataset, state)


def _loaded(dataset: Any, state: PassState) -> Any:
    _load(dataset, state)
    iterator = iter(dataset)
    if state.within and state.iterator is not None and is_stateful(iterator):
        iterator.load_state_dict(copy.deepcopy(state.iterator))
    return iterator


def _load(dataset: Any, state: PassState) -> None:
    # A copy, because a dataset may modify the object it is given.
    if state.dataset is not None and is_stateful(dataset):
        dataset.load_state_dict(copy.deepcopy(state.dataset))


def collate_with_state(dataset: TrackedDataset, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A collation for workers: `collate_fn`, with the state of `dataset` added to each batch."""
    return functools.partial(_collate, dataset, collate_fn)


def _collate(dataset: TrackedDataset, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    info = torch.utils.data.get_worker_info()
    assert info is not None  # noqa: S101  called in workers only
    if (samples[0] if type(samples) is list and samples else samples) is _NOTHING:
        return BatchWithState(None, info.id, None)
    batch = collate_fn(samples)
    state = dataset.state()
    # By value: torch's queues would send each tensor of the state through a shared-memory file of its own.
    return batch if state is None else BatchWithState(batch, info.id, pickle.dumps(state, pickle.HIGHEST_PROTOCOL))


def init_worker(worker_init_fn: Callable[[int], Any] | None) -> Callable[[int], None]:
    """The first call in a worker: `worker_init_fn`, which sees the original dataset in `get_worker_info()`."""
    return functools.partial(_start, worker_init_fn)


def _start(worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, TrackedDataset):
        # WorkerInfo does not allow assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)
