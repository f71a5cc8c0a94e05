"""The part of a loader's state that belongs to its iterable dataset.

A dataset or iterator with `state_dict` and `load_state_dict` is restored by them, in each worker by the state of that
worker. For any other, the batches that were already returned are read again and dropped.

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
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.utils.data

from torchobj.datasets.passes import UNCOUNTED, PassDataset, in_epoch
from torchobj.exceptions import ConfigError
from torchobj.loader.order.position import packed, preserved_rng, unpacked
from torchobj.loader.pass_setup import PassSetup
from torchobj.stateful import FailedState, checked, is_stateful
from torchobj.workers.shared_values import SharedNumber

logger = logging.getLogger("torchobj")


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
    """A pickled `PassState` or `FailedState`; None for a placeholder batch."""


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


def _collate(dataset: TrackedDataset, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """A batch of `collate_fn` in a worker, with the state of `dataset` after it."""
    info = torch.utils.data.get_worker_info()
    assert info is not None  # noqa: S101  called in workers only
    if (samples[0] if type(samples) is list and samples else samples) is _NOTHING:
        return BatchWithState(None, info.id, None)
    batch = collate_fn(samples)
    try:
        state: PassState | FailedState | None = dataset.state()
        # By value: torch's queues would send each tensor of the state through a shared-memory file of its own.
        pickled = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  raised when the state is requested
        state = FailedState.of(dataset.dataset, error)
        pickled = pickle.dumps(state)
    return batch if state is None else BatchWithState(batch, info.id, pickled)


def _show_dataset() -> None:
    """In a worker: `get_worker_info()` has the dataset of the user."""
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, TrackedDataset):
        # WorkerInfo does not allow assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)


class IterablePass:
    """One pass of a loader over its iterable dataset, with the position of each process after the batches that were
    returned.

    Args:
        loader: The loader.
        loaded: The state that was loaded for this pass.
        before: The previous pass of the same workers.
    """

    def __init__(
        self,
        loader: "torch.utils.data.DataLoader[Any]",
        loaded: Mapping[str, Any] | None,
        before: "IterablePass | None",
    ) -> None:
        #: The start of each process: one state per worker, or one for the process of the loop.
        states: list[Any] = _no_states(loader) if before is None else before.ended()
        #: Number of the worker that returned the last batch; -1 before the first batch.
        self.last_worker = -1
        found = None if loaded is None or _is_of_another_epoch(loader.dataset, loaded) else _saved(loaded)
        if found is not None:
            states, self.last_worker = found
            if len(states) != max(1, loader.num_workers):
                # Between epochs: each worker starts like the single process; states of several workers do not fit
                # others.
                states = states * loader.num_workers if len(states) == 1 else _no_states(loader)
        #: The epoch of the pass, which the workers read; None for datasets that do not count.
        self.epoch: SharedNumber | None = None
        if isinstance(loader.dataset, PassDataset):
            self.epoch = SharedNumber() if before is None or before.epoch is None else before.epoch
            self.epoch.set(loader.dataset.next_epoch())
        self.tracked = TrackedDataset(
            loader.dataset,
            states,
            self.last_worker + 1,
            loader.batch_size or 1,
            drop_last=loader.drop_last,
            epoch=self.epoch,
        )
        self._in_workers = loader.num_workers > 0
        #: Pickled, as received, until they are needed.
        self._states: list[PassState | FailedState | bytes | None] = list(states)

    def count(self) -> None:
        """Counts the pass, whose first batch is requested: some loops create an iterator that they never use."""
        if self.epoch is not None:
            self.tracked.dataset.count_pass(self.epoch.get())

    def end(self) -> None:
        """Called at the end of the pass."""
        if self.epoch is not None:
            self.tracked.dataset.end_pass()

    def track(self, setup: PassSetup) -> None:
        """Gives torch's iterator the tracked dataset, and batches that carry states."""
        setup.dataset = self.tracked
        if self._in_workers:
            setup.collate_fn = functools.partial(_collate, self.tracked, setup.collate_fn)
            setup.call_in_workers(_show_dataset)

    def record(self, batch: BatchWithState) -> None:
        """Records the position of the worker of a batch."""
        self.last_worker, self._states[batch.worker] = batch.worker, batch.state

    def states(self) -> list[PassState | FailedState | None]:
        """The position of each process after the last batch that was returned; None if it returned none."""
        if not self._in_workers:
            return [copy.deepcopy(self.tracked.state())]
        return [pickle.loads(state) if isinstance(state, bytes) else state for state in self._states]  # noqa: S301  of our own worker

    def ended(self) -> list[PassState | FailedState | None]:
        """The start of the next pass of each process."""
        return [state._replace(within=False) if isinstance(state, PassState) else state for state in self.states()]


def _no_states(loader: Any) -> list[PassState | None]:
    """No known state, for each process that iterates over the dataset."""
    return [None] * max(1, loader.num_workers)


def _is_of_another_epoch(dataset: Any, loaded: Mapping[str, Any]) -> bool:
    """Whether the loop has set another epoch since the state was loaded."""
    own = loaded["dataset"]
    return isinstance(own, Mapping) and own["epoch"] != dataset.state_dict()["epoch"]


def batches_to_replay(dataset: Any, loaded: Mapping[str, Any] | None) -> int:
    """Number of batches that the next pass reads again and drops."""
    if loaded is None or loaded["sampler"] is not None or _is_of_another_epoch(dataset, loaded):
        return 0
    batches: int = loaded["batches"]
    return batches


def iterable_position(loader: Any, latest: IterablePass | None, *, within_epoch: bool) -> dict[str, Any]:
    """The fields of a loader's state that belong to its iterable dataset.

    Args:
        loader: The loader.
        latest: The pass that was started last.
        within_epoch: Whether that pass continues and has returned a batch.
    """
    dataset, is_ours = loader.dataset, isinstance(loader.dataset, PassDataset)
    states: list[Any] = _no_states(loader)
    parent = None
    if latest is not None and within_epoch:
        states = latest.states()
    elif not is_ours and loader.num_workers == 0 and is_stateful(dataset):
        # Between passes a dataset may be at its end, or in its initial state.
        state = copy.deepcopy(dataset.state_dict())
        states = [PassState(within=latest is None, dataset=state, iterator=None, ended=latest is not None)]
    elif not is_ours and latest is not None and loader.persistent_workers:
        states = latest.ended()
    if not is_ours and loader.num_workers and is_stateful(dataset):
        parent = copy.deepcopy(dataset.state_dict())
    own = None
    if parent is not None or any(state is not None for state in states):
        workers = [None if state is None else tuple(checked(state)) for state in states]
        last_worker = latest.last_worker if latest is not None and within_epoch else -1
        own = packed({"dataset": parent, "workers": workers, "last_worker": last_worker})
    # The position within an epoch is in `sampler`, so that the keys of this dict are always the same.
    epoch = latest.epoch.get() if latest is not None and latest.epoch is not None and within_epoch else None
    ours = dataset.epoch_state(epoch) if is_ours else None
    return {"batch_size": loader.batch_size, "dataset": ours, "sampler": own}


def resume(loader: Any, state: Mapping[str, Any]) -> None:
    """Prepares the dataset of a loader for the pass of a state.

    Raises:
        ConfigError: Samples would be lost or repeated; names the field.
    """
    dataset, name = loader.dataset, type(loader.dataset).__name__
    own, num_workers = state.get("dataset"), loader.num_workers
    if isinstance(dataset, PassDataset) != isinstance(own, Mapping):
        raise ConfigError(f"dataset={own!r}: in the state; the dataset now is a {name}")
    saved = _saved(state)
    if state["within_epoch"]:
        now = {"num_workers": num_workers, "batch_size": loader.batch_size}
        if num_workers == 0 and saved is not None:
            del now["batch_size"]
        for field, value in now.items():
            before = state.get(field)
            # Negative if workers are persistent.
            if (abs(before) if isinstance(before, int) else before) != value:
                raise ConfigError(
                    f"{field}={state.get(field)!r}: in the state; now {value!r}, which changes the batches of a {name}"
                )
    if saved is not None:
        _check_saved(saved[0], state, dataset)
    elif state["within_epoch"]:
        _warn_of_replay(dataset, state["batches"])
    parent = None if saved is None else unpacked(state["sampler"], "sampler")["dataset"]
    if own is not None or parent is not None:
        dataset.load_state_dict(parent if own is None else own)


def _warn_of_replay(dataset: Any, batches: int) -> None:
    name = type(dataset).__name__
    reason = f"{name} has no state_dict and load_state_dict"
    if is_stateful(dataset):
        reason = f"the state of the loader contains no state of {name}"
    logger.warning("%s: %d batches are read again and dropped", reason, batches)


def _saved(state: Mapping[str, Any]) -> tuple[list[PassState | None], int] | None:
    """The state of each process, and the worker of the last batch.

    Raises:
        ConfigError: It cannot be read.
    """
    if state["sampler"] is None:
        return None
    found = unpacked(state["sampler"], "sampler")
    try:
        workers = [None if each is None else PassState(*each) for each in found["workers"]]
        last_worker = int(found["last_worker"])
        found["dataset"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"sampler={found!r}: not a state of an iterable dataset") from error
    return workers, last_worker


def _check_saved(states: list[PassState | None], state: Mapping[str, Any], dataset: Any) -> None:
    if len(states) != max(1, abs(int(state.get("num_workers") or 0))):
        raise ConfigError(
            f"sampler: contains the states of {len(states)} processes, but num_workers={state.get('num_workers')!r}"
        )
    if any(state is not None and state.dataset is not None for state in states) and not is_stateful(dataset):
        raise ConfigError(
            f"sampler: contains the state of a dataset; a {type(dataset).__name__} has no state_dict and "
            "load_state_dict"
        )
