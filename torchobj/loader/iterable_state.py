"""The part of a loader's state that belongs to its iterable dataset.

A dataset or iterator with `state_dict` and `load_state_dict` is restored by them, in each worker by the state of that
worker. For any other, the batches that were already returned are read again and dropped.

torch's workers return batches, but no state of their dataset. The loader therefore replaces the dataset of torch's
iterator by a `TrackedPass`, and adds to each batch the position after it. A position belongs to its batch, however far
workers have read ahead. In a resumed pass each worker receives its own position with the dataset.

torch requests batches from the workers in turn, starting with worker 0. A pass that was saved after a batch of worker 2
continues with worker 3: workers 0 to 2 first return a placeholder batch, which the loader drops.

Some datasets reset their state at the end of a pass, and fetching a partial last batch already raises `StopIteration`.
A position therefore records whether its pass had ended; such a worker yields nothing in the resumed pass.
"""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.data

from torchobj.datasets.passes import UNCOUNTED, DatasetPass, PassDataset, in_epoch, warn_of_replay
from torchobj.exceptions import ConfigError
from torchobj.loader.order.position import packed, preserved_rng, unpacked
from torchobj.loader.pass_setup import PassSetup
from torchobj.stateful import FailedState, Position, checked, is_stateful, load_state
from torchobj.workers.shared_values import SharedNumber

#: A sample of a placeholder batch.
_NOTHING = object()

#: The position of one process: whether its pass continues, or the next one starts; the states of the dataset, and of
#: its iterator if that is another object; and whether the iterator had raised `StopIteration`.
_FIELDS = ("within", "dataset", "iterator", "ended")


class TrackedPass(torch.utils.data.IterableDataset[Any]):
    """The pass of a loader over its iterable dataset, with the position of each process after the batches that were
    returned. torch's iterator and its workers have it as their dataset.

    Args:
        loader: The loader.
        loaded: The state that was loaded for this pass.
    """

    def __init__(self, loader: "torch.utils.data.DataLoader[Any]", loaded: Position | None) -> None:
        self.dataset: Any = loader.dataset
        self._in_workers = loader.num_workers > 0
        self._batch_samples = loader.batch_size or 1
        # Number of samples of a partial last batch that torch drops.
        self._max_dropped = self._batch_samples - 1 if loader.drop_last else 0
        #: Number of the worker that returned the last batch; -1 before the first batch.
        self.last_worker = -1
        # One for each worker, or one for the process of the loop; as received, until they are needed.
        self._positions: list[Any] = [None] * max(1, loader.num_workers)
        found = None
        if loaded is not None and not _is_of_another_epoch(self.dataset, loaded):
            found = _saved(loaded, self.dataset, _workers(loaded))
        if found is not None and len(found[0]) in (1, len(self._positions)):
            # Between epochs each worker may start like a single process; those of several workers do not fit others.
            self._positions, self.last_worker = found[0] * (len(self._positions) // len(found[0])), found[1]
        # The epoch of the pass, which the workers read; None for datasets that do not count.
        self.epoch = SharedNumber() if isinstance(self.dataset, PassDataset) else None
        self._set_epoch()
        # The pass of this process, and the samples of a placeholder batch that precede it.
        self._pass = DatasetPass(self.dataset)
        self._placeholders = 0

    def _set_epoch(self) -> None:
        if self.epoch is not None:
            self.epoch.set(self.dataset.next_epoch())

    def restart(self) -> None:
        """Begins the next pass, of the same workers."""
        self._positions, self.last_worker = self.ended(), -1
        self._set_epoch()

    def count(self) -> None:
        """Counts the pass, whose first batch is requested: some loops create an iterator that they never use."""
        if self.epoch is not None:
            self.dataset.count_pass(self.epoch.get())

    def end(self) -> None:
        """Called at the end of the pass."""
        if self.epoch is not None:
            self.dataset.end_pass()

    def track(self, setup: PassSetup) -> None:
        """Gives torch's iterator this dataset, and workers that return positions with their batches."""
        setup.dataset = self
        if self._in_workers:
            setup.collate_fn = functools.partial(self._collate, setup.collate_fn)
            setup.call_in_workers(_show_dataset)

    def record(self, worker: int, position: bytes) -> None:
        """Records the position of a worker after a batch that was returned."""
        self.last_worker, self._positions[worker] = worker, position

    def positions(self) -> list[Position | FailedState | None]:
        """The position of each process after the last batch that was returned; None if it returned none."""
        if not self._in_workers:
            return [copy.deepcopy(self._position())]
        return [pickle.loads(each) if isinstance(each, bytes) else each for each in self._positions]  # noqa: S301  of our own worker

    def ended(self) -> list[Position | FailedState | None]:
        """The start of the next pass of each process."""
        return [each | {"within": False} if isinstance(each, dict) else each for each in self.positions()]

    def _position(self) -> Position | None:
        """The position of this process; None if neither the dataset nor its iterator has a state."""
        if not self._pass.has_state:
            return None
        return {"within": True, **self._pass.position(), "ended": self._pass.ended}

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number = 0 if info is None else info.id
        position = self._positions[number]
        self._placeholders = self._batch_samples if number <= self.last_worker else 0
        # The next pass of a persistent worker starts at the beginning.
        self._positions, self.last_worker = [None] * len(self._positions), -1
        with in_epoch(UNCOUNTED if self.epoch is None else self.epoch.get()):
            self._start(position)
        # Not a generator, which would end with the first exception of a sample.
        return self

    def __next__(self) -> Any:
        if self._placeholders:
            self._placeholders -= 1
            return _NOTHING
        if self.epoch is not None:
            return next(self._pass)
        # A wrapper may start the pass of its dataset at the first sample.
        with in_epoch(UNCOUNTED):
            return next(self._pass)

    def _start(self, position: Position | None) -> None:
        """Starts the pass of this process."""
        if position is None or (position["within"] and not position["ended"]):
            self._pass.start(position)
            return
        self._end(position)
        if position["within"]:
            # Nothing is left of a pass that had ended.
            self._pass.iterator, self._pass.ended = iter(()), False
        else:
            # The next pass starts from the current state of the dataset.
            self._pass.start(None)

    def _end(self, position: Position) -> None:
        """Restores the dataset to the end of its pass. `position` is at that end, or after the last full batch."""
        self._pass.start({**position, "iterator": None})
        with preserved_rng():
            for _ in range(1 if position["ended"] else self._max_dropped + 1):
                try:
                    next(self._pass)
                except StopIteration:
                    # The dataset continues from its state, and is at the end now.
                    return
                except Exception:  # noqa: BLE001, S112  raised again when the next pass draws this sample
                    continue
        # The dataset restarted by itself and has yielded samples of the next pass.
        load_state(self.dataset, position["dataset"])

    def _collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> tuple[int, bytes | None, Any]:
        """In a worker: its number, its position after a batch, and the batch; no position for a placeholder."""
        info = torch.utils.data.get_worker_info()
        assert info is not None  # noqa: S101  called in workers only
        if (samples[0] if type(samples) is list and samples else samples) is _NOTHING:
            return info.id, None, None
        batch = collate_fn(samples)
        try:
            # By value: torch's queues would send each tensor of a state through a shared-memory file of its own.
            return info.id, pickle.dumps(self._position(), pickle.HIGHEST_PROTOCOL), batch
        except Exception as error:  # noqa: BLE001  raised when the state is requested
            return info.id, pickle.dumps(FailedState.of(self.dataset, error)), batch


def _show_dataset() -> None:
    """In a worker: `get_worker_info()` has the dataset of the user."""
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, TrackedPass):
        # WorkerInfo does not allow assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)


def _workers(state: Position) -> Any:
    """The number of workers in a state, which is negative if they are persistent."""
    workers = state.get("num_workers")
    return abs(workers) if isinstance(workers, int) else workers


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


def iterable_position(loader: Any, latest: TrackedPass | None, *, within_epoch: bool) -> Position:
    """The fields of a loader's state that belong to its iterable dataset.

    Args:
        loader: The loader.
        latest: The pass that was started last.
        within_epoch: Whether that pass continues and has returned a batch.
    """
    dataset, is_ours = loader.dataset, isinstance(loader.dataset, PassDataset)
    positions: list[Any] = []
    parent = None
    if latest is not None and within_epoch:
        positions = latest.positions()
    elif not is_ours and loader.num_workers == 0 and is_stateful(dataset):
        # Between passes a dataset may be at its end, or in its initial state.
        within, state = latest is None, copy.deepcopy(dataset.state_dict())
        positions = [{"within": within, "dataset": state, "iterator": None, "ended": not within}]
    elif not is_ours and latest is not None and loader.persistent_workers:
        positions = latest.ended()
    if not is_ours and loader.num_workers and is_stateful(dataset):
        parent = copy.deepcopy(dataset.state_dict())
    own = None
    if parent is not None or any(each is not None for each in positions):
        workers = [None if each is None else tuple(checked(each)[name] for name in _FIELDS) for each in positions]
        workers = workers or [None] * max(1, loader.num_workers)
        last_worker = latest.last_worker if latest is not None and within_epoch else -1
        own = packed({"dataset": parent, "workers": workers, "last_worker": last_worker})
    # The position within an epoch is in `sampler`, so that the keys of this dict are always the same.
    epoch = latest.epoch.get() if latest is not None and latest.epoch is not None and within_epoch else None
    ours = dataset.epoch_state(epoch) if is_ours else None
    return {"batch_size": loader.batch_size, "dataset": ours, "sampler": own}


def start(loader: Any, state: Position) -> None:
    """Prepares the dataset of a loader for the pass of a state.

    Raises:
        ConfigError: Samples would be lost or repeated; names the field.
    """
    dataset, name = loader.dataset, type(loader.dataset).__name__
    own, workers = state.get("dataset"), _workers(state)
    if isinstance(dataset, PassDataset) != isinstance(own, Mapping):
        raise ConfigError(f"dataset={own!r}: in the state; the dataset now is a {name}")
    saved = _saved(state, dataset, workers)
    if state["within_epoch"]:
        fields = [("num_workers", workers, loader.num_workers)]
        if loader.num_workers or saved is None:
            fields.append(("batch_size", state.get("batch_size"), loader.batch_size))
        for field, before, now in fields:
            if before != now:
                raise ConfigError(
                    f"{field}={before!r}: in the state; now {now!r}, which changes the batches of a {name}"
                )
        if saved is None:
            warn_of_replay(dataset, f"{state['batches']} batches")
    parent = own if saved is None or own is not None else saved[2]
    if parent is not None:
        dataset.load_state_dict(parent)


def _saved(state: Position, dataset: Any, workers: Any) -> tuple[list[Position | None], int, Any] | None:
    """The position of each process, the worker of the last batch, and the state of the dataset outside of workers.

    Raises:
        ConfigError: It cannot be read, or does not fit the dataset or the number of workers in the state.
    """
    if state["sampler"] is None:
        return None
    found = unpacked(state["sampler"], "sampler")
    try:
        positions = [None if each is None else dict(zip(_FIELDS, each, strict=True)) for each in found["workers"]]
        last_worker, parent = int(found["last_worker"]), found["dataset"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"sampler={found!r}: not a state of an iterable dataset") from error
    if len(positions) != (workers or 1):
        raise ConfigError(f"sampler: contains the states of {len(positions)} processes, but num_workers={workers!r}")
    if any(each is not None and each["dataset"] is not None for each in positions) and not is_stateful(dataset):
        raise ConfigError(
            f"sampler: contains the state of a dataset; a {type(dataset).__name__} has no state_dict and "
            "load_state_dict"
        )
    return positions, last_worker, parent
